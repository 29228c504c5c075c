"""What a kernel is called on against runs of rows that one worker computes, read off masks."""

from __future__ import annotations

import random

import numpy as np
import pytest

from odb_libra_lightning.libra.kernel_segments import KernelSegments, kernel_segments
from odb_libra_lightning.libra.pool_plan import PoolPlan
from tests.libra.oracles import Pool, random_pool, tiles_of
from tests.libra.plans import blocks_of, plan_of, seeds

Run = tuple[int, int, int, int, int]  # worker, head shard, first query, end, first key


def runs(pool: Pool, plan: PoolPlan, tile_worker: list[int]) -> list[Run]:
    """Runs of rows of one document that a worker computes for a head shard, and the first key that the first sees."""
    computed: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for tile, worker in zip(tiles_of(pool, blocks_of(plan)), tile_worker, strict=True):
        rows = [(tile.sequence, row) for row in pool.query_rows(tile)]
        computed.setdefault((worker, tile.shard), []).extend(rows)
    base = [sum(map(pool.rows, range(s))) for s in range(len(pool.documents))]
    found: list[Run] = []
    for (worker, shard), at in sorted(computed.items()):
        before = None
        for sequence, row in sorted(at):
            document = int(pool.document_of[sequence][row])
            if before == (sequence, row - 1, document):
                found[-1] = (*found[-1][:3], base[sequence] + row + 1, found[-1][4])
            else:
                seen = int(pool.masks[sequence][row].argmax())
                found.append((worker, shard, base[sequence] + row, base[sequence] + row + 1, base[sequence] + seen))
            before = sequence, row, document
    return found


def as_runs(segments: KernelSegments) -> list[Run]:
    columns = (segments.worker, segments.shard, segments.start, segments.stop, segments.key_start)
    assert all(column.dtype == np.int64 for column in columns)
    return list(zip(*(column.tolist() for column in columns), strict=True))


@pytest.mark.parametrize("window", [None, 1, 2, 5])
@pytest.mark.parametrize("seed", seeds(2, 8))
def test_segments_are_the_runs_of_rows_of_one_document_at_a_worker(seed: int, window: int | None) -> None:
    draw = random.Random(seed)
    for _ in range(40):
        pool = random_pool(draw, window=window)
        plan = plan_of(pool)
        scattered = [draw.randrange(pool.num_workers) for _ in plan.tile_worker]
        for segments, tile_worker in (
            (plan.kernel_segments, plan.tile_worker.tolist()),
            (kernel_segments(plan.tiles, np.array(scattered, np.int32)), scattered),
        ):
            expected = runs(pool, plan, tile_worker)
            assert as_runs(segments) == expected, pool
            for worker in range(pool.num_workers):
                assert as_runs(segments.of(worker)) == [run for run in expected if run[0] == worker], pool


def test_neighbours_are_joined_within_a_document_a_worker_and_a_head_shard() -> None:
    """Blocks of 2 rows, documents of 5 and 3; worker 0 has rows 0 to 3 of shard 0 and 4 to 7 of shard 1."""
    pool = Pool(documents=((5, 3),), context_parallel=2, block_size=2, window=2, split_oversize=False)
    segments = kernel_segments(plan_of(pool).tiles, np.array([0, 1, 0, 1, 1, 0, 1, 0], np.int32))
    assert as_runs(segments.of(0)) == [(0, 0, 0, 4, 0), (0, 1, 4, 5, 3), (0, 1, 5, 8, 5)]
    assert as_runs(segments.of(1)) == [(1, 0, 4, 5, 3), (1, 0, 5, 8, 5), (1, 1, 0, 4, 0)]
