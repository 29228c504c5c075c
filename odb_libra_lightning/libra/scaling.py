"""What more replicas bring when the batch of an optimizer step stays the same: throughput against the fewest."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from odb_libra_lightning.libra.calibration import DEFAULT_CALIBRATION, Calibration
from odb_libra_lightning.libra.simulation_results import Grid, GridPoint, Method, SimulatedRun
from odb_libra_lightning.libra.simulator import Packing, check_simulation, simulate

_MOST_SECONDS = 1e50


@dataclass(frozen=True, kw_only=True)
class ScalingFigures:
    """One method at one data-parallel degree.

    Attributes:
        method: its name.
        data_parallel: replicas, `DP`.
        step_seconds: one layer in all micro-steps of an optimizer step, forward and backward.
        speedup: step of the fewest replicas over this step.
        efficiency: the speed-up over how many times the replicas are; 1 is perfect.
    """

    method: Method
    data_parallel: int
    step_seconds: float
    speedup: float
    efficiency: float


def scaling(
    document_lengths: Sequence[int] | NDArray[np.integer],
    *,
    run: SimulatedRun,
    point: GridPoint,
    data_parallel: Sequence[int],
    methods: Sequence[Method] = ("ulysses", "libra"),
    linear_seconds: float = 0.0,
    steps: int = 4,
    packing: Packing = "sequential",
    calibration: Calibration = DEFAULT_CALIBRATION,
    seed: int | None = 0,
) -> tuple[ScalingFigures, ...]:
    """Simulate one configuration at several data-parallel degrees; the batch of an optimizer step stays the same.

    A pool has as many replicas as the configuration says, or all where there are fewer. The step is
    `GA * (mean straggler latency + linear_seconds * L / CP)`: the linear layers take every worker equally long.

    Args:
        document_lengths: as in `simulate`, as for all that is not named here.
        run: its `data_parallel` does not matter.
        point: the configuration.
        data_parallel: degrees; the smallest is what the others are compared with.
        methods: which to simulate.
        linear_seconds: seconds of everything but attention, a token of a worker and layer, forward and backward.
        steps: optimizer steps.
        packing: of the documents.
        calibration: of the cluster.
        seed: of the order of documents.

    Raises:
        ValueError: as `simulate`; or no degree, or `linear_seconds` that are no number from 0 to 1e50.
    """
    grid = Grid(
        pool_sizes=(point.pool_size,),
        head_shards=(point.head_shards,),
        block_sizes=(point.block_size,),
        chunks=(point.chunks,),
    )
    cases = check_scaling(run, grid, methods, data_parallel=data_parallel, linear_seconds=linear_seconds)
    seconds: dict[tuple[Method, int], float] = {}
    for case, case_grid in cases:
        found = simulate(
            document_lengths,
            run=case,
            grid=case_grid,
            methods=methods,
            steps=steps,
            packing=packing,
            calibration=calibration,
            seed=seed,
        )
        linear = linear_seconds * case.sequence_length / case.shape.context_parallel
        for one in found.figures:
            seconds[one.method, case.data_parallel] = case.accumulation * (one.mean_latency + linear)
    fewest = min(data_parallel)
    return tuple(
        ScalingFigures(
            method=method,
            data_parallel=degree,
            step_seconds=step,
            speedup=seconds[method, fewest] / step,
            efficiency=seconds[method, fewest] * fewest / (step * degree),
        )
        for (method, degree), step in seconds.items()
        if (method, fewest) in seconds
    )


def check_scaling(
    run: SimulatedRun, grid: Grid, methods: Sequence[Method], *, data_parallel: Sequence[int], linear_seconds: float
) -> list[tuple[SimulatedRun, Grid]]:
    """The run and the grid at each degree, ascending, once they are known to fit.

    Raises:
        ValueError: as in `check_simulation`; or no degree, or `linear_seconds` that are no number from 0 to 1e50.
    """
    if not data_parallel:
        raise ValueError("data_parallel: expected at least one degree")
    check_linear_seconds(linear_seconds)
    cases = []
    for degree in sorted(set(data_parallel)):
        sizes = tuple(min(size, degree) for size in grid.pool_sizes)
        case = dataclasses.replace(run, data_parallel=degree), dataclasses.replace(grid, pool_sizes=sizes)
        check_simulation(*case, methods)
        cases.append(case)
    return cases


def check_linear_seconds(linear_seconds: float) -> None:
    """Check the seconds of everything but attention.

    Raises:
        ValueError: no number from 0 to 1e50, beyond which a step would be no finite number.
    """
    if not 0 <= linear_seconds <= _MOST_SECONDS:
        raise ValueError(f"linear_seconds={linear_seconds}: expected a number from 0 to {_MOST_SECONDS:g}")
