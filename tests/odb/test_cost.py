"""The cost of a batch against exact fractions and brute force."""

from __future__ import annotations

import dataclasses
import pickle
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from odb_libra_lightning.odb.cost import TokenCost

ANY_64_BIT = st.integers(1, 2**63 - 1)


def test_worked_examples() -> None:
    assert TokenCost.linear() == TokenCost() == TokenCost(None)
    assert TokenCost.quadratic(100) == TokenCost(quadratic_length=100)
    assert TokenCost().of(3, 500) == 1500
    assert TokenCost.quadratic(1000).of(3, 500) == 3 * (500 + 250)
    # 100 tokens cost 200 where quadratic_length is 100: five fit exactly into 1000, and not into 999.
    assert [TokenCost.quadratic(100).fits(100, budget) for budget in (199, 200, 999, 1000)] == [1, 1, 4, 5]
    assert [TokenCost.quadratic(100).exceeds(100, budget) for budget in (199, 200)] == [True, False]
    assert [TokenCost().exceeds(1000, budget) for budget in (999, 1000)] == [True, False]


def test_it_is_a_frozen_value_that_travels() -> None:
    cost = TokenCost.quadratic(7)
    with pytest.raises(dataclasses.FrozenInstanceError):
        cost.quadratic_length = 8  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(cost)) == cost
    assert len({cost, TokenCost(7), TokenCost()}) == 2


@given(ANY_64_BIT, ANY_64_BIT)
def test_linear_is_the_rule_of_the_paper_over_all_64_bits(length: int, l_max: int) -> None:
    assert TokenCost().fits(length, l_max) == max(l_max // length, 1)


@given(ANY_64_BIT, ANY_64_BIT, ANY_64_BIT)
def test_quadratic_is_the_largest_number_within_the_budget(length: int, l_max: int, quadratic_length: int) -> None:
    cost = TokenCost.quadratic(quadratic_length)
    fitting = cost.fits(length, l_max)
    alone = length + Fraction(length * length, quadratic_length)
    assert fitting == max(l_max // alone, 1)
    assert cost.of(fitting, length) == fitting * alone
    assert fitting == 1 or fitting * alone <= l_max
    assert (fitting + 1) * alone > l_max
    assert cost.exceeds(length, l_max) is (alone > l_max)


@given(st.integers(1, 10**6), st.integers(1, 10**4), st.integers(1, 10**6))
def test_a_budget_that_holds_n_samples_exactly_is_not_lost_to_rounding(length: int, n: int, multiple: int) -> None:
    quadratic_length = length * multiple  # then a sample costs length + length / multiple
    cost = TokenCost.quadratic(quadratic_length)
    budget = cost.of(n, length)
    assume(budget.denominator == 1)
    assert cost.fits(length, int(budget)) == n
    assert cost.fits(length, int(budget) - 1) == max(n - 1, 1)


@given(st.integers(1, 10**5), st.integers(1, 10**6), st.integers(1, 10**5))
def test_it_never_holds_more_than_the_linear_rule_and_less_the_longer_the_samples(
    length: int, l_max: int, q: int
) -> None:
    cost = TokenCost.quadratic(q)
    assert cost.fits(length + 1, l_max) <= cost.fits(length, l_max) <= TokenCost().fits(length, l_max)


@given(ANY_64_BIT, st.none() | ANY_64_BIT)
def test_the_longest_sample_within_a_budget(l_max: int, quadratic_length: int | None) -> None:
    cost = TokenCost(quadratic_length)
    longest = cost.longest(l_max)
    assert cost.of(1, longest) <= l_max < cost.of(1, longest + 1)


def test_numpy_integers_do_not_overflow() -> None:
    length, l_max = np.int64(2**40), np.int64(2**62)
    assert TokenCost.quadratic(2**40).fits(length, l_max) == 2**21  # type: ignore[arg-type]
    assert TokenCost(np.int64(2**40)).fits(length, l_max) == 2**21  # type: ignore[arg-type]
    assert TokenCost.quadratic(2**40).of(np.int64(2**30), length) == 2**71  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [0, -1, 1.5, 4096.0, "4096", True])
def test_what_is_no_length_is_refused_by_name(bad: object) -> None:
    with pytest.raises(ValueError, match=r"quadratic_length must be a whole number of tokens of at least 1.* got"):
        TokenCost(bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a quadratic cost needs quadratic_length"):
        TokenCost.quadratic(None)  # type: ignore[arg-type]
