"""Which packed sequence goes to which pool: the paper's VRSP, and what it is compared with.

All methods are pure functions of the loads, deal every sequence to exactly one pool of exactly `P`, and so never change
what an optimizer step trains on. Ties go to the lower position, so every rank computes the same pools.

To add a method, enter it into `PLACEMENTS` in this file: a function of the loads `[n]`, the pool size and a seed.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from odb_libra_lightning.libra.load import Loads, checked_loads
from odb_libra_lightning.libra.pool_swaps import Pools, refine_pools, swap_extremes

Placement = Callable[[NDArray[Any], int, int], Pools]


def place_sequences(
    loads: Loads, pool_size: int, *, method: str = "vrsp", refine: bool = False, seed: int = 0
) -> Pools:
    """Deal the packed sequences of an optimizer step to pools of `pool_size`, evenly by load.

    The pools stand GA-major and pool-minor, with the replicas of a pool innermost: concatenated they are the order
    `S'` in which replica `r` of `DP` takes `S'[ga * DP + r]` at accumulation step `ga`.

    Example:
        >>> place_sequences([9, 8, 5, 4, 3, 1], 2)
        [[0, 5], [1, 4], [2, 3]]

    Args:
        loads: load of each packed sequence of the step, see `attention_load`; `n` real numbers, finite and at least
            0. Whole numbers are added exactly.
        pool_size: packed sequences a pool, `P`; it divides `n`.
        method: a name in `PLACEMENTS`. `vrsp` is the paper's Algorithm 1.
        refine: go on with the swaps of `pool_swaps.refine_pools`, after whichever method.
        seed: seed of `random`; the other methods ignore it.

    Returns:
        `K = n / P` pools, each of exactly `P` positions in `loads`.

    Raises:
        ValueError: a method that does not exist, or loads and sizes as in `checked_loads`.

    Complexity: `vrsp` O(n log n), the others with their functions; `refine` O(P n) a swap.
    """
    if method not in PLACEMENTS:
        raise ValueError(f"no placement is called {method!r}: there are {sorted(PLACEMENTS)}")
    work = checked_loads(loads, pool_size=pool_size)
    pools = PLACEMENTS[method](work, pool_size, seed)
    return refine_pools(work, pools) if refine else pools


def _vrsp(work: NDArray[Any], pool_size: int, seed: int) -> Pools:
    """Algorithm 1: heaviest first, each to the lightest pool that is not full. O(n log n)."""
    loads = work.tolist()
    pools: Pools = [[] for _ in range(len(loads) // pool_size)]
    lightest = [(0, k) for k in range(len(pools))]  # a heap of (load, pool): those that are not full
    for i in _descending(work):
        load, k = heapq.heappop(lightest)
        pools[k].append(i)
        if len(pools[k]) < pool_size:
            heapq.heappush(lightest, (load + loads[i], k))
    return pools


def _random(work: NDArray[Any], pool_size: int, seed: int) -> Pools:
    """A uniformly random deal, the same for the same seed. O(n)."""
    order = np.random.default_rng(seed).permutation(len(work))
    return order.reshape(-1, pool_size).tolist()


def _sequential(work: NDArray[Any], pool_size: int, seed: int) -> Pools:
    """As they arrive: what runs without placement. O(n)."""
    return np.arange(len(work)).reshape(-1, pool_size).tolist()


def _zigzag(work: NDArray[Any], pool_size: int, seed: int) -> Pools:
    """Descending loads dealt one to each pool, there and back. O(n log n)."""
    rounds = np.array(_descending(work)).reshape(pool_size, -1)
    rounds[1::2] = rounds[1::2, ::-1].copy()
    return rounds.T.tolist()


def _zigzag_swap(work: NDArray[Any], pool_size: int, seed: int) -> Pools:
    """`zigzag`, then `swap_extremes`."""
    return swap_extremes(work, _zigzag(work, pool_size, seed))


def _karmarkar_karp(work: NDArray[Any], pool_size: int, seed: int) -> Pools:
    """Balanced largest differencing: every partial solution holds as many sequences of each pool.

    Descending loads are cut into `P` tuples of `K`, one sequence a pool. The two tuples of the widest spread are
    merged, heaviest pool with lightest, until one is left. Source: Karmarkar and Karp, "The differencing method of
    set partitioning", 1982; balanced (BLDM): Michiels, Korst, Aarts and van Leeuwen, "Performance ratios for the
    differencing method applied to the balanced number partitioning problem", STACS 2003.

    Complexity: O(n log n), and O(n P) to copy the pools where each merge adds one tuple to all the earlier ones.
    """
    heap: list[tuple[Any, int, NDArray[Any], Pools]] = []
    for members in np.array(_descending(work)).reshape(pool_size, -1):
        totals = work[members]
        heap.append((totals[-1] - totals[0], len(heap), totals, members[:, None].tolist()))
    merges = len(heap)
    heapq.heapify(heap)
    while len(heap) > 1:
        _, _, wide, pools = heapq.heappop(heap)
        _, _, narrow, partners = heapq.heappop(heap)
        # Both stand in descending order of their totals.
        totals = wide + narrow[::-1]
        merged = [pool + partner for pool, partner in zip(pools, reversed(partners), strict=True)]
        order = np.argsort(-totals, kind="stable")
        totals = totals[order]
        heapq.heappush(heap, (totals[-1] - totals[0], merges, totals, [merged[k] for k in order]))
        merges += 1
    return heap[0][3]


def _wlb(work: NDArray[Any], pool_size: int, seed: int) -> Pools:
    """WLB-LLM's packing rule with whole packed sequences for documents. O(n K).

    The rule takes the longest first, to the micro-batch of least workload, or where that has no room to the shortest.
    Packed sequences are all of one length: the sort leaves them in order of arrival, and it comes to list scheduling,
    with the pool of fewest sequences where the lightest one is full. On documents, and with its deferral of outliers,
    it is in `odb_libra_lightning.libra.wlb`. Source: WLB-LLM (arXiv:2503.17924), Algorithm 1.
    """
    pools: Pools = [[] for _ in range(len(work) // pool_size)]
    totals = [0] * len(pools)
    for i, load in enumerate(work.tolist()):
        k = totals.index(min(totals))
        if len(pools[k]) == pool_size:
            k = min(range(len(pools)), key=lambda pool: len(pools[pool]))
        pools[k].append(i)
        totals[k] += load
    return pools


def _descending(work: NDArray[Any]) -> list[int]:
    return np.argsort(-work, kind="stable").tolist()  # type: ignore[no-any-return]


PLACEMENTS: Mapping[str, Placement] = MappingProxyType(
    {
        "vrsp": _vrsp,
        "random": _random,
        "sequential": _sequential,
        "zigzag": _zigzag,
        "zigzag_swap": _zigzag_swap,
        "karmarkar_karp": _karmarkar_karp,
        "wlb": _wlb,
    }
)
