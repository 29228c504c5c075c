"""Layers of PyTorch that mix the rows of a sequence and know nothing of the rows on other ranks."""

from __future__ import annotations

from torch import nn

_MIXING = (
    nn.RNNBase,
    nn.RNNCellBase,
    nn.MultiheadAttention,
    nn.Transformer,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)


def refuse_mixing_layers(root: nn.Module) -> None:
    """Refuse a module in which a rank's share of a packed sequence would be taken for the whole.

    A rank holds some rows of a packed sequence. What mixes rows otherwise than by `core_attention` would compute
    something else than on one process, without any error. Layers are found by their classes: a plain function that
    mixes rows, such as `scaled_dot_product_attention`, is not seen.

    Raises:
        ValueError: the first such layer, by its name within the module.
    """
    for name, module in root.named_modules():
        if isinstance(module, _MIXING):
            raise ValueError(
                f"{name or 'the module'} is a {type(module).__name__}, which mixes the rows of a sequence, and under "
                "context parallelism a rank holds only some of them: compute its attention by "
                "odb_libra_lightning.libra.core_attention(q, k, v), or train it without context parallelism"
            )
