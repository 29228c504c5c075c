"""Which grid point the simulator says to take, and why."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from odb_libra_lightning.libra.choice import choose, three_digits, tied_points
from odb_libra_lightning.libra.simulation_results import Choice, GridPoint, MethodFigures
from odb_libra_lightning.libra.simulator import simulate
from tests.libra.simulated_runs import SLOW_KERNEL, grid_of, run_of


def choice_of(lengths: Any, **asked: Any) -> Choice:
    """What is chosen after a simulation of these documents."""
    given = {name: asked[name] for name in ("calibration", "seed") if name in asked}
    choice = choose(simulate(lengths, **asked), lengths, **given)
    assert choice is not None
    return choice


def test_the_choice_is_the_least_latency_and_says_what_half_and_double_would_give():
    lengths = np.random.default_rng(4).lognormal(2, 1.5, 400).astype(int).clip(1, 64)
    found = simulate(lengths, run=run_of(64, 16, 8), grid=grid_of((1, 2, 4, 8), 8), calibration=SLOW_KERNEL)
    choice = choose(found, lengths, calibration=SLOW_KERNEL)
    assert choice is not None
    point = choice.point
    swept = [one for one in found.figures if one.method == "libra"]
    assert min(swept, key=lambda one: one.mean_latency).point == point
    for size in (point.pool_size // 2, point.pool_size * 2):
        assert (f"P={size}: " in choice.reason) == (1 <= size <= 8)
    alone = choice_of(lengths, run=run_of(64, 16, 8), grid=grid_of(point.pool_size, 8), calibration=SLOW_KERNEL)
    assert alone.reason.split(": ", 1)[1] == choice.reason.split(": ", 1)[1]


def test_without_libra_there_is_nothing_to_choose():
    found = simulate([8] * 8, run=run_of(8, 4, 2), grid=grid_of(2, 4), methods=("ulysses", "tap"))
    assert choose(found, [8] * 8) is None


def test_a_simulation_plans_its_grid_and_the_choice_what_lies_beside_it():
    lengths = [8] * 8
    planned: list[tuple[int, int]] = []
    found = simulate(lengths, run=run_of(8, 8, 8), grid=grid_of(2, 4), methods=("libra",))
    choose(found, lengths, progress=lambda done, total: planned.append((done, total)))
    assert planned == [(done, 10) for done in range(1, 11)]  # eight pools of 1 and two of 4


@pytest.mark.parametrize(
    ("number", "text"),
    [(1234.5, "1,234"), (100, "100"), (99.94, "99.9"), (15.0, "15.0"), (9.994, "9.99"), (0.547, "0.55"), (0, "0.00")],
)
def test_figures_have_three_digits(number: float, text: str):
    assert three_digits(number) == text


def libra_figures(mean: float, worst: float, moved: float = 0.0, pool_size: int = 1) -> MethodFigures:
    return MethodFigures(
        method="libra",
        point=GridPoint(pool_size=pool_size, head_shards=2, block_size=8, chunks=2),
        inter_pool_imbalance=0.0,
        intra_pool_imbalance=0.0,
        worst_intra_pool_imbalance=0.0,
        bytes_moved=moved,
        busiest_bytes=0,
        mean_latency=mean,
        worst_latency=worst,
    )


@pytest.mark.parametrize(
    ("measured", "order"),
    [
        # P=2 has the least mean, P=4 is within 2 % and better at its worst; P=8 has the best worst, and is too slow.
        ({2: (1.00, 5.0), 4: (1.019, 3.0), 8: (1.021, 1.0)}, [4, 2]),
        ({2: (1.00, 5.0), 4: (1.50, 1.0)}, [2]),
        # A tie is with the least of all, not with the next one.
        ({2: (1.03, 1.0), 4: (1.015, 2.0), 8: (1.00, 3.0)}, [4, 8]),
        # Equal at worst: the one that moves less, and then the smaller pool, wherever they stand.
        ({8: (1.00, 3.0, 5.0), 4: (1.01, 3.0, 4.0), 2: (1.01, 3.0, 6.0)}, [4, 8, 2]),
        ({8: (1.00, 3.0, 5.0), 2: (1.01, 3.0, 5.0), 4: (1.00, 3.0, 5.0)}, [2, 4, 8]),
    ],
)
def test_of_means_within_two_percent_the_least_worst_is_chosen(measured, order):
    figures = [libra_figures(*numbers, pool_size=size) for size, numbers in measured.items()]
    by_point = {one.point: one for one in figures if one.point is not None}
    assert [point.pool_size for point in tied_points(by_point)] == order


@pytest.mark.parametrize(
    ("lengths", "pool_sizes", "start"),
    [
        # Every home holds one document, so that nothing moves and pools of any size are as fast.
        (
            [8] * 16,
            (4, 2),
            "Of 2 grid points, 2 are within 2% of the least mean straggler latency, which a prediction cannot tell "
            "apart; P=2 with H=2, B=4 and M=2 has the least predicted straggler latency among them in the worst "
            "micro-step, which is what pipeline stages wait for: ",
        ),
        # A document of 16 among ones of 1: alone its replica takes far longer than a pool of four.
        (
            [16, *[1] * 48],
            (1, 4),
            "Of 2 grid points, P=4 with H=2, B=4 and M=2 has the least predicted straggler latency, and no other is "
            "within 2% of it: ",
        ),
        ([8] * 16, (2,), "P=2 with H=2, B=4 and M=2 is the only grid point: "),
    ],
)
def test_the_choice_says_what_was_tied_and_why_the_worst_decides(lengths, pool_sizes, start):
    choice = choice_of(
        lengths,
        run=run_of(16, 4, 4),
        grid=grid_of(pool_sizes, 4),
        methods=("libra",),
        steps=1,
        seed=None,
        calibration=SLOW_KERNEL,
    )
    assert choice.reason.startswith(start)


def test_of_equals_the_smaller_pool_is_chosen():
    choice = choice_of([8] * 32, run=run_of(16, 8, 4), grid=grid_of((4, 2), 4), methods=("libra",), steps=1)
    assert choice.point.pool_size == 2
