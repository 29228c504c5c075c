"""Attention work of documents and packed sequences, and how evenly it lies over pools: exact integers, closed forms.

Work is counted up to a constant that all sequences share (heads, head dimension, the factor of the causal mask), so
only ratios of loads mean anything. Source: Libra (arXiv:2607.23250), section 3.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

Loads = Sequence[int] | Sequence[float] | NDArray[Any]

_LARGEST_SUM = 2**62  # of loads: twice as much still fits int64
_LONGEST = 2**32 - 1  # tokens: the pairs of a longer document overflow int64


def attention_load(document_lengths: Sequence[int] | NDArray[np.integer], *, window: int | None = None) -> int:
    """Attention work of a packed sequence: `sum_j l_j**2`, equation 1.

    It is twice the area under the number of keys that a query at position `q` sees, `q`; under `min(q, w)` with a
    sliding window of `w` keys, so that the work is then `sum_j l_j**2 - max(l_j - w, 0)**2`.

    Example:
        >>> attention_load([40_000])
        1600000000
        >>> attention_load([4_000] * 10)
        160000000

    Args:
        document_lengths: lengths of the documents in the sequence, tokens, each at least 1.
        window: most keys that a query sees, at least 1; None: all before it.

    Returns:
        A Python int, exact at any length.

    Raises:
        ValueError: no document, a length below 1 or no whole number, or a window below 1.

    Complexity: O(documents).
    """
    lengths = checked_lengths(document_lengths)
    _check_window(window)
    largest = int(lengths.max())
    if largest * largest * lengths.size >= 2 * _LARGEST_SUM:
        return sum(n * n - (max(n - window, 0) ** 2 if window is not None else 0) for n in lengths.tolist())
    load = int(lengths @ lengths)
    if window is not None:
        outside = np.maximum(lengths - window, 0)
        load -= int(outside @ outside)
    return load


@overload
def causal_pairs(start: int, stop: int, *, window: int | None = None) -> int: ...


@overload
def causal_pairs(start: ArrayLike, stop: ArrayLike, *, window: int | None = None) -> NDArray[np.int64]: ...


def causal_pairs(start: ArrayLike, stop: ArrayLike, *, window: int | None = None) -> int | NDArray[np.int64]:
    """Query-key pairs that the queries `start <= q < stop` of a document attend to: `sum_q min(q + 1, window)`.

    Positions count from the start of the document. This is the work of a tile, Libra section 5.3, for one head.

    Example:
        >>> causal_pairs(0, 4)
        10
        >>> causal_pairs([0, 2], [2, 4], window=3)
        array([3, 6])

    Args:
        start: first query, tokens from the start of its document, 0 at least; an int or an array of them.
        stop: one past the last query, at least `start` and below 2**32; broadcast with `start`.
        window: most keys that a query sees, its own among them, at least 1; None: all before it.

    Returns:
        An int for two ints, else int64 of the common shape; exact.

    Raises:
        ValueError: positions out of range or not whole numbers, or a window below 1.

    Complexity: O(1) a range, vectorised.
    """
    _check_window(window)
    first, last = np.asarray(start), np.asarray(stop)
    if first.dtype.kind not in "iu" or last.dtype.kind not in "iu":
        raise ValueError(f"start and stop are whole numbers of tokens, got {first.dtype} and {last.dtype}")
    wrong = (first < 0) | (last < first) | (last > _LONGEST)
    if wrong.any():
        at = int(wrong.argmax())
        a, e = (int(bound.flat[at]) for bound in np.broadcast_arrays(first, last))
        raise ValueError(f"queries [{a}, {e}): expected 0 <= start <= stop < 2**32")
    pairs: NDArray[np.int64] = _pairs_before(last, window) - _pairs_before(first, window)
    return int(pairs) if np.ndim(start) == np.ndim(stop) == 0 else pairs


def _pairs_before(stop: NDArray[Any], window: int | None) -> NDArray[np.int64]:
    stop = stop.astype(np.int64)
    ramp = stop if window is None else np.minimum(stop, window)
    # ramp * (ramp + 1) / 2 without the product that would overflow: one of the two is even.
    pairs: NDArray[np.int64] = ((ramp + 1) // 2) * (ramp | 1)
    return pairs if window is None else pairs + (stop - ramp) * window


def pool_imbalance(loads: Loads, pools: Sequence[Sequence[int]]) -> float:
    """How far the heaviest pool lies above the mean: `max_k L_k / mean_k L_k - 1`, the paper's `R - 1`; 0 is perfect.

    Args:
        loads: load of each packed sequence.
        pools: positions in `loads`, every one in exactly one pool.

    Returns:
        The imbalance; 0 where all loads are 0.

    Raises:
        ValueError: loads as in `checked_loads`; no pools, or pools that do not hold every sequence once.

    Complexity: O(n log n).
    """
    work = checked_loads(loads)
    members = [i for pool in pools for i in pool]
    if sorted(members) != list(range(len(work))):
        raise ValueError(f"the pools hold {len(members)} positions: expected each of 0..{len(work) - 1} exactly once")
    values = work.tolist()
    heaviest = max(_total(values[i] for i in pool) for pool in pools)
    return _above_mean(heaviest, _total(values), len(pools))


def imbalance_floor(loads: Loads, pool_size: int, *, outliers: int = 1) -> float:
    """Imbalance that no placement in pools of this size can go below.

    The heaviest pool is never below the mean, and the heaviest sequence lies in some pool, with `pool_size - 1` others
    that are at least the lightest ones: `max(mean, heaviest + lightest ones) / mean - 1`.

    Long tails have several outliers, which compete for the lightest sequences. With `outliers=m` the floor is the
    highest over the `j` heaviest sequences, `j <= m`: either two of them share a pool, or their `j` pools hold
    `j * (pool_size - 1)` others, and one of these pools is at least the mean of the `j`.

    Args:
        loads: load of each packed sequence, a multiple of `pool_size` of them.
        pool_size: packed sequences a pool, `P`.
        outliers: heaviest sequences to look at together, at least 1; more than there are pools changes nothing.

    Returns:
        A lower bound of `pool_imbalance`, at least 0; it need not be reached. More outliers never lower it.

    Raises:
        ValueError: as in `checked_loads`, or `outliers` below 1.

    Complexity: O(n log n), with any number of outliers.
    """
    work = np.sort(checked_loads(loads, pool_size=pool_size)).tolist()
    if outliers < 1:
        raise ValueError(f"outliers={outliers}: expected at least 1, the heaviest packed sequence")
    pools, total = len(work) // pool_size, _total(work)
    floor = 0.0
    heavy = light = 0
    for j in range(1, min(outliers, pools) + 1):
        heavy += work[-j]
        light += _total(work[(j - 1) * (pool_size - 1) : j * (pool_size - 1)])
        apart = _above_mean(heavy + light, total, pools, share=j)
        if j > 1 and pool_size > 1:
            together = _above_mean(work[-j] + work[1 - j] + _total(work[: pool_size - 2]), total, pools)
            apart = min(apart, together)
        floor = max(floor, apart)
    return floor


def expected_imbalance(loads: Loads, pool_size: int) -> float:
    """Imbalance that random pools have on average, to first order: `CV / sqrt(P) * sqrt(2 ln K)`, equation 4.

    `CV` is the standard deviation of the loads over their mean and `K` the number of pools. The paper calls it an
    approximation: it takes the sum in a pool for Gaussian, which long tails and small pools are not.

    Args:
        loads: load of each packed sequence, a multiple of `pool_size` of them.
        pool_size: packed sequences a pool, `P`.

    Raises:
        ValueError: as in `checked_loads`.
    """
    work = checked_loads(loads, pool_size=pool_size).astype(np.float64)
    if not work.any():
        return 0.0
    pools = len(work) // pool_size
    return float(work.std() / work.mean() / math.sqrt(pool_size) * math.sqrt(2 * math.log(pools)))


def _above_mean(load: float, total: float, pools: int, *, share: int = 1) -> float:
    """`load * pools / (share * total) - 1`: how far `share` of all pools, of that load together, lie above the mean."""
    # One division of exact integers, so that equal pools give 0 and not some 1e-16.
    return (load * pools - share * total) / (share * total) if total else 0.0


def _total(loads: Iterable[Any]) -> Any:
    values = list(loads)
    return math.fsum(values) if values and isinstance(values[0], float) else sum(values)


def checked_loads(loads: Loads, *, pool_size: int = 1) -> NDArray[np.int64] | NDArray[np.float64]:
    """The loads as one flat array, int64 where they are whole numbers, else float64.

    Args:
        loads: real numbers, finite and at least 0; whole ones stay exact, up to a sum of 2**62.
        pool_size: packed sequences a pool; the number of loads must be a multiple of it.

    Raises:
        ValueError: no loads, a load that is negative, not finite or no number, loads beyond that sum, `pool_size`
            below 1, or a number of loads that it does not divide.
    """
    work = np.asarray(loads)
    if work.ndim != 1 or not work.size or work.dtype.kind not in "iuf":
        raise ValueError(
            f"loads of type {work.dtype} and shape {list(work.shape)}: expected a flat list of real numbers with at "
            "least one"
        )
    wrong = ~(work >= 0) | (work == np.inf)
    if wrong.any():
        at = int(wrong.argmax())
        raise ValueError(f"load {work[at].item()} at position {at}: a load is finite and at least 0")
    if pool_size < 1:
        raise ValueError(f"pool_size={pool_size}: a pool holds at least 1 packed sequence")
    if work.size % pool_size:
        raise ValueError(
            f"{work.size} packed sequences do not fill pools of {pool_size}: their number must be a multiple of it, "
            f"such as {work.size - work.size % pool_size or pool_size}"
        )
    if work.dtype.kind == "f":
        return work.astype(np.float64)
    if int(work.max()) * work.size > _LARGEST_SUM and sum(work.tolist()) > _LARGEST_SUM:
        raise ValueError(f"loads sum to {sum(work.tolist())}, above 2**62: give them in a larger unit")
    return work.astype(np.int64)


def checked_lengths(lengths: ArrayLike, *, where: str = "") -> NDArray[np.int64]:
    """Document lengths as int64 `[documents]`.

    Args:
        lengths: tokens of each document.
        where: where they come from, for the error.

    Raises:
        ValueError: no lengths, one below 1, what is not a flat list of whole numbers, or more than 2**62 tokens
            together.
    """
    tokens = np.asarray(lengths)
    where = where and f"{where}: "
    if not tokens.size:
        raise ValueError(f"{where}no document lengths: expected at least one")
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ValueError(
            f"{where}document lengths of type {tokens.dtype} and shape {list(tokens.shape)}: expected a flat list of "
            "whole numbers"
        )
    if tokens.min() < 1 or tokens.max() > _LARGEST_SUM:
        at = int(tokens.argmin() if tokens.min() < 1 else tokens.argmax())
        raise ValueError(f"{where}document length {int(tokens[at])} at position {at}: expected 1 token to 2**62")
    if int(tokens.max()) * tokens.size > _LARGEST_SUM and sum(tokens.tolist()) > _LARGEST_SUM:
        raise ValueError(f"{where}document lengths sum to {sum(tokens.tolist())}: at most 2**62 tokens would fit")
    return tokens.astype(np.int64)


def _check_window(window: int | None) -> None:
    if window is not None and window < 1:
        raise ValueError(f"window={window}: a query sees at least 1 key, its own; None for all before it")
