"""Fits of the memory model against the conditions of an optimum, and budgets against brute force."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from odb_libra_lightning.data.memory_model import MemoryModel, MemoryPoint, fit_memory
from odb_libra_lightning.odb.cost import TokenCost

SIZES = [(n, length) for length in (256, 512, 1024) for n in (1, 2, 4)]
COEFFICIENTS = st.floats(0, 1e6) | st.just(0.0)


def points(base: float, a: float, b: float, sizes: list[tuple[int, int]] = SIZES) -> list[MemoryPoint]:
    return [MemoryPoint(n, length, round(base + n * (a * length + b * length**2))) for n, length in sizes]


@given(st.floats(1e6, 1e11), COEFFICIENTS, COEFFICIENTS)
def test_the_fit_recovers_the_model_that_made_the_points(base: float, a: float, b: float) -> None:
    model = fit_memory(points(base, a, b))
    for n, length in [(1, 128), (3, 2048), (16, 512)]:
        assert model.predict(n, length) == pytest.approx(base + n * (a * length + b * length**2), rel=1e-4)
    assert model.residual < 1e-5


@given(st.lists(st.integers(1, 10**12), min_size=len(SIZES), max_size=len(SIZES)))
def test_no_coefficient_is_negative_and_none_could_be_better(peaks: list[int]) -> None:
    """The Karush-Kuhn-Tucker conditions, which a non-negative least-squares fit meets and nothing else does."""
    model = fit_memory([MemoryPoint(n, length, peak) for (n, length), peak in zip(SIZES, peaks, strict=True)])
    terms = np.array([[1.0, n * length / 2**12, n * length**2 / 2**22] for n, length in SIZES])
    fit = np.array([model.base, model.per_token * 2**12, model.per_token_squared * 2**22])
    gradient = terms.T @ (terms @ fit - peaks) / max(peaks)
    assert (fit >= 0).all()
    assert (gradient > -1e-6).all()
    assert np.abs(gradient[fit > 0]).max(initial=0) < 1e-6
    worst = max(abs(model.predict(n, length) - p) / p for (n, length), p in zip(SIZES, peaks, strict=True))
    assert model.residual == pytest.approx(worst, rel=1e-6)


@given(st.floats(0, 1e9), COEFFICIENTS, COEFFICIENTS, st.floats(0, 1e12), st.integers(1, 10**5))
def test_no_batch_within_the_budget_is_predicted_above_the_bytes(
    base: float, a: float, b: float, available: float, length: int
) -> None:
    assume(max(a, b) > 1e-3)
    assume(available - base > 2 * max(a, b))
    model = MemoryModel(base, a, b)
    l_max, quadratic_length = model.budget(available)
    cost = TokenCost(quadratic_length)
    if not cost.exceeds(length, l_max):
        assert model.predict(cost.fits(length, l_max), length) <= available * (1 + 1e-9)


def test_a_budget_wastes_little_where_the_terms_are_far_from_one_token() -> None:
    l_max, quadratic_length = MemoryModel(2e9, 100_000, 50).budget(10e9)
    assert (l_max, quadratic_length) == (80_000, 2000)
    assert MemoryModel(2e9, 100_000, 0).budget(10e9) == (80_000, None)
    assert MemoryModel(0, 0, 10).budget(1e6) == (100_000, 1)  # n * (l + l*l) <= 100,000 implies 10 * n*l*l <= 1e6
    assert MemoryModel(0, 1e6, 1e-300).budget(1e9) == (1000, 2**31)


def test_what_is_available_must_hold_a_batch() -> None:
    with pytest.raises(ValueError, match="1,000,000,000 bytes do not hold the 2,000,000,000 that no batch changes"):
        MemoryModel(2e9, 100_000, 0).budget(1e9)
    with pytest.raises(ValueError, match="grows with neither term: measure with longer samples"):
        MemoryModel(2e9, 0, 0).budget(4e9)


@pytest.mark.parametrize("sizes", [[], [(1, 64), (2, 64), (4, 64)], [(1, 64), (1, 128)], [(1, 64), (1, 128), (1, 64)]])
def test_points_that_cannot_tell_the_terms_apart_are_refused(sizes: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="measure at least three batches, of at least two lengths"):
        fit_memory(points(1e6, 10, 1, sizes))


def test_it_is_saved_as_json_and_read_back(tmp_path: Path) -> None:
    model = fit_memory(points(1e9, 1234.5, 0.75))
    model.save(tmp_path / "memory.json")
    assert MemoryModel.load(tmp_path / "memory.json") == model
    assert json.loads((tmp_path / "memory.json").read_text()) == dataclasses.asdict(model)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "memory.json is no JSON"),
        ("[1, 2]", "expected an object with just the keys"),
        ('{"base": 1, "per_token": 2}', "expected an object with just the keys"),
        ('{"base": 1, "per_token": -2, "per_token_squared": 0, "residual": 0}', "per_token must be .* got -2"),
        ('{"base": NaN, "per_token": 2, "per_token_squared": 0, "residual": 0}', "base must be .* got nan"),
        ('{"base": "1", "per_token": 2, "per_token_squared": 0, "residual": 0}', "base must be .* got '1'"),
    ],
)
def test_a_file_that_is_no_model_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "memory.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        MemoryModel.load(tmp_path / "memory.json")


def test_coefficients_must_be_amounts_of_memory() -> None:
    with pytest.raises(ValueError, match="per_token_squared must be a finite number of at least 0, got inf"):
        MemoryModel(0, 1, math.inf)
