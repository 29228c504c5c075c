"""A pool's plan, and a plan's columns as plain lists."""

from __future__ import annotations

from odb_libra_lightning.libra.pool_plan import PoolPlan, plan_pool
from tests.libra.oracles import Pool


def plan_of(pool: Pool) -> PoolPlan:
    return plan_pool([list(lengths) for lengths in pool.documents], **pool.options)


def blocks_of(plan: PoolPlan) -> list[tuple[int, int, int]]:
    """Every (sequence, start, stop) of a plan's blocks, in order, rows within the sequence."""
    found = []
    for start, stop in zip(plan.tiles.block_start.tolist(), plan.tiles.block_stop.tolist(), strict=True):
        sequence = max(s for s, first in enumerate(plan.tiles.sequence_start[:-1].tolist()) if first <= start)
        first = int(plan.tiles.sequence_start[sequence])
        found.append((sequence, start - first, stop - first))
    return found
