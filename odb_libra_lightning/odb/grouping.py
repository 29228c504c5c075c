"""Token-budgeted groups from realized lengths: a pure rule on a list of integers.

Source: ODB, "dynamic batch size" and "threshold carry-over" (equation 1 and appendix D).
"""

from __future__ import annotations

from collections.abc import Sequence

from odb_libra_lightning.odb.cost import TokenCost

LINEAR = TokenCost()


def target_batch_size(length: int, l_max: int, *, cost: TokenCost = LINEAR) -> int:
    """Number of samples that a batch of samples of this length aims for: `max(l_max // length, 1)`.

    Args:
        length: realized length of a sample, tokens, at least 1.
        l_max: token budget of a batch, tokens, at least 1.
        cost: what a batch costs; by default its padded tokens.

    Raises:
        ValueError: if either number is below 1.
    """
    if length < 1:
        raise ValueError(f"length must be at least 1 token, got {length}")
    if l_max < 1:
        raise ValueError(f"l_max must be at least 1 token, got {l_max}")
    return cost.fits(length, l_max)


def group_by_budget(
    lengths: Sequence[int], l_max: int, *, cost: TokenCost = LINEAR
) -> tuple[list[list[int]], list[int]]:
    """Cut a buffer into groups whose padded tokens, or whose cost, stay within a budget.

    The buffer is sorted ascending, ties by arrival, and walked from the longest sample to the shortest
    with a running threshold `t`, at first 1. A group is closed when it holds `t` samples, and `t` becomes
    the target batch size of the sample appended last, so that a group is sized by the *previous* group's
    shortest sample. Since lengths only fall along the walk, a group never holds more padded tokens
    (samples times longest sample) than `max(l_max, its longest sample)`; with another cost, it never costs
    more than `max(l_max, its longest sample alone)`.

    Example:
        >>> group_by_budget([100, 200, 500, 800], l_max=1000)
        ([[3], [2], [1, 0]], [])

    Args:
        lengths: realized lengths in order of arrival, tokens, each at least 1.
        l_max: token budget of a batch, tokens, at least 1.
        cost: what a batch costs; by default its padded tokens.

    Returns:
        The closed groups, longest samples first, each a list of positions in `lengths`; and the positions
        of the open tail, which did not reach its threshold.

    Raises:
        ValueError: if a length or `l_max` is below 1.

    Complexity: O(n log n).
    """
    if l_max < 1:
        raise ValueError(f"l_max must be at least 1 token, got {l_max}")
    ascending = sorted(range(len(lengths)), key=lengths.__getitem__)
    if ascending and lengths[ascending[0]] < 1:
        raise ValueError(f"length at position {ascending[0]} must be at least 1, got {lengths[ascending[0]]}")
    closed: list[list[int]] = []
    group: list[int] = []
    threshold, fits = 1, cost.fits
    for position in reversed(ascending):
        group.append(position)
        if len(group) >= threshold:
            closed.append(group)
            group = []
            threshold = fits(lengths[position], l_max)
    return closed, group
