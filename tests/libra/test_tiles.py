"""Blocks and tiles of a pool against cuts made row by row and masks that are counted."""

from __future__ import annotations

import random

import numpy as np
import pytest

from odb_libra_lightning.libra.pool_plan import plan_pool
from tests.libra.oracles import Pool, Tile, blocks, random_pool, tiles_of
from tests.libra.plans import blocks_of, plan_of, seeds


@pytest.mark.parametrize("seed", seeds(4, 10))
@pytest.mark.parametrize("split_oversize", [False, True])
def test_blocks_are_cut_at_multiples_of_the_block_size_and_where_the_home_changes(seed: int, split_oversize: bool):
    draw = random.Random(seed)
    for _ in range(40):
        pool = random_pool(draw, split_oversize=split_oversize)
        cut = blocks_of(plan_of(pool))
        if pool.placement == "paper" or not split_oversize:
            assert cut == blocks(pool), pool
        else:  # finer where tiles found no room
            assert halved(cut, blocks(pool)), pool


def halved(cut: list[tuple[int, int, int]], coarse: list[tuple[int, int, int]]) -> bool:
    """Whether some blocks are others, each whole or cut into halves and those into halves, and nothing else."""

    def pieces(sequence: int, start: int, stop: int) -> list[tuple[int, int, int]]:
        if (sequence, start, stop) in cut or stop - start <= 1:
            return [(sequence, start, stop)]
        middle = (start + stop) // 2
        return pieces(sequence, start, middle) + pieces(sequence, middle, stop)

    return cut == [piece for block in coarse for piece in pieces(*block)]


def test_blocks_are_not_cut_between_documents():
    # 12 rows, homes of 6, blocks of 4: nothing at rows 3, 5 and 9, where documents end.
    pool = Pool(documents=((3, 2, 4, 3),), block_size=4, split_oversize=False)
    assert blocks_of(plan_of(pool)) == [(0, 0, 4), (0, 4, 6), (0, 6, 8), (0, 8, 12)]


def test_blocks_are_cut_between_documents_where_a_multiple_of_the_block_size_is():
    pool = Pool(documents=((4, 4),), context_parallel=1, block_size=4, split_oversize=False)
    assert blocks_of(plan_of(pool)) == [(0, 0, 4), (0, 4, 8)]


@pytest.mark.parametrize("seed", seeds(4, 10))
def test_tiles_are_every_row_and_every_query_head_once(seed: int):
    draw = random.Random(100 + seed)
    for _ in range(40):
        pool = random_pool(draw)
        plan = plan_of(pool)
        seen = [np.zeros((pool.rows(s), pool.num_heads), int) for s in range(len(pool.documents))]
        cut = blocks_of(plan)
        for tile in range(len(plan.tile_worker)):
            block, shard = divmod(tile, pool.head_shards)
            sequence, start, stop = cut[block]
            assert start < stop
            assert set(pool.home_of[sequence][start:stop].tolist()) == {plan.tiles.block_home[block]}, pool
            seen[sequence][start:stop, shard * pool.shard_heads : (shard + 1) * pool.shard_heads] += 1
        assert all((times == 1).all() for times in seen), pool


@pytest.mark.parametrize("seed", seeds(4, 10))
def test_the_work_of_a_tile_is_its_mask_counted(seed: int):
    draw = random.Random(200 + seed)
    for _ in range(60):
        pool = random_pool(draw)
        plan = plan_of(pool)
        assert plan.tile_flops.dtype == np.int64
        assert plan.tile_flops.tolist() == [pool.work(tile) for tile in tiles_of(pool, blocks_of(plan))], pool


@pytest.mark.parametrize("seed", seeds(4, 10))
def test_segments_are_the_runs_of_one_document_in_a_block(seed: int):
    draw = random.Random(400 + seed)
    for _ in range(40):
        pool = random_pool(draw)
        plan = plan_of(pool)
        tiles, expected = plan.tiles, []
        for block, (sequence, start, stop) in enumerate(blocks_of(plan)):
            first, document = int(tiles.sequence_start[sequence]), pool.document_of[sequence]
            for number in sorted(set(document[start:stop].tolist()) - {-1}):
                rows = [row for row in range(start, stop) if document[row] == number]
                seen = int(pool.masks[sequence][rows[0]].argmax())
                expected.append((block, first + rows[0], first + rows[-1] + 1, first + seen))
        columns = (tiles.segment_block, tiles.segment_start, tiles.segment_stop, tiles.segment_key_start)
        assert list(zip(*(column.tolist() for column in columns), strict=True)) == expected, pool


@pytest.mark.parametrize("fetch", ["prefix", "document"])
@pytest.mark.parametrize("seed", seeds(2, 5))
def test_the_keys_of_a_block_are_what_it_fetches(seed: int, fetch: str):
    draw = random.Random(500 + seed)
    for _ in range(40):
        pool = random_pool(draw, fetch=fetch)
        plan = plan_of(pool)
        tiles = plan.tiles
        for block, (sequence, start, stop) in enumerate(blocks_of(plan)):
            first, tile = int(tiles.sequence_start[sequence]), Tile(sequence, start, stop, 0)
            keys = range(int(tiles.key_start[block]) - first, int(tiles.key_stop[block]) - first)
            assert list(keys) == np.flatnonzero(pool.key_rows(tile)).tolist(), pool
            assert int(tiles.query_stop[block]) - first == start + len(pool.query_rows(tile)), pool


@pytest.mark.parametrize("seed", seeds(4, 10))
def test_splitting_leaves_no_tile_too_heavy_that_has_two_rows(seed: int):
    draw = random.Random(300 + seed)
    for _ in range(40):
        pool = random_pool(draw, split_oversize=True, tau=draw.choice([0.0, 0.03]))
        for sequence, start, stop in blocks_of(plan_of(pool)):
            assert stop - start == 1 or pool.work(Tile(sequence, start, stop, 0)) <= pool.capacity, pool


def test_one_document_larger_than_a_worker_is_split_until_it_fits():
    # One sequence has nearly all the work and a block of it is several times what a worker should have.
    pool = Pool(
        documents=((64,), (1,) * 64, (1,) * 64, (1,) * 64),
        context_parallel=2,
        block_size=32,
        head_shards=1,
        num_heads=2,
        num_kv_heads=1,
    )
    plan = plan_of(pool)
    assert max(plan.tile_flops.tolist()) <= pool.capacity
    whole = plan_of(Pool(**{**pool.options, "documents": pool.documents, "split_oversize": False}))
    assert max(whole.tile_flops.tolist()) > 2 * pool.capacity


LARGE = {"num_heads": 32, "num_kv_heads": 4, "head_dim": 128, "bytes_per_element": 2, "head_shards": 4}


@pytest.mark.parametrize("window", [None, 4096])
def test_the_work_of_a_million_tokens_is_exact(window: int | None):
    rows = 1_048_576
    plan = plan_pool(
        [[rows], [1024] * 1024], context_parallel=4, block_size=8192, split_oversize=False, window=window, **LARGE
    )
    seen = np.minimum(np.arange(1, rows + 1), window or rows)  # keys that each query of the long document sees
    cut = blocks_of(plan)
    long = np.array([sequence == 0 for sequence, _, _ in cut])
    expected = [int(seen[start:stop].sum()) * 8 for sequence, start, stop in cut if sequence == 0]
    flops = plan.tile_flops.reshape(-1, 4)
    assert flops[long].tolist() == [[work] * 4 for work in expected]
    total = sum(expected) * 4 + 32 * 1024 * int(seen[:1024].sum())
    assert sum(plan.tile_flops.tolist()) == sum(plan.worker_load.tolist()) == total
    if window is None:
        assert total > 2**44


def test_the_work_of_a_hundred_thousand_tokens_alone_is_exact():
    plan = plan_pool([[100_000]], context_parallel=4, block_size=3_000, **LARGE)
    counted = [
        sum(query + 1 for query in range(start, stop)) * 8 for _, start, stop in blocks_of(plan) for _ in range(4)
    ]
    assert plan.tile_flops.tolist() == counted
    assert sum(counted) == 32 * 100_000 * 100_001 // 2
