"""How much of a batch is padding, and how much it would have been with batches of a fixed size."""

from __future__ import annotations

from collections.abc import Sequence


def padding_ratio(tokens: float, padded_tokens: float) -> float:
    """Share of padding in what the model computes on: `1 - tokens / padded_tokens`, 0 for nothing."""
    return 1.0 - tokens / padded_tokens if padded_tokens else 0.0


def fixed_batch_padded_tokens(lengths: Sequence[int], batch_size: int) -> int:
    """Padded tokens of the same samples in the same order, cut into batches of a fixed size.

    Args:
        lengths: realized lengths in the order in which a plain loader would have drawn them, tokens.
        batch_size: samples a batch, at least 1; the last batch may be smaller.

    Raises:
        ValueError: if `batch_size` is below 1.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    batches = (lengths[i : i + batch_size] for i in range(0, len(lengths), batch_size))
    return sum(len(batch) * max(batch) for batch in batches)
