"""Small runs and grids, and a cluster on which a latency can be worked out by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

from odb_libra_lightning.libra.attention_costs import AttentionShape
from odb_libra_lightning.libra.calibration import Calibration
from odb_libra_lightning.libra.simulation_results import Grid, SimulatedRun

SHAPE = AttentionShape(context_parallel=2, num_heads=4, num_kv_heads=2, head_dim=1, bytes_per_element=2)
# One FLOP a second and links that cost nothing: a latency is the FLOPs of the slowest worker.
SLOW_KERNEL = Calibration(
    source="test",
    peak_flops=1.0,
    efficiency_rows=(1,),
    efficiency_heads=(1,),
    efficiency=((1.0,),),
    backward_ratio=2.5,
    launch_seconds=1e-30,
    workers_per_node=8,
    intra_node_alpha=1e-30,
    intra_node_beta=1e30,
    inter_node_alpha=1e-30,
    inter_node_beta=1e30,
)


def run_of(length: int, global_batch: int, data_parallel: int, **shape: Any) -> SimulatedRun:
    return SimulatedRun(
        sequence_length=length,
        global_batch=global_batch,
        data_parallel=data_parallel,
        shape=dataclasses.replace(SHAPE, **shape),
    )


def grid_of(
    pool_sizes: int | tuple[int, ...], block: int, *, shards: int = 2, chunks: int | tuple[int, ...] = 2
) -> Grid:
    return Grid(
        pool_sizes=(pool_sizes,) if isinstance(pool_sizes, int) else pool_sizes,
        head_shards=(shards,),
        block_sizes=(block,),
        chunks=(chunks,) if isinstance(chunks, int) else chunks,
    )


def seconds(pairs: float, heads: int = 4) -> float:
    """Forward and backward of so many pairs on one worker with head dimension 1."""
    return 4 * pairs * heads * 3.5
