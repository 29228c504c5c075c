"""Swaps of packed sequences between pools of one size, until the heaviest pool gets no lighter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from odb_libra_lightning.libra.load import Loads, checked_loads

Pools = list[list[int]]


@dataclass(frozen=True, kw_only=True)
class _Swap:
    """Columns of the heaviest pool and of its partner that change places, and the load that so moves over."""

    partner: int
    given: list[int]
    taken: list[int]
    moved: Any


def refine_pools(loads: Loads, pools: Pools) -> Pools:
    """Swap sequences between the heaviest pool and the others until no swap lowers the heaviest.

    First one against one, with any pool; where none of these helps, two against two of the lightest pool, which gets
    finer. Of all such swaps it takes the one that leaves the heavier of its two pools lightest, ties to the lower
    position. Each replaces the heaviest pool by two that are both lighter than it was: the loads in descending order
    fall lexicographically, so the loop ends. Not in the paper, which stops at Algorithm 1.

    Example:
        >>> refine_pools([4, 3, 2, 1], [[0, 1], [2, 3]])
        [[2, 1], [0, 3]]

    Args:
        loads: load of each packed sequence, as in `checked_loads`.
        pools: pools of one size that hold every position in `loads` once.

    Returns:
        New pools, of the same size, whose heaviest is no heavier than that of the old ones.

    Raises:
        ValueError: loads as in `checked_loads`; pools of several sizes, or not every sequence once.

    Complexity: O(P n) a swap, vectorised; some tens of swaps and 1 ms at n = 128, P = 8.
    """
    return _swapped(loads, pools, any_pool=True)


def swap_extremes(loads: Loads, pools: Pools) -> Pools:
    """Swap one against one between the heaviest and the lightest pool alone, while that narrows their gap.

    The `Swap` of the paper's Zigzag+Swap. Arguments, errors and result as in `refine_pools`.

    Complexity: O(P**2 + K) a swap.
    """
    return _swapped(loads, pools, any_pool=False)


def _swapped(all_loads: Loads, pools: Pools, *, any_pool: bool) -> Pools:
    work = checked_loads(all_loads)
    sizes = sorted({len(pool) for pool in pools})
    if len(sizes) != 1 or sorted(i for pool in pools for i in pool) != list(range(len(work))):
        raise ValueError(f"pools of sizes {sizes} over {len(work)} loads: expected one size, and each load once")
    members = np.array(pools)  # [K, P]
    loads = work[members]  # [K, P]
    totals = loads.sum(axis=1)  # [K]
    while True:
        heaviest = int(totals.argmax())
        partners = np.arange(len(totals)) if any_pool else totals.argmin(keepdims=True)
        swap = _one_for_one(loads, totals, heaviest, partners)
        if swap is None and any_pool:
            swap = _two_for_two(loads, totals, heaviest, int(totals.argmin()))
        if swap is None:
            refined: Pools = members.tolist()
            return refined
        # As in the search, to the last bit: a rounding of its own could undo what a swap of floats promised.
        totals[heaviest] -= swap.moved
        totals[swap.partner] += swap.moved
        here, there = (heaviest, swap.given), (swap.partner, swap.taken)
        for table in (members, loads):
            table[here], table[there] = table[there], table[here]


def _one_for_one(loads: NDArray[Any], totals: NDArray[Any], heaviest: int, partners: NDArray[np.intp]) -> _Swap | None:
    # [P of the heaviest, partners, P]. Against its own pool the larger of the two sums is never below the sum it has,
    # so that pool needs no mask.
    moved = loads[heaviest][:, None, None] - loads[None, partners]
    larger = np.maximum(totals[heaviest] - moved, totals[None, partners, None] + moved)
    best = int(larger.argmin())
    if larger.flat[best] >= totals[heaviest]:
        return None
    i, k, j = (int(at) for at in np.unravel_index(best, larger.shape))
    return _Swap(partner=int(partners[k]), given=[i], taken=[j], moved=moved[i, k, j])


def _two_for_two(loads: NDArray[Any], totals: NDArray[Any], heaviest: int, lightest: int) -> _Swap | None:
    one, two = np.triu_indices(loads.shape[1], k=1)  # the pairs of a pool
    if not one.size:
        return None
    given = loads[heaviest, one] + loads[heaviest, two]
    taken = loads[lightest, one] + loads[lightest, two]
    order = taken.argsort(kind="stable")
    # Half the gap should move: of the pairs to take, one of the two nearest to that is best for each pair to give.
    after = np.searchsorted(taken[order], given - (totals[heaviest] - totals[lightest]) / 2)
    near = order[np.clip([after - 1, after], 0, len(order) - 1)]  # [2, pairs]
    moved = given - taken[near]
    larger = np.maximum(totals[heaviest] - moved, totals[lightest] + moved)
    best = int(larger.argmin())
    if larger.flat[best] >= totals[heaviest]:
        return None
    i, j = best % len(given), int(near.flat[best])
    return _Swap(
        partner=lightest,
        given=[int(one[i]), int(two[i])],
        taken=[int(one[j]), int(two[j])],
        moved=moved.flat[best],
    )
