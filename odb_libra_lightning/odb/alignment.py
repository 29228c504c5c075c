"""Equal numbers of groups on every rank: pure rules on counts and lists.

Source: ODB, Algorithm 1 (max-based bidirectional group alignment) and equation 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

S = TypeVar("S")


def group_target(group_counts: Sequence[int], free_slots: Sequence[int], buffered: Sequence[int]) -> int:
    """Number of groups that every active rank brings to this round.

    `T = max(min(max G_r, C_min, S_min), 1)` over the active ranks, those with `G_r > 0`. `C_min` and
    `S_min` are the smallest *positive* values, so that an empty rank cannot collapse the target; a term
    without a positive value drops out.

    Args:
        group_counts: candidate groups `G_r`, one entry a rank.
        free_slots: free output capacity `C_r` in batches, one entry a rank.
        buffered: samples `S_r` that the rank can put into groups this round, one entry a rank.

    Returns:
        The target, at least 1; or 0 when no rank is active and there is nothing to align.

    Raises:
        ValueError: if the three do not have one entry a rank.
    """
    if not len(group_counts) == len(free_slots) == len(buffered):
        raise ValueError(
            "group_counts, free_slots and buffered need one entry a rank, "
            f"got {len(group_counts)}, {len(free_slots)} and {len(buffered)}"
        )
    active = [rank for rank, count in enumerate(group_counts) if count > 0]
    if not active:
        return 0
    terms = [max(group_counts[rank] for rank in active)]
    for values in (free_slots, buffered):
        positive = [values[rank] for rank in active if values[rank] > 0]
        if positive:
            terms.append(min(positive))
    return max(min(terms), 1)


def align_groups(groups: Sequence[Sequence[S]], target: int) -> tuple[list[list[S]], list[S]]:
    """Split or hold back groups until there are exactly `target` of them.

    Too few: the last sample of the last group that has two or more becomes a group of its own, appended at
    the end, until the target is reached or every group has one sample. Too many: the groups with the most
    samples stay (the earlier of two equals), in the order they came in, and the samples of the others are
    returned.

    Args:
        groups: one rank's candidate groups, non-empty, longest samples first.
        target: number of groups wanted, at least 1. It is reached exactly whenever the groups together
            hold at least `target` samples, which `group_target` sees to through its `buffered` argument.

    Returns:
        The aligned groups, and the samples that go back to the buffer. No sample is lost or repeated.

    Raises:
        ValueError: if `target` is below 1.
    """
    if target < 1:
        raise ValueError(f"target must be at least 1 group, got {target}")
    aligned = [list(group) for group in groups]
    if len(aligned) > target:
        by_size = sorted(range(len(aligned)), key=lambda i: len(aligned[i]), reverse=True)
        kept = set(by_size[:target])
        returned = [sample for i, group in enumerate(aligned) if i not in kept for sample in group]
        return [group for i, group in enumerate(aligned) if i in kept], returned
    donor = len(aligned) - 1  # groups behind the donor have one sample, and so has every new one
    while len(aligned) < target and donor >= 0:
        if len(aligned[donor]) > 1:
            aligned.append([aligned[donor].pop()])
        else:
            donor -= 1
    return aligned, []
