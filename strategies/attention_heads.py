"""The heads of a model's attention layers, which must fit the options of a run before it starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class AttentionHeads:
    """One kind of attention layer.

    Attributes:
        num_heads: query heads.
        num_kv_heads: KV heads.
        head_dim: width of a head, the same for queries, keys and values.
        window: keys that a query sees at the most, its own included; None: all before it.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None


def heads_of_config(config: Any) -> list[AttentionHeads]:
    """The kinds of layers that a text config of transformers describes, each once, in the order of the layers.

    Args:
        config: of a decoder whose layers attend fully or in a sliding window, all with the same heads.
    """
    num_heads = config.num_attention_heads
    num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    if getattr(config, "kv_lora_rank", None):  # latent attention: keys and values are made anew for every head
        num_kv_heads, head_dim = num_heads, config.qk_nope_head_dim + config.qk_rope_head_dim
    return [
        AttentionHeads(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, window=window)
        for window in dict.fromkeys(windows_of_config(config))
    ]


def windows_of_config(config: Any) -> list[int | None]:
    """The window of every layer, by its number: what transformers' own masks let a query see.

    Without `layer_types` a config that has a `sliding_window` means it for all layers.
    """
    window = getattr(config, "sliding_window", None) or None
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        return [window] * config.num_hidden_layers
    return [window if layer_type == "sliding_attention" else None for layer_type in layer_types]
