"""Weights that make data-parallel training equal to one process on the whole batch: a pure rule.

Source: ODB, equation 4 (`w_r = t_r / sum_r t_r`), extended over gradient accumulation.
"""

from __future__ import annotations

from collections.abc import Sequence


def window_loss_weights(
    local: Sequence[int], total: Sequence[int], *, world_size: int, accumulation: int
) -> list[float]:
    """Factors for a rank's local *mean* losses over one accumulation window.

    The data-parallel average divides by `world_size` and the trainer divides each micro-batch by
    `accumulation` (a short last window too). With the factor `t_rm * world_size * accumulation / T`, where
    `T` is the number of loss-bearing tokens of the window over all ranks, what reaches the optimizer is the
    mean over those tokens.

    Args:
        local: loss-bearing tokens (or samples) of this rank in each micro-batch of the window.
        total: the same, summed over all ranks.
        world_size: number of data-parallel ranks.
        accumulation: what the trainer divides by; at least the number of micro-batches in the window.

    Returns:
        One factor a micro-batch. All are 0 where the window holds no loss-bearing token at all.
    """
    window_total = sum(total)
    if window_total == 0:
        return [0.0] * len(local)
    return [count * world_size * accumulation / window_total for count in local]
