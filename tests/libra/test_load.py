"""Attention load and imbalance against enumeration: every query-key pair counted, every partition tried."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from odb_libra_lightning.libra.load import (
    attention_load,
    causal_pairs,
    checked_lengths,
    checked_loads,
    expected_imbalance,
    imbalance_floor,
    pool_imbalance,
)


def visible(length: int, window: int | None) -> np.ndarray:
    """The mask of a causal document, query by key."""
    query, key = np.indices((length, length))
    return (key <= query) & ((query - key < window) if window is not None else True)


@given(st.integers(0, 12), st.integers(0, 12), st.one_of(st.none(), st.integers(1, 14)))
def test_causal_pairs_are_the_ones_in_the_mask(start: int, more: int, window: int | None) -> None:
    stop = start + more
    assert causal_pairs(start, stop, window=window) == visible(24, window)[start:stop].sum()


def test_causal_pairs_of_arrays_are_those_of_their_elements() -> None:
    starts, stops = np.meshgrid(np.arange(6), np.arange(6, 10))
    pairs = causal_pairs(starts, stops, window=4)
    assert (pairs.dtype, pairs.shape) == (np.int64, (4, 6))
    assert pairs.tolist() == [[causal_pairs(a, e, window=4) for a in range(6)] for e in range(6, 10)]
    assert causal_pairs(0, np.array([3, 4], dtype=np.int32)).tolist() == [6, 10]


@pytest.mark.parametrize("window", [None, 2**31])
def test_causal_pairs_are_exact_up_to_the_longest_document(window: int | None) -> None:
    last = 2**32 - 1
    ramp = last if window is None else window
    exact = ramp * (ramp + 1) // 2 + (last - ramp) * ramp
    assert causal_pairs(0, last, window=window) == exact < 2**63
    assert causal_pairs(np.array([46_340, 92_681]), np.array([92_681, 92_682])).tolist() == [
        92_681 * 92_682 // 2 - 46_340 * 46_341 // 2,
        92_682,
    ]


@given(st.lists(st.integers(1, 2**40), min_size=1, max_size=20))
def test_the_load_is_the_exact_sum_of_squares(lengths: list[int]) -> None:
    assert attention_load(lengths) == sum(n * n for n in lengths)
    assert isinstance(attention_load(lengths), int)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 12))
def test_with_a_window_each_query_adds_twice_its_share_of_the_band(lengths: list[int], window: int) -> None:
    """Twice the area under `min(q, w)`, taken from `q` to `q + 1`."""
    band = sum(2 * q + 1 if q < window else 2 * window for n in lengths for q in range(n))
    assert attention_load(lengths, window=window) == band
    assert attention_load(lengths, window=max(lengths)) == attention_load(lengths)


def test_int32_lengths_do_not_overflow() -> None:
    assert attention_load(np.array([46_341, 2_000_000], dtype=np.int32)) == 46_341**2 + 2_000_000**2
    assert attention_load([2**40, 1], window=2**39) == 2**80 + 1 - 2**78


def partitions(items: tuple[int, ...], size: int):  # type: ignore[no-untyped-def]
    """Every way to cut the items into groups of one size."""
    if not items:
        yield []
        return
    for rest in itertools.combinations(items[1:], size - 1):
        group = (items[0], *rest)
        for others in partitions(tuple(i for i in items if i not in group), size):
            yield [group, *others]


@given(st.lists(st.integers(0, 30), min_size=6, max_size=6), st.sampled_from([1, 2, 3, 6]))
def test_no_partition_is_below_the_floor(loads: list[int], size: int) -> None:
    imbalances = [pool_imbalance(loads, pools) for pools in partitions(tuple(range(6)), size)]
    floors = [imbalance_floor(loads, size, outliers=outliers) for outliers in (1, 2, 3, 6, 99)]
    assert floors[0] >= 0
    assert floors == sorted(floors)
    assert floors[-1] <= min(imbalances)


def test_outliers_that_compete_for_the_lightest_raise_the_floor() -> None:
    """10 and 10 in pools of two with 1 and 3: 11 alone, but one of them gets the 3, or they share a pool."""
    loads = [10, 10, 1, 3, 4, 4]
    best = min(pool_imbalance(loads, pools) for pools in partitions(tuple(range(6)), 2))
    assert best == 13 * 3 / 32 - 1
    assert imbalance_floor(loads, 2) == 11 * 3 / 32 - 1
    assert imbalance_floor(loads, 2, outliers=2) == 12 * 3 / 32 - 1
    with pytest.raises(ValueError, match="outliers=0: expected at least 1"):
        imbalance_floor(loads, 2, outliers=0)


def test_imbalance_of_a_hand_worked_case() -> None:
    loads = [10, 1, 2, 3]
    assert pool_imbalance(loads, [[0, 1], [2, 3]]) == 11 / 8 - 1
    assert imbalance_floor(loads, 2) == 11 / 8 - 1
    assert imbalance_floor([4, 4, 4, 4], 2) == 0 == pool_imbalance([4, 4, 4, 4], [[0, 3], [2, 1]])
    assert pool_imbalance([0, 0], [[0], [1]]) == 0 == imbalance_floor([0, 0], 1) == expected_imbalance([0, 0], 1)
    huge = [3 * 10**17, 10**17]
    assert pool_imbalance(huge, [[0], [1]]) == 0.5


def test_the_expected_imbalance_is_equation_4() -> None:
    loads = [1.0, 3.0] * 8  # mean 2, standard deviation 1
    assert expected_imbalance(loads, 4) == pytest.approx(0.5 / 2 * math.sqrt(2 * math.log(4)))
    assert expected_imbalance(loads, 16) == 0, "one pool has no straggler"


def test_the_expected_imbalance_is_near_that_of_random_pools_where_loads_are_gaussian() -> None:
    rng = np.random.default_rng(0)
    loads = rng.normal(100, 10, size=4096)
    seen = [pool_imbalance(loads, rng.permutation(4096).reshape(-1, 16).tolist()) for _ in range(50)]
    assert np.mean(seen) == pytest.approx(expected_imbalance(loads, 16), rel=0.25)


@pytest.mark.parametrize(
    ("loads", "pool_size", "says"),
    [
        ([], 1, "expected a flat list of real numbers with at least one"),
        ([[1, 2]], 1, "expected a flat list"),
        (["a"], 1, "expected a flat list of real numbers"),
        ([True, False], 1, "type bool"),
        ([1, -2], 1, "load -2 at position 1: a load is finite and at least 0"),
        ([1, 2, float("nan")], 1, "load nan at position 2"),
        ([1, float("inf")], 1, "load inf at position 1"),
        ([1, 2], 0, "pool_size=0: a pool holds at least 1"),
        ([1, 2, 3], 2, "3 packed sequences do not fill pools of 2: .* such as 2"),
        ([1, 2, 3], 8, "3 packed sequences do not fill pools of 8: .* such as 8"),
        ([2**62, 1], 1, r"above 2\*\*62: give them in a larger unit"),
    ],
)
def test_wrong_loads_are_named(loads: list[float], pool_size: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        checked_loads(loads, pool_size=pool_size)
    with pytest.raises(ValueError, match=says):
        imbalance_floor(loads, pool_size)


def test_wrong_lengths_positions_and_pools_are_named() -> None:
    with pytest.raises(ValueError, match="document length 0 at position 1: expected 1 token"):
        attention_load([4, 0])
    with pytest.raises(ValueError, match="document length -3 at position 0"):
        attention_load([-3])
    with pytest.raises(ValueError, match="no document lengths: expected at least one"):
        attention_load([])
    for bad in ([1.5], [[1]]):
        with pytest.raises(ValueError, match="expected a flat list of whole numbers"):
            attention_load(bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"f\.txt: document length 0 at position 0: expected 1 token to 2\*\*62"):
        checked_lengths([0], where="f.txt")
    with pytest.raises(ValueError, match=rf"document lengths sum to {2**62 + 1}: at most 2\*\*62 tokens would fit"):
        attention_load([2**62, 1])
    with pytest.raises(ValueError, match="window=0: a query sees at least 1 key"):
        attention_load([1], window=0)
    with pytest.raises(ValueError, match=r"queries \[5, 4\): expected 0 <= start <= stop"):
        causal_pairs([0, 5], [3, 4])
    with pytest.raises(ValueError, match=r"queries \[-1, 4\)"):
        causal_pairs(-1, 4)
    with pytest.raises(ValueError, match=r"queries \[0, 4294967296\)"):
        causal_pairs(0, 2**32)
    with pytest.raises(ValueError, match="got float64 and int64"):
        causal_pairs(0.5, 2)
    for pools in ([[0, 1]], [[0, 1], [1, 2]], [[0, 1], [2, -1]], []):
        with pytest.raises(ValueError, match=r"expected each of 0\.\.2 exactly once"):
            pool_imbalance([1, 2, 3], pools)
