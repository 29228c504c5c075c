"""A pool's plan, a plan's columns as plain lists, and the seeds that random pools are drawn with."""

from __future__ import annotations

from typing import Any

import pytest

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


def seeds(usual: int, full: int) -> list[Any]:
    """Seeds of a random test: some for every run, the others for the long matrices."""
    return [seed if seed < usual else pytest.param(seed, marks=pytest.mark.full) for seed in range(full)]
