"""The attention function and the mask function that transformers call by the name "libra"."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from odb_libra_lightning.libra.active_attention import active, core_attention
from odb_libra_lightning.strategies.attention_heads import heads_of_config, windows_of_config

NAME = "libra"

# What models hand on to their attention and what does not change it, whatever the value. Positions are in the queries
# and keys already and say where documents begin; a cache in use shows in the number of keys; the rest is of the loss.
_WITHOUT_EFFECT = frozenset(
    {
        "cache_position",
        "cu_seq_lens_k",
        "cu_seq_lens_q",
        "labels",
        "max_length_k",
        "max_length_q",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "return_dict",
        "shift_labels",
        "use_cache",
    }
)
_WITHOUT_EFFECT_IF_FALSE = frozenset({"output_attentions"})
_WITHOUT_EFFECT_IF_TRUE = frozenset({"is_causal"})


def register() -> None:
    """Make the name known to transformers, for attention and for masks; again does no harm."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, libra_attention_forward)
    AttentionMaskInterface.register(NAME, no_mask)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def libra_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    position_ids: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function of transformers' `AttentionInterface`, by `core_attention`.

    Args:
        module: the attention layer.
        query: `[batch, heads, T, head_dim]`.
        key: `[batch, KV heads, T, head_dim]`.
        value: like `key`.
        attention_mask: None; documents and causality are the attention's own.
        scaling: factor of the scores.
        dropout: of attention weights: 0.
        sliding_window: keys that a query sees at the most, its own included.
        position_ids: `[batch, T]`; documents begin at 0. Only read where no strategy knows the documents.
        **kwargs: what else a model hands on; refused unless it is known to change nothing, or None.

    Returns:
        The output `[batch, T, heads, head_dim]`, and no weights.

    Raises:
        ValueError: what is asked for is not what `core_attention` computes.
    """
    where = type(module).__name__
    _refuse_arguments(where, attention_mask, dropout, kwargs)
    if getattr(module, "is_causal", True) is False:
        raise ValueError(f"{where} is not causal, and attention under context parallelism is")
    if position_ids is None and active() is None:
        raise ValueError(
            f"{where} is not told position_ids, so that without a strategy that knows the documents of a packed "
            "sequence they cannot be told apart; take a model that hands position_ids to its attention"
        )
    if scaling is None and (
        not getattr(module, "scale_attn_weights", True) or getattr(module, "scale_attn_by_inverse_layer_idx", False)
    ):
        raise ValueError(
            f"{where} scales its scores by settings of its own and does not say so to its attention (GPT-2 before "
            "transformers 5): upgrade transformers"
        )
    _refuse_shapes(where, query, key, value)
    _refuse_other_layer(module, query, key, sliding_window)
    q, k, v = (each.transpose(1, 2) for each in (query, key, value))
    return core_attention(q, k, v, position_ids=position_ids, window=sliding_window, scale=scaling), None


def _refuse_arguments(where: str, attention_mask: Tensor | None, dropout: float, kwargs: dict[str, Any]) -> None:
    if attention_mask is not None:
        raise ValueError(f"{where} was given an attention_mask: {_NO_MASK}")
    if dropout:
        raise ValueError(
            f"{where} has attention dropout {dropout}, which context parallelism does not compute: set it to 0 in the "
            "model's config"
        )
    for name, value in kwargs.items():
        if (
            value is None
            or name in _WITHOUT_EFFECT
            or (name in _WITHOUT_EFFECT_IF_FALSE and value is False)
            or (name in _WITHOUT_EFFECT_IF_TRUE and value is True)
        ):
            continue
        said = f"{name}={value!r}" if isinstance(value, bool | int | float | str) else name
        raise ValueError(
            f"{where} asks for attention with {said}, which attention under context parallelism does not know; leave "
            "it out, or take a model without it"
        )


_NO_MASK = (
    "under context parallelism a packed sequence has no mask, and its position_ids, 0 where a document begins, tell "
    "its documents apart; leave attention_mask out"
)


def _refuse_shapes(where: str, query: Tensor, key: Tensor, value: Tensor) -> None:
    if key.shape[2] != query.shape[2]:
        raise ValueError(
            f"{where} attends from {query.shape[2]} tokens to {key.shape[2]}: under context parallelism queries and "
            "keys are of the same tokens, so neither cross attention nor generation with a cache is possible"
        )
    if value.shape[-1] != query.shape[-1]:
        raise ValueError(
            f"{where} has values of width {value.shape[-1]} and keys of width {query.shape[-1]}: attention under "
            "context parallelism takes heads of one width"
        )


def _refuse_other_layer(module: nn.Module, query: Tensor, key: Tensor, window: int | None) -> None:
    """A layer that differs from what its config says, by which the run was planned and by which masks are made."""
    config, number = getattr(module, "config", None), getattr(module, "layer_idx", None)
    if config is None:
        return
    where = type(module).__name__
    windows = windows_of_config(config)
    expected = windows[number] if isinstance(number, int) and number < len(windows) else window
    if window != expected:
        raise ValueError(
            f"layer {number}, a {where}, attends with sliding_window={window}, and its config means {expected}: "
            "context parallelism cannot tell which is right; use a model that hands its window to its attention"
        )
    found = (query.shape[1], key.shape[1], query.shape[3])
    known = {(heads.num_heads, heads.num_kv_heads, heads.head_dim) for heads in heads_of_config(config)}
    if found not in known:
        raise ValueError(
            f"{where} has {found[0]} query heads and {found[1]} KV heads of width {found[2]}, and its config says "
            f"{known.pop()}: context parallelism takes layers as their config describes them"
        )


def no_mask(*args: Any, mask_function: Callable[..., Any] | None = None, **kwargs: Any) -> None:
    """The mask function of transformers' `AttentionMaskInterface`: none is needed, if it is one that we compute.

    Args:
        *args: sizes, which are not read.
        mask_function: what transformers would make a mask of.
        **kwargs: among them `attention_mask`, the padding.

    Raises:
        ValueError: padding, or a mask that is more than causal, within documents and within a window.
    """
    if kwargs.get("attention_mask") is not None:
        raise ValueError(f"the model was given an attention_mask: {_NO_MASK}")
    known = _known_masks()
    for name in _parts_of(mask_function) if mask_function is not None else ():
        if name not in known:
            raise ValueError(
                f"the model's mask has a part, {name.removesuffix('.<locals>.inner_mask')}, that attention under "
                "context parallelism does not compute: it is causal, within documents and within a sliding window"
            )


def _known_masks() -> frozenset[str]:
    """Names of the mask functions that say causal, same document, and not further back than the window."""
    known = {"causal_mask_function", "and_masks.<locals>.and_mask"}
    makers = (
        "sliding_window_overlay",
        "packed_sequence_mask_function",
        "remap_positions_for_packed_sequence",
        "add_offsets_to_mask_function",
    )
    return frozenset(known | {f"{maker}.<locals>.inner_mask" for maker in makers})


def _parts_of(mask_function: Callable[..., Any]) -> Iterator[str]:
    """The names of a mask function and of all those that it is made of."""
    module = getattr(mask_function, "__module__", "")
    name = getattr(mask_function, "__qualname__", repr(mask_function))
    yield name if module == "transformers.masking_utils" else f"{module}.{name}"
    for cell in getattr(mask_function, "__closure__", None) or ():
        content = cell.cell_contents
        for part in content if isinstance(content, tuple) else (content,):
            if callable(part) and not isinstance(part, Tensor):
                yield from _parts_of(part)
