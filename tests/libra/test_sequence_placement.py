"""Placements against hand-worked lists, the best of all partitions, and what no placement may change."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from odb_libra_lightning.libra.load import imbalance_floor, pool_imbalance
from odb_libra_lightning.libra.pool_swaps import refine_pools, swap_extremes
from odb_libra_lightning.libra.sequence_placement import PLACEMENTS, place_sequences

METHODS = sorted(PLACEMENTS)
SHAPES = st.tuples(st.integers(1, 5), st.integers(1, 6))  # P, K


@st.composite
def windows(draw: st.DrawFn) -> tuple[list[int], int]:
    size, pools = draw(SHAPES)
    load = st.one_of(st.integers(0, 5), st.integers(0, 10**12 * 1024))
    return draw(st.lists(load, min_size=size * pools, max_size=size * pools)), size


def heaviest(loads: list[int], pools: list[list[int]]) -> int:
    return max(sum(loads[i] for i in pool) for pool in pools)


def optimum(loads: list[int], size: int) -> int:
    """Least load of the heaviest pool over all partitions."""

    def least(left: frozenset[int]) -> int:
        if not left:
            return 0
        first = min(left)
        return min(
            max(sum(loads[i] for i in (first, *rest)), least(left - {first, *rest}))
            for rest in itertools.combinations(sorted(left - {first}), size - 1)
        )

    return least(frozenset(range(len(loads))))


def test_algorithm_1_by_hand() -> None:
    """Three pools of three; the order is 30 20 20 12 10 9 5 2 1, by position 4 1 6 0 3 8 2 7 5.

    30 -> pool 0, 20 (1) -> 1, 20 (6) -> 2: 30 20 20.  12 -> 1 (tie with 2): 32.  10 -> 2: 30.
    9 -> 0 (tie with 2 at 30): 39.  5 -> 2: 35, full.  2 -> 1: 34, full.  1 -> 0, the only one with room.
    """
    loads = [12, 20, 5, 10, 30, 1, 20, 2, 9]
    assert place_sequences(loads, 3) == [[4, 8, 5], [1, 0, 7], [6, 3, 2]]


def test_a_full_pool_leaves_the_heap_even_if_it_is_the_lightest() -> None:
    """Pool 1 takes 1 and 1 of [9, 1, 1, 1] while pool 0 holds 9; the last has to go to pool 0."""
    assert place_sequences([9, 1, 1, 1], 2) == [[0, 3], [1, 2]]


def test_equal_loads_go_by_position() -> None:
    assert place_sequences([7] * 6, 2) == [[0, 3], [1, 4], [2, 5]]
    assert place_sequences([7.5] * 6, 3, refine=True) == [[0, 2, 4], [1, 3, 5]]


@pytest.mark.parametrize(
    ("method", "pools"),
    [
        ("sequential", [[0, 1], [2, 3], [4, 5]]),
        # 60 50 40 | 30 20 10 dealt there and back.
        ("zigzag", [[5, 0], [4, 1], [3, 2]]),
        # 60 50 40 and 30 20 10, of equal spread; merged heaviest with lightest.
        ("karmarkar_karp", [[5, 0], [4, 1], [3, 2]]),
        # By arrival: 10, 20, 30 open the pools; 40 joins 10; 50 joins 20; 60 joins 30.
        ("wlb", [[0, 3], [1, 4], [2, 5]]),
    ],
)
def test_the_others_by_hand(method: str, pools: list[list[int]]) -> None:
    assert place_sequences([10, 20, 30, 40, 50, 60], 2, method=method) == pools


def test_wlb_falls_back_to_the_shortest_where_the_lightest_is_full() -> None:
    """0 and 0 fill pool 0; with 5 in pool 1 and none in pool 2, 1 and then 3 open and fill the shortest."""
    assert place_sequences([0, 0, 5, 1, 3, 2], 2, method="wlb") == [[0, 1], [2, 4], [3, 5]]


def test_zigzag_swap_swaps_the_extremes_while_the_gap_narrows() -> None:
    """Zigzag deals 9 8 | 1 0 to [9, 0] and [8, 1]; of 100 60 | 50 1 it makes 101 and 110, and no swap narrows that."""
    assert place_sequences([9, 8, 1, 0], 2, method="zigzag_swap") == [[0, 3], [1, 2]]
    # [100, 1, 0] and [60, 50, 40] differ by 49; no single swap lands both below 150: the best is 110 for 141.
    loads = [100, 60, 50, 40, 1, 0]
    assert place_sequences(loads, 3, method="zigzag") == [[0, 3, 4], [1, 2, 5]]
    assert heaviest(loads, place_sequences(loads, 3, method="zigzag_swap")) == 140
    assert optimum(loads, 3) == 140


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("refine", [False, True])
@given(windows())
def test_every_sequence_stands_in_one_pool_of_the_right_size(
    method: str, refine: bool, window: tuple[list[int], int]
) -> None:
    loads, size = window
    pools = place_sequences(loads, size, method=method, refine=refine, seed=3)
    assert [len(pool) for pool in pools] == [size] * (len(loads) // size)
    assert Counter(i for pool in pools for i in pool) == Counter(range(len(loads)))
    assert pools == place_sequences(np.array(loads), size, method=method, refine=refine, seed=3)
    assert all(type(i) is int for pool in pools for i in pool)


@given(windows(), st.sampled_from(METHODS))
def test_swaps_never_make_the_heaviest_pool_heavier_nor_pass_the_floor(
    window: tuple[list[int], int], method: str
) -> None:
    loads, size = window
    before = place_sequences(loads, size, method=method)
    after = place_sequences(loads, size, method=method, refine=True)
    assert heaviest(loads, after) <= heaviest(loads, before)
    assert pool_imbalance(loads, after) >= imbalance_floor(loads, size)


@given(windows(), st.sampled_from(METHODS))
def test_after_refinement_no_swap_of_two_lowers_the_heaviest(window: tuple[list[int], int], method: str) -> None:
    loads, size = window
    pools = place_sequences(loads, size, method=method, refine=True)
    totals = [sum(loads[i] for i in pool) for pool in pools]
    worst = totals.index(max(totals))
    for k, pool in enumerate(pools):
        for a, b in itertools.product(pools[worst], pool) if k != worst else ():
            moved = loads[a] - loads[b]
            assert max(totals[worst] - moved, totals[k] + moved) >= max(totals)
    lightest = totals.index(min(totals))
    for a, b in itertools.product(itertools.combinations(pools[worst], 2), itertools.combinations(pools[lightest], 2)):
        moved = sum(loads[i] for i in a) - sum(loads[i] for i in b)
        assert max(totals[worst] - moved, totals[lightest] + moved) >= max(totals) or worst == lightest


@given(st.lists(st.integers(0, 50), min_size=8, max_size=8), st.sampled_from([2, 4]), st.sampled_from(METHODS))
def test_no_method_is_below_the_best_of_all_partitions(loads: list[int], size: int, method: str) -> None:
    best = optimum(loads, size)
    for refine in (False, True):
        assert heaviest(loads, place_sequences(loads, size, method=method, refine=refine)) >= best
    mean = Fraction(sum(loads) * size, len(loads))
    assert not mean or imbalance_floor(loads, size) <= float(best / mean - 1)


@given(st.lists(st.floats(0, 1e6), min_size=12, max_size=12), st.sampled_from([1, 2, 3, 4, 6, 12]))
def test_real_loads_end_too(loads: list[float], size: int) -> None:
    before, after = (place_sequences(loads, size, refine=refine) for refine in (False, True))
    assert sorted(i for pool in after for i in pool) == list(range(12))
    assert pool_imbalance(loads, after) <= pool_imbalance(loads, before) + 1e-9


@pytest.mark.parametrize("sequences", [128, 1024])
@pytest.mark.parametrize("method", ["vrsp", "sequential", "karmarkar_karp"])
def test_refinement_of_long_tailed_loads_ends_within_a_thousandth_of_the_floor(sequences: int, method: str) -> None:
    for seed in range(5):
        loads = np.random.default_rng(seed).lognormal(20, 0.8, sequences).astype(np.int64)
        pools = place_sequences(loads, 8, method=method, refine=True)
        assert pool_imbalance(loads, pools) <= imbalance_floor(loads, 8) + 0.001


def test_an_outlier_is_left_with_the_lightest() -> None:
    loads = [1000, *range(1, 16)]
    pools = place_sequences(loads, 4, refine=True)
    assert pool_imbalance(loads, pools) == imbalance_floor(loads, 4)
    assert next(sorted(pool) for pool in pools if 0 in pool) == [0, 1, 2, 3]


def test_loads_of_a_trillion_by_a_thousand_are_added_exactly() -> None:
    loads = [10**12 * 1024 + i for i in range(1024)]
    pools = place_sequences(loads, 8, refine=True)
    assert heaviest(loads, pools) - sum(loads) // 128 <= 1


def test_random_is_seeded() -> None:
    one, again, other = (place_sequences(range(64), 8, method="random", seed=seed) for seed in (1, 1, 2))
    assert one == again != other


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"no placement is called 'vsrp': there are \['karmarkar_karp', 'random'"):
        place_sequences([1, 2], 1, method="vsrp")
    with pytest.raises(ValueError, match="3 packed sequences do not fill pools of 2"):
        place_sequences([1, 2, 3], 2)
    with pytest.raises(ValueError, match="load -1 at position 0"):
        place_sequences([-1, 2], 1)
    with pytest.raises(ValueError, match="pool_size=0"):
        place_sequences([1, 2], 0)


@pytest.mark.parametrize("swaps", [refine_pools, swap_extremes])
def test_swaps_of_pools_that_are_none_are_refused(swaps: Callable[[list[int], list[list[int]]], object]) -> None:
    for pools in ([[0], [1, 2]], [[0, 1]], [[0, 0], [1, 2]], []):
        with pytest.raises(ValueError, match="over 4 loads: expected one size, and each load once"):
            swaps([1, 2, 3, 4], pools)
    with pytest.raises(ValueError, match="load -1 at position 1"):
        swaps([1, -1], [[0], [1]])
