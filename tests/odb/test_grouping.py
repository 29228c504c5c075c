from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odb_libra_lightning.data.length_mixes import LENGTH_MIXES, length_mix
from odb_libra_lightning.odb import group_by_budget, target_batch_size
from odb_libra_lightning.odb.cost import TokenCost

LENGTHS = st.lists(st.integers(1, 3000), max_size=200)
BUDGETS = st.integers(1, 5000)


@pytest.mark.parametrize(("length", "expected"), [(1, 1000), (250, 4), (333, 3), (501, 1), (1000, 1), (5000, 1)])
def test_target_batch_size_is_how_many_fit_and_at_least_one(length: int, expected: int) -> None:
    assert target_batch_size(length, 1000) == expected


@pytest.mark.parametrize(("length", "l_max"), [(0, 10), (-1, 10), (10, 0)])
def test_target_batch_size_refuses_what_is_no_length(length: int, l_max: int) -> None:
    with pytest.raises(ValueError, match=r"at least 1 token, got"):
        target_batch_size(length, l_max)


def test_the_worked_example_of_the_paper() -> None:
    lengths = [100, 200, 500, 800]
    groups, tail = group_by_budget(lengths, 1000)
    assert [[lengths[i] for i in group] for group in groups] == [[800], [500], [200, 100]]
    assert [len(group) * max(lengths[i] for i in group) for group in groups] == [800, 500, 400]
    assert tail == []


def test_the_group_that_does_not_reach_its_threshold_is_the_open_tail() -> None:
    # 900 closes at t=1 and sets t=1; 100 closes and sets t=10; three samples do not reach it.
    assert group_by_budget([50, 900, 60, 100, 70], 1000) == ([[1], [3]], [4, 2, 0])


def test_ties_are_broken_by_arrival_in_the_ascending_order() -> None:
    assert group_by_budget([5, 5, 5], 5) == ([[2], [1], [0]], [])


def test_an_empty_buffer_has_no_groups() -> None:
    assert group_by_budget([], 10) == ([], [])


@pytest.mark.parametrize("lengths", [[3, 0, 2], [-4]])
def test_a_length_below_one_is_refused_with_its_position(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match=f"position {lengths.index(min(lengths))} .* got {min(lengths)}"):
        group_by_budget(lengths, 10)


@given(LENGTHS, BUDGETS)
def test_every_sample_is_in_one_group_or_the_tail(lengths: list[int], l_max: int) -> None:
    groups, tail = group_by_budget(lengths, l_max)
    assert sorted([i for group in groups for i in group] + tail) == list(range(len(lengths)))


@given(LENGTHS, BUDGETS)
def test_padded_tokens_stay_within_the_budget_or_one_long_sample(lengths: list[int], l_max: int) -> None:
    groups, tail = group_by_budget(lengths, l_max)
    for group in [*groups, tail]:
        held = [lengths[i] for i in group]
        assert len(held) * max(held, default=0) <= max(l_max, max(held, default=0))


@given(LENGTHS, BUDGETS)
def test_groups_follow_the_rule_as_it_is_worded(lengths: list[int], l_max: int) -> None:
    """A second, literal telling: take samples from the longest down, `t` at a time, `t` from the last one taken."""
    descending = sorted(lengths, reverse=True)
    expected, threshold = [], 1
    while len(descending) >= threshold:
        expected.append(descending[:threshold])
        descending = descending[threshold:]
        threshold = max(l_max // expected[-1][-1], 1)
    groups, tail = group_by_budget(lengths, l_max)
    assert [[lengths[i] for i in group] for group in groups] == expected
    assert [lengths[i] for i in tail] == descending


def test_a_quadratic_cost_makes_groups_of_long_samples_smaller() -> None:
    lengths = [100, 200, 400, 500, 800]
    # 800 and 500 close alone; 500 costs 750 of 1000: t=1; 400 (560) closes alone: t=1; 200 (240): t=4; 100 waits.
    assert group_by_budget(lengths, 1000, cost=TokenCost.quadratic(1000)) == ([[4], [3], [2], [1]], [0])
    assert group_by_budget(lengths, 1000) == ([[4], [3], [2, 1]], [0])
    assert target_batch_size(200, 1000, cost=TokenCost.quadratic(1000)) == 4


@given(LENGTHS, BUDGETS)
def test_the_default_cost_is_the_linear_one(lengths: list[int], l_max: int) -> None:
    assert group_by_budget(lengths, l_max) == group_by_budget(lengths, l_max, cost=TokenCost.linear())


@given(LENGTHS, BUDGETS, st.none() | st.integers(1, 5000))
def test_a_group_costs_no_more_than_the_budget_or_its_longest_sample(
    lengths: list[int], l_max: int, quadratic_length: int | None
) -> None:
    groups, tail = group_by_budget(lengths, l_max, cost=TokenCost(quadratic_length))
    assert sorted([i for group in groups for i in group] + tail) == list(range(len(lengths)))
    for group in [*groups, tail]:
        longest = max((lengths[i] for i in group), default=0)
        one = Fraction(longest) + (Fraction(longest**2, quadratic_length) if quadratic_length else 0)
        assert len(group) * one <= max(l_max, one)


def costs_of_an_epoch(lengths: list[int], l_max: int, cost: TokenCost, true_cost: TokenCost) -> list[Fraction]:
    """Costs of one rank's groups, buffer after buffer of 1,024 samples, each begun with the tail of the one before."""
    costs: list[Fraction] = []
    tail: list[int] = []
    for start in range(0, len(lengths), 1024):
        buffer = tail + lengths[start : start + 1024]
        groups, open_tail = group_by_budget(buffer, l_max, cost=cost)
        costs += [true_cost.of(len(group), max(buffer[i] for i in group)) for group in groups]
        tail = [buffer[i] for i in open_tail]
    return costs


def test_where_memory_is_quadratic_the_linear_rule_leaves_most_of_it_unused() -> None:
    """Both rules allow what the longest sample costs alone; the one that knows the cost needs half as many steps."""
    true_cost, l_max = TokenCost.quadratic(4096), LENGTH_MIXES["sharegpt4o"].l_max
    lengths = [length for length in length_mix("sharegpt4o", 10_000).tolist() if length <= l_max]
    available = math.ceil(true_cost.of(1, max(lengths)))
    linear = costs_of_an_epoch(lengths, l_max, TokenCost.linear(), true_cost)
    quadratic = costs_of_an_epoch(lengths, available, true_cost, true_cost)
    assert max(linear) <= available
    assert max(quadratic) <= available
    assert sum(linear) / len(linear) < available * 0.45 < available * 0.8 < sum(quadratic) / len(quadratic)
    assert len(quadratic) < len(linear) / 2
