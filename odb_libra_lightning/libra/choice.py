"""Which grid point of a simulation to take, and why, in words."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from odb_libra_lightning.libra.calibration import DEFAULT_CALIBRATION, Calibration
from odb_libra_lightning.libra.simulation_results import Choice, Grid, GridPoint, Method, MethodFigures, Simulation
from odb_libra_lightning.libra.simulator import Packing, Progress, simulate

_AS_FAST = 0.02  # means so close are a tie: the model is not better than that


def choose(
    found: Simulation,
    document_lengths: Sequence[int] | NDArray[np.integer],
    *,
    packing: Packing = "sequential",
    calibration: Calibration = DEFAULT_CALIBRATION,
    seed: int | None = 0,
    progress: Progress | None = None,
) -> Choice | None:
    """Choose a grid point of `libra`, and say what half and twice its pool size would give.

    Args:
        found: what `simulate` returned.
        document_lengths: as given to it, as for all that follow; a pool size that is not in the grid is simulated.
        packing: of the documents.
        calibration: of the cluster.
        seed: of the order of documents.
        progress: called with the number of plans made and to be made.

    Returns:
        The choice; None where `libra` was not simulated.

    Complexity: that of `simulate` for at most two pool sizes at one grid point.
    """
    figures = {one.point: one for one in found.figures if one.method == "libra" and one.point is not None}
    if not figures:
        return None
    tied = tied_points(figures)
    best = tied[0]
    why = f"{_why(tied, len(figures))}: {_in_words(figures[best])}."
    beside = [dataclasses.replace(best, pool_size=size) for size in _sizes_beside(best, found)]
    if missing := [point for point in beside if point not in figures]:
        more = simulate(
            document_lengths,
            run=found.run,
            grid=Grid(
                pool_sizes=[point.pool_size for point in missing],
                head_shards=[best.head_shards],
                block_sizes=[best.block_size],
                chunks=[best.chunks],
            ),
            methods=("libra",),
            steps=found.steps,
            packing=packing,
            calibration=calibration,
            seed=seed,
            progress=progress,
        )
        figures |= {one.point: one for one in more.figures if one.point is not None}
    if beside:
        others = "; ".join(f"P={point.pool_size}: {_in_words(figures[point])}" for point in beside)
        why += f" With the same H, B and M, {others}."
    return Choice(point=best, reason=why)


def tied_points(figures: Mapping[GridPoint, MethodFigures]) -> list[GridPoint]:
    """The grid points that are as fast as the fastest, the one to take first.

    Means within 2 % of the least are a tie, since the latency model is no better than that. Of those, the worst
    micro-step decides, which is what pipeline stages wait for; then the bytes, then the smaller pool.
    """
    fastest = min(one.mean_latency for one in figures.values())
    return sorted(
        (point for point, one in figures.items() if one.mean_latency <= fastest * (1 + _AS_FAST)),
        key=lambda point: (figures[point].worst_latency, figures[point].bytes_moved, point.pool_size),
    )


def three_digits(number: float) -> str:
    """A figure as tables and sentences show it: 1,234 or 123 or 12.3 or 1.23 or 0.12."""
    if number >= 100:
        return f"{number:,.0f}"
    return f"{number:.1f}" if number >= 10 else f"{number:.2f}"


def _sizes_beside(point: GridPoint, found: Simulation) -> list[int]:
    """Half the pool size and twice it, where a run can have such pools."""
    half = [] if point.pool_size % 2 else [point.pool_size // 2]
    twice = [] if found.run.data_parallel % (2 * point.pool_size) else [2 * point.pool_size]
    return half + twice


def _why(tied: Sequence[GridPoint], count: int) -> str:
    best = tied[0]
    point = f"P={best.pool_size} with H={best.head_shards}, B={best.block_size} and M={best.chunks}"
    if count == 1:
        return f"{point} is the only grid point"
    if len(tied) == 1:
        return (
            f"Of {count} grid points, {point} has the least predicted straggler latency, and no other is within "
            f"{_AS_FAST:.0%} of it"
        )
    return (
        f"Of {count} grid points, {len(tied)} are within {_AS_FAST:.0%} of the least mean straggler latency, which a "
        f"prediction cannot tell apart; {point} has the least predicted straggler latency among them in the worst "
        "micro-step, which is what pipeline stages wait for"
    )


def _in_words(figures: MethodFigures) -> str:
    return (
        f"{three_digits(figures.mean_latency * 1e3)} ms a layer on average, "
        f"{three_digits(figures.worst_latency * 1e3)} ms at worst, "
        f"{three_digits(figures.bytes_moved / 2**30)} GiB moved a micro-step"
    )


def at_choice(found: Simulation, choice: Choice | None) -> list[MethodFigures]:
    """One entry a method: at the chosen grid point where the method has it, else at its own best."""
    point = choice.point if choice is not None else None

    def fitness(one: MethodFigures) -> tuple[bool, float]:
        cut = one.point is not None and point is not None and _cut(one.method, one.point) == _cut(one.method, point)
        return not cut, one.mean_latency

    methods = dict.fromkeys(one.method for one in found.figures)
    return [min((one for one in found.figures if one.method == method), key=fitness) for method in methods]


def _cut(method: Method, point: GridPoint) -> tuple[int, ...]:
    """What of a grid point a method shares with libra's: distca has a pool size of its own, tap no chunks."""
    cut = (point.head_shards, point.block_size)
    if method == "distca":
        return (*cut, point.chunks)
    return (*cut, point.pool_size, point.chunks) if method == "libra" else (*cut, point.pool_size)
