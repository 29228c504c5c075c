from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odb_libra_lightning.odb import align_groups, group_target

GROUPS = st.lists(st.lists(st.integers(), min_size=1, max_size=8), max_size=20)


@pytest.mark.parametrize(
    ("groups", "slots", "buffered", "target"),
    [
        ([4, 2, 3], [9, 9, 9], [40, 20, 30], 4),  # nothing binds: the largest rank sets it
        ([4, 2, 3], [9, 3, 9], [40, 20, 30], 3),  # output capacity binds
        ([4, 2, 3], [9, 9, 9], [40, 2, 30], 2),  # samples bind
        ([4, 0, 3], [9, 0, 9], [40, 0, 30], 4),  # an empty rank does not collapse it
        ([4, 2], [0, 5], [40, 20], 4),  # a full rank's zero is left out
        ([4, 2], [0, 0], [40, 20], 4),  # no positive capacity: the term drops out
        ([0, 0], [3, 3], [0, 0], 0),  # no active rank: nothing to align
    ],
)
def test_target_is_the_rule_of_the_paper(groups: list[int], slots: list[int], buffered: list[int], target: int) -> None:
    assert group_target(groups, slots, buffered) == target


def test_target_needs_one_entry_a_rank() -> None:
    with pytest.raises(ValueError, match="got 2, 1 and 2"):
        group_target([1, 1], [1], [1, 1])


def test_the_figure_of_the_paper_four_two_three_groups_become_three() -> None:
    rank_0 = [["a"], ["b", "c"], ["d", "e"], ["f", "g", "h"]]
    rank_1 = [["i", "j"], ["k", "l", "m"]]
    rank_2 = [["n"], ["o"], ["p", "q"]]
    assert align_groups(rank_0, 3) == ([["b", "c"], ["d", "e"], ["f", "g", "h"]], ["a"])
    assert align_groups(rank_1, 3) == ([["i", "j"], ["k", "l"], ["m"]], [])
    assert align_groups(rank_2, 3) == (rank_2, [])


def test_splits_scan_backward_and_go_on_to_earlier_groups() -> None:
    assert align_groups([[1, 2], [3, 4]], 4) == ([[1], [3], [4], [2]], [])


def test_overflow_keeps_the_largest_and_the_earlier_of_equals_in_their_order() -> None:
    assert align_groups([[1], [2, 3], [4, 5], [6]], 3) == ([[1], [2, 3], [4, 5]], [6])


def test_a_target_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 group, got 0"):
        align_groups([[1]], 0)


@given(GROUPS, st.integers(1, 40))
def test_nothing_is_lost_and_the_count_is_exact_whenever_the_samples_allow(
    groups: list[list[int]], target: int
) -> None:
    aligned, returned = align_groups(groups, target)
    samples = [sample for group in groups for sample in group]
    assert sorted([sample for group in aligned for sample in group] + returned) == sorted(samples)
    assert all(aligned)
    assert len(aligned) == min(target, len(samples))
    assert not returned or len(groups) > target


@given(GROUPS)
def test_the_input_is_not_changed(groups: list[list[int]]) -> None:
    before = [list(group) for group in groups]
    align_groups(groups, 3)
    assert groups == before


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9), st.integers(0, 99)), min_size=1, max_size=16))
def test_target_lies_between_one_and_the_largest_rank(ranks: list[tuple[int, int, int]]) -> None:
    groups, slots, buffered = (list(column) for column in zip(*ranks, strict=True))
    target = group_target(groups, slots, buffered)
    assert (target == 0) == (max(groups) == 0)
    assert target <= max(groups)
