"""Schedules on samples, and the number of steps that nobody knows: against exact values, and the real rules."""

from __future__ import annotations

import itertools
import math
import statistics
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR

from odb_libra_lightning import ODBLoader
from odb_libra_lightning.odb.batch_info import BatchInfo
from odb_libra_lightning.odb.cost import TokenCost
from odb_libra_lightning.odb.progress import (
    DECAYS,
    Consumed,
    Limits,
    Spread,
    StepEstimate,
    epoch_share,
    estimate_epoch,
    estimate_steps,
    lr_factor,
)
from tests.odb.simulation import simulate

SHAPES = st.fixed_dictionaries(
    {
        "warmup": st.just(0.0) | st.floats(1e-6, 0.99),
        "decay": st.sampled_from(["cosine", "linear"]),
        "minimum": st.floats(0, 1),
    }
)


@given(shape=SHAPES, points=st.lists(st.floats(0, 1), min_size=2))
def test_the_factor_rises_to_1_and_falls_to_its_minimum(shape: dict[str, Any], points: list[float]) -> None:
    warmup = shape["warmup"]
    assert lr_factor(warmup, **shape) == 1
    assert lr_factor(1, **shape) == lr_factor(1.5, **shape) == shape["minimum"]
    if warmup:
        assert lr_factor(0, **shape) == 0
        assert lr_factor(warmup / 2, **shape) == pytest.approx(0.5)
    factors = [(p, lr_factor(p, **shape)) for p in sorted(points)]
    assert all(0 <= factor <= 1 for _, factor in factors)
    for (p, earlier), (q, later) in itertools.pairwise(factors):
        if p >= warmup:
            assert earlier >= later >= shape["minimum"]
        elif q <= warmup:
            assert earlier <= later


def test_the_shapes_are_those_of_the_field() -> None:
    steps = 50
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    cosine = CosineAnnealingLR(optimizer, T_max=steps, eta_min=0.1)
    for step in range(steps + 1):
        assert lr_factor(step / steps, minimum=0.1) == pytest.approx(cosine.get_last_lr()[0])
        assert lr_factor(step / steps, minimum=0.1, decay="linear") == pytest.approx(1 - 0.9 * step / steps)
        assert lr_factor(step / steps, decay="constant") == 1
        optimizer.step()
        cosine.step()
    assert [lr_factor(p, warmup=0.2, decay="constant") for p in (0, 0.1, 0.2, 1)] == [0, 0.5, 1, 1]


@pytest.mark.parametrize(
    ("progress", "shape", "message"),
    [
        (-0.1, {}, "progress must be a share of training, at least 0, got -0.1"),
        (math.nan, {}, "progress must be .* got nan"),
        (0, {"warmup": 1}, "warmup is a share of training, at least 0 and below 1, got 1"),
        (0, {"warmup": 100}, "got 100"),
        (0, {"minimum": 1.1}, "minimum is a factor from 0 to 1, got 1.1"),
        (0, {"decay": "cosin"}, r"decay must be one of \('cosine', 'linear', 'constant'\), got 'cosin'"),
        (0, {"decay": "constant", "minimum": 0.1}, "never falls to minimum=0.1: leave minimum out, or choose a decay"),
    ],
)
def test_shapes_that_cannot_work_are_refused(progress: float, shape: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lr_factor(progress, **shape)
    assert set(DECAYS) == {"cosine", "linear", "constant"}


def test_the_nearest_limit_is_what_progress_is_measured_by() -> None:
    done = Consumed(epochs=1.5, updates=30, samples=700, tokens=10_000)
    assert Limits(epochs=3).progress(done) == 0.5
    assert Limits(epochs=3, updates=40).progress(done) == 0.75
    assert Limits(epochs=3, updates=100, samples=1000).progress(done) == 0.7
    assert Limits(epochs=3, tokens=9_999).progress(done) == 1
    assert Limits(epochs=0).progress(done) == 1
    with pytest.raises(ValueError, match="limit its epochs, updates, samples or tokens"):
        Limits().progress(done)


def test_the_share_of_an_epoch() -> None:
    assert epoch_share(30, 120) == 0.25
    assert epoch_share(30, 120, steps_done=4, steps_limit=5) == 0.8
    assert epoch_share(120, 120, steps_done=4, steps_limit=5) == 1
    assert epoch_share(30, None, steps_done=4) == 0
    assert epoch_share(30, None, steps_done=4, steps_limit=5) == 0.8


@given(st.lists(st.integers(1, 1000), min_size=2))
def test_the_spread_is_the_sample_standard_deviation(numbers: list[int]) -> None:
    spread = Spread()
    assert math.isnan(spread.value)
    for number in numbers:
        spread.add(number)
    assert spread.value == pytest.approx(statistics.stdev(numbers), rel=1e-9, abs=1e-9)


def test_an_estimate_by_hand() -> None:
    # 20 of 100 samples in 4 steps of 5: 16 more, of a variance of (2 / 5)^2 * (1 + 16 / 4) = 0.8 each.
    estimate = estimate_epoch(samples_done=20, samples_total=100, steps_done=4, spread=2.0)
    assert estimate.steps == 20
    error = math.sqrt(estimate.error**2 - 0.25)
    assert error**2 == pytest.approx(0.8 * (16 + error))
    assert estimate.at_most(3) == math.ceil(20 + 3 * estimate.error)
    assert estimate_epoch(samples_done=100, samples_total=100, steps_done=21, spread=math.nan) == StepEstimate(21, 0)
    assert math.isinf(estimate_epoch(samples_done=5, samples_total=100, steps_done=1, spread=math.nan).error)
    for done, steps in [(0, 1), (5, 0), (101, 20)]:
        with pytest.raises(ValueError, match=f"got {steps} steps and {done} samples"):
            estimate_epoch(samples_done=done, samples_total=100, steps_done=steps, spread=1.0)


def log_normal(size: int, seed: int, *, mean: float = 500, cv: float = 0.78) -> list[int]:
    sigma = math.sqrt(math.log(1 + cv * cv))
    lengths = np.random.default_rng(seed).lognormal(math.log(mean) - sigma * sigma / 2, sigma, size)
    return np.maximum(lengths, 1).astype(int).tolist()


CASES = {
    "one rank": {"world_size": 1, "l_max": 4096, "buffer_size": 1024},
    "two ranks, many rounds": {"world_size": 2, "l_max": 4096, "buffer_size": 128},
    "eight ranks, one round": {"world_size": 8, "l_max": 8192, "buffer_size": 1024},
    "small buffer": {"world_size": 1, "l_max": 8192, "buffer_size": 64},
}
SEEDS = range(10)


@cache
def epoch(case: str, seed: int, cv: float) -> list[BatchInfo]:
    """Facts about the steps of a real epoch of 3,000 samples, on rank 0."""
    lengths = log_normal(3000, seed, cv=cv)
    steps = simulate(lengths, seed=seed, length_fn=lambda length: length, **CASES[case])[0]
    return [step.info for step in steps]


@pytest.mark.parametrize("cv", [0.78, 1.6])
@pytest.mark.parametrize("case", CASES)
def test_the_true_number_of_steps_lies_within_three_errors_nearly_always(case: str, cv: float) -> None:
    within, errors_at = [], []
    for seed in SEEDS:
        infos = epoch(case, seed, cv)
        spread = Spread()
        errors = []
        for number, info in enumerate(infos, start=1):
            spread.add(info.global_samples)
            estimate = estimate_epoch(
                samples_done=info.samples_done, samples_total=info.samples_total, steps_done=number, spread=spread.value
            )
            errors.append(estimate.error)
            if number >= 10:
                within.append(abs(estimate.steps - len(infos)) <= 3 * estimate.error)
        assert estimate == StepEstimate(len(infos), 0.0)
        errors_at.append([errors[len(errors) * tenth // 10] for tenth in (1, 3, 5, 7, 9)])
    assert statistics.mean(within) >= (0.99 if len(infos) > 100 else 0.97)
    means = np.mean(errors_at, axis=0)
    assert (np.diff(means) < 0).all(), "the estimate tightens as the epoch runs"


@pytest.mark.parametrize("cv", [0.78, 1.6])
@pytest.mark.parametrize("case", CASES)
def test_the_estimate_before_training_holds_against_real_epochs(case: str, cv: float) -> None:
    known, sampled = [], []
    for seed in SEEDS:
        steps = len(epoch(case, seed, cv))
        lengths = log_normal(3000, seed, cv=cv)
        whole = estimate_steps(lengths, num_samples=3000, **CASES[case])
        known.append(whole.steps - steps)
        assert abs(whole.steps - steps) < 3 + 0.03 * steps, "all lengths known: only the order is open"
        few = estimate_steps(lengths[:400], num_samples=3000, seed=seed, **CASES[case])
        sampled.append((few.steps - steps) / few.error)
        assert few.error < 0.2 * few.steps
    assert abs(statistics.mean(known)) < 1 + 0.01 * steps, "no bias"
    assert sum(abs(z) <= 3 for z in sampled) >= 9
    assert statistics.mean(z * z for z in sampled) < 3, "the error is of the right size"


def test_a_long_epoch_is_played_in_part() -> None:
    lengths = log_normal(2000, 0)
    part = estimate_steps(lengths, num_samples=4_000_000, l_max=8192, world_size=16)
    small = estimate_steps(lengths, num_samples=400_000, l_max=8192, world_size=16)
    assert part.steps == pytest.approx(10 * small.steps, rel=0.05)


def test_a_quadratic_cost_takes_more_steps_and_equal_lengths_an_exact_number() -> None:
    lengths = log_normal(1000, 0)
    linear = estimate_steps(lengths, num_samples=1000, l_max=4096)
    assert estimate_steps(lengths, num_samples=1000, l_max=4096, cost=TokenCost(500)).steps > 1.5 * linear.steps
    # One sample opens the round, then groups of ten: 1 + 99 full ones + 9 left.
    assert estimate_steps([100] * 1000, num_samples=1000, l_max=1000) == StepEstimate(101.0, 0.0)
    assert estimate_steps([100], num_samples=1, l_max=1000) == StepEstimate(1.0, 0.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_samples": 0}, "num_samples must be at least 1, got 0"),
        ({"l_max": 0}, "l_max must be at least 1, got 0"),
        ({"world_size": -1}, "world_size must be at least 1, got -1"),
        ({"lengths": [5]}, "1 lengths say nothing of 10 samples: give some hundreds"),
        ({"lengths": [5, 0]}, "must be at least 1"),
    ],
)
def test_estimates_that_cannot_work_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        estimate_steps(**{"lengths": [5, 6], "num_samples": 10, "l_max": 10, **arguments})


def test_a_plain_loop_ends_at_the_minimum_and_one_cycle_within_its_total(tmp_path: Path) -> None:
    lengths = log_normal(200, 0)
    dataset = [torch.zeros(length, dtype=torch.long) for length in lengths]
    loader = ODBLoader(dataset, torch.nn.utils.rnn.pad_sequence, l_max=2048, num_workers=0, loss_scaling="none")
    epochs = 2

    def optimizer() -> torch.optim.Optimizer:
        return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)

    by_samples = optimizer()
    done = 0.0
    schedule = LambdaLR(by_samples, lambda _: lr_factor(done, warmup=0.1, minimum=0.2))
    total = epochs * estimate_steps(lengths, num_samples=200, l_max=2048).at_most()
    cycle = OneCycleLR(optimizer(), max_lr=1.0, total_steps=total)
    rates, steps = [], 0
    for number in range(epochs):
        for _ in loader:
            rates.append(by_samples.param_groups[0]["lr"])
            by_samples.step()
            done = (number + loader.info.samples_done / loader.info.samples_total) / epochs
            schedule.step()
            cycle.optimizer.step()
            cycle.step()  # raises beyond its total
            steps += 1
    assert by_samples.param_groups[0]["lr"] == pytest.approx(0.1)
    peak = rates.index(max(rates))
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert 0.8 * total < steps <= total
