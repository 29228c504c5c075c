"""What of a model of transformers cannot be trained under context parallelism, said before training starts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

_ROPE_TYPES = frozenset({"default", "linear", "yarn", "llama3", "proportional"})
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
_DROPOUT_SETTINGS = ("attention_dropout", "attn_pdrop", "attn_dropout", "attention_probs_dropout_prob")
_MIXING_CLASS = re.compile(
    r"Mamba|SSM(?![a-z])|DeltaNet|LinearAttention|LightningAttention|Retention|Recurrent|ShortConv|Rwkv"
)


def check_model(model: Any, name: str, *, training: bool = True) -> None:
    """Refuse a model whose attention, or what else mixes its positions, is not what `core_attention` computes.

    Args:
        model: a `PreTrainedModel` that is part of no other.
        name: its name within the module that is trained.
        training: whether dropout counts.

    Raises:
        ValueError: the first thing that is in the way, and what to do.
    """
    for sentence in _objections(model, training):
        raise ValueError(f"{name} ({type(model).__name__}) cannot be trained under context parallelism: {sentence}")


def _objections(model: Any, training: bool) -> Iterator[str]:
    config = model.config
    yield from _of_kind(config)
    yield from _of_layers(model, config)
    yield from _of_scores(model, config, training)
    yield from _of_positions(config)
    if not getattr(model, "_supports_attention_backend", False) or not _takes_another_attention(model):
        yield (
            "it does not get its attention from transformers' AttentionInterface (_supports_attention_backend); take "
            "a model that does"
        )


def _of_kind(config: Any) -> Iterator[str]:
    """What the model is."""
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        yield "it attends to the output of an encoder; only decoders that attend to themselves are possible"
    names = [name for name in getattr(config, "sub_configs", {}) if hasattr(getattr(config, name), "num_hidden_layers")]
    if names:
        yield (
            f"it has models of its own for {', '.join(names)}, whose tokens are not rows of the packed sequence; take "
            "the class that is its text decoder alone, ...ForCausalLM"
        )


def _takes_another_attention(model: Any) -> bool:
    asked = getattr(model, "_can_set_attn_implementation", None)  # transformers 5
    return asked is None or bool(asked())


def _of_layers(model: Any, config: Any) -> Iterator[str]:
    """Layers that mix positions otherwise."""
    if getattr(config, "is_heterogeneous", False):
        yield "its layers have settings of their own (per_layer_config); they must all have the same heads"
    for layer_type in dict.fromkeys(getattr(config, "layer_types", None) or ()):
        if layer_type not in _LAYER_TYPES:
            yield (
                f"it has layers of the type {layer_type}; every layer must be one of {', '.join(sorted(_LAYER_TYPES))}"
            )
    for setting in ("attention_chunk_size", "index_topk"):
        if getattr(config, setting, None):
            yield f"its config has {setting}={getattr(config, setting)}; a query must see all before it, or a window"
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv1d) and module.kernel_size[0] > 1:
            yield (
                f"{name} is a convolution over positions, of which a rank holds only some; take a model that mixes "
                "positions by attention alone"
            )
        if _MIXING_CLASS.search(type(module).__name__):
            yield (
                f"{name or 'it'} is a {type(module).__name__}, which mixes positions otherwise than by attention; take "
                "a model that mixes them by attention alone"
            )
        if getattr(module, "is_causal", None) is False:
            yield f"{name or 'it'} attends to later tokens too; attention must be causal"
    if getattr(config, "is_causal", True) is False or getattr(config, "use_bidirectional_attention", False):
        yield "it attends to later tokens too; attention must be causal"


def _of_scores(model: Any, config: Any, training: bool) -> Iterator[str]:
    """What else is done to scores and weights."""
    for setting in _DROPOUT_SETTINGS if training else ():
        if value := getattr(config, setting, None):
            yield f"it drops attention weights ({setting}={value}); set config.{setting} to 0.0 before it is built"
    if getattr(config, "attn_logit_softcapping", None):
        yield (
            f"it caps attention scores (attn_logit_softcapping={config.attn_logit_softcapping}); kernels of packed "
            "sequences do not; set it to None only if the model may be trained without"
        )
    for name, _ in model.named_parameters():
        if name.rpartition(".")[2] in ("sinks", "sink", "attention_sink", "s_aux"):
            yield f"its attention has sinks ({name}), which kernels of packed sequences lack; take a model without"
    keys, values = _widths(config)
    if keys != values:
        yield f"its keys are {keys} wide and its values {values} (latent attention); heads must have one width"


def _widths(config: Any) -> tuple[int | None, int | None]:
    """Width of keys and of values, where a config tells them apart."""
    values = getattr(config, "v_head_dim", None)
    if not values:
        return None, None
    if nope := getattr(config, "qk_nope_head_dim", None):
        return nope + config.qk_rope_head_dim, values
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads, values


def _of_positions(config: Any) -> Iterator[str]:
    """Positions that are not in the queries and keys, or that depend on what a rank sees."""
    if getattr(config, "alibi", False) or getattr(config, "use_alibi", False):
        yield "it adds a bias by distance to its scores (ALiBi); take a model with rotary or absolute positions"
    kind = getattr(config, "position_embedding_type", "absolute")
    if kind is not None and str(kind).startswith("relative"):
        yield (
            f"it learns a bias by distance (position_embedding_type={kind!r}); take a model with rotary or absolute "
            "positions"
        )
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    for rope_type in _rope_types(rope):
        if rope_type not in _ROPE_TYPES:
            yield (
                f"its rotary frequencies follow the longest position in sight (rope_type={rope_type!r}), and a rank "
                f"sees only some; rope_type must be one of {', '.join(sorted(_ROPE_TYPES))}"
            )


def _rope_types(rope: object) -> Iterator[str]:
    """The types in the rotary settings of a config: one, or one for each type of layer."""
    if isinstance(rope, Mapping):
        for key, value in rope.items():
            if key in ("rope_type", "type") and isinstance(value, str):
                yield value
            yield from _rope_types(value)
