"""What travels: counted vector by vector, then really sent through buffers and computed with."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from odb_libra_lightning.libra.pool_plan import PoolPlan, plan_pool
from tests.libra.oracles import HEADS, Pool, fetched, random_pool, tiles_of, traffic
from tests.libra.plans import blocks_of, plan_of, seeds
from tests.libra.simulated_exchange import BACKWARD, FORWARD, PHASES, Exchange, dense_attention, entries


def counted_ranges(pool: Pool, plan: PoolPlan) -> tuple[list[Any], list[Any]]:
    """(source, destination, sequence, row, head) of every query and every key that must travel."""
    tiles, tile_worker = tiles_of(pool, blocks_of(plan)), plan.tile_worker.tolist()
    queries = []
    for tile, worker in zip(tiles, tile_worker, strict=True):
        home = pool.home_of[tile.sequence]
        for row in pool.query_rows(tile):
            if home[row] != worker:
                queries += [(int(home[row]), worker, tile.sequence, row, head) for head in pool.query_heads(tile)]
    keys = [
        (int(pool.home_of[sequence][row]), worker, sequence, row, head)
        for worker in range(pool.num_workers)
        for sequence, row, *_, head in fetched(pool, tiles, tile_worker, worker)
    ]
    return sorted(queries), sorted(keys)


def listed(pool: Pool, ranges: Any) -> list[Any]:
    workers = range(pool.num_workers)
    return sorted((i, j, *entry) for i in workers for j in workers for entry in entries(ranges, i, j))


@pytest.mark.parametrize("seed", seeds(4, 10))
def test_ranges_are_what_tiles_lack_each_once(seed: int):
    draw = random.Random(seed)
    for _ in range(40):
        pool = random_pool(draw)
        plan = plan_of(pool)
        queries, keys = counted_ranges(pool, plan)
        assert listed(pool, plan.queries) == queries, pool
        assert listed(pool, plan.keys) == keys, pool


@pytest.mark.parametrize("seed", seeds(2, 5))
def test_ranges_stand_in_the_order_of_buffers_and_are_as_long_as_can_be(seed: int):
    draw = random.Random(50 + seed)
    for _ in range(60):
        pool = random_pool(draw)
        plan = plan_of(pool)
        for ranges in (plan.queries, plan.keys):
            columns = (
                ranges.source,
                ranges.destination,
                ranges.head_start,
                ranges.start,
                ranges.stop,
                ranges.head_stop,
            )
            entries_in_order = list(zip(*(column.tolist() for column in columns), strict=True))
            # Shards that fetch each for itself may have ranges of the same first head and other rows.
            known = 4 if pool.share_kv_heads else 3
            order = [entry[:known] for entry in entries_in_order]
            assert order == sorted(order), pool
            for source, destination, head_start, start, stop, head_stop in entries_in_order:
                assert source != destination
                assert head_start < head_stop
                assert start < stop
                # Not two ranges where one would do, apart from shards that fetch each for itself.
                assert not pool.share_kv_heads or (source, destination, head_start, stop, head_stop) not in {
                    (*entry[:4], entry[5]) for entry in entries_in_order
                }, pool


@pytest.mark.parametrize("seed", seeds(4, 10))
def test_split_sizes_and_bytes_are_the_counted_ones(seed: int):
    draw = random.Random(100 + seed)
    for _ in range(40):
        pool = random_pool(draw)
        plan = plan_of(pool)
        counted = traffic(pool, tiles_of(pool, blocks_of(plan)), plan.tile_worker.tolist())
        for (phase, chunk), elements in counted.items():
            for worker in range(pool.num_workers):
                send, receive = plan.split_sizes(worker, phase, chunk)
                assert np.asarray(send).tolist() == elements[worker].tolist(), (phase, chunk, worker, pool)
                assert np.asarray(receive).tolist() == elements[:, worker].tolist(), (phase, chunk, worker, pool)
        forward, backward = (
            sum(counted[step.phase, chunk] for step in steps for chunk in range(pool.chunks))
            for steps in (FORWARD, BACKWARD)
        )
        assert plan.sent_bytes.tolist() == (forward.sum(axis=1) * pool.bytes_per_element).tolist(), pool
        assert plan.received_bytes.tolist() == (forward.sum(axis=0) * pool.bytes_per_element).tolist(), pool
        assert plan.bytes_moved == int(forward.sum()) * pool.bytes_per_element, pool
        assert plan.bytes_moved == int(backward.sum()) * pool.bytes_per_element, pool
        assert plan.busiest_bytes == pool.bytes_per_element * max(
            *forward.sum(axis=1).tolist(), *forward.sum(axis=0).tolist()
        ), pool


def exchanged(pool: Pool) -> None:
    """Play a plan forwards and backwards; nothing arrives twice or in vain, and all results are those of one piece."""
    plan = plan_of(pool)
    exchange = Exchange(pool, plan, tiles_of(pool, blocks_of(plan)))
    exchange.forward()
    exchange.backward()
    if pool.fetch == "prefix":
        assert exchange.needless() == [], pool
    for name, expected in dense_attention(pool, exchange.truth).items():
        for ours, dense in zip(exchange.at_home(name), expected, strict=True):
            np.testing.assert_allclose(ours, dense, rtol=0, atol=1e-12, err_msg=f"{name} of {pool}")
    size = pool.bytes_per_element
    sent = sum(exchange.sent[step] for step in FORWARD) * size
    received = sum(exchange.received[step] for step in FORWARD) * size
    assert sent.tolist() == plan.sent_bytes.tolist()
    assert received.tolist() == plan.received_bytes.tolist()
    assert plan.bytes_moved == sum(int(exchange.sent[step].sum()) for step in BACKWARD) * size


@pytest.mark.parametrize("seed", seeds(6, 12))
def test_attention_over_an_exchange_is_attention_in_one_piece(seed: int):
    draw = random.Random(200 + seed)
    for _ in range(8):
        exchanged(random_pool(draw))


@pytest.mark.full
@pytest.mark.parametrize("seed", range(50))
def test_attention_over_an_exchange_is_attention_in_one_piece_many_times(seed: int):
    draw = random.Random(1000 + seed)
    for _ in range(60):
        exchanged(random_pool(draw))


@pytest.mark.parametrize("shape", HEADS, ids=str)
def test_every_way_to_group_heads(shape: tuple[int, int, int, int]):
    draw = random.Random(str(shape))
    heads, kv_heads, shards, chunks = shape
    documents = ((9, 2), (1, 3, 4))
    for _ in range(3):
        exchanged(
            random_pool(
                draw,
                documents=documents,
                num_heads=heads,
                num_kv_heads=kv_heads,
                head_shards=shards,
                chunks=chunks,
                context_parallel=2,
                block_size=2,
            )
        )


@pytest.mark.parametrize("shards", [1, 2, 4, 7, 14, 28])
@pytest.mark.parametrize("share_kv_heads", [False, True])
def test_28_query_heads_over_7_kv_heads(shards: int, share_kv_heads: bool):
    """With 2 or 4 shards a KV head is needed by two of them, and in different chunks."""
    for chunks in (chunks for chunks in (1, 2, 7, 14) if 28 // shards % chunks == 0):
        exchanged(
            Pool(
                documents=((7,), (1, 2, 2)),
                num_heads=28,
                num_kv_heads=7,
                head_shards=shards,
                chunks=chunks,
                head_dim=1,
                share_kv_heads=share_kv_heads,
            )
        )


@pytest.mark.parametrize("documents", [((1,),), ((5, 3),), ((2, 2, 9),)])
def test_one_worker_exchanges_nothing(documents: tuple[tuple[int, ...], ...]):
    pool = Pool(documents=documents, context_parallel=1, block_size=1, chunks=2)
    plan = plan_of(pool)
    assert set(plan.tile_worker.tolist()) == {0}
    assert len(plan.queries) == len(plan.keys) == 0
    assert plan.bytes_moved == 0
    assert plan.imbalance == 0
    for phase in PHASES:
        for chunk in range(2):
            send, receive = plan.split_sizes(0, phase, chunk)
            assert (list(send), list(receive)) == ([0], [0])


def test_rows_of_no_document_do_not_travel():
    pool = Pool(documents=((30, 1), (1,)), context_parallel=2, block_size=4, sequence_length=40)
    plan = plan_of(pool)
    assert plan.bytes_moved > 0
    for ranges in (plan.queries, plan.keys):
        assert (ranges.stop <= np.array([31, 1])[ranges.sequence]).all()
    exchanged(pool)


def test_padding_of_a_sequence_with_fewer_rows_than_workers_does_not_travel():
    # Workers 0 and 2 are home to nothing, worker 3 to padding, whose tiles Algorithm 2 gives to worker 0.
    pool = Pool(
        documents=((1,),),
        context_parallel=4,
        block_size=1,
        num_heads=8,
        head_shards=4,
        sequence_length=2,
        placement="paper",
    )
    plan = plan_of(pool)
    assert plan.tile_worker[4:].tolist() == [0] * 4
    exchanged(pool)


@pytest.mark.parametrize("documents", [((3, 3, 2),), ((3,), (1, 4, 1)), ((1, 1), (4, 1))])
def test_shards_that_read_one_and_two_kv_heads_each_fetch_all_of_theirs(documents: tuple[tuple[int, ...], ...]):
    # Of 6 query heads over 2 KV heads in 3 shards, the first shard reads KV head 0, the second 0 and 1, the third 1:
    # ranges with one first head and different last ones, of which one may begin where another ends.
    pool = Pool(
        documents=documents,
        context_parallel=3 if documents[0] == (1, 1) else 2,
        block_size=1,
        num_heads=6,
        num_kv_heads=2,
        head_shards=3,
        placement="paper",
        fetch="document",
        share_kv_heads=False,
    )
    plan = plan_of(pool)
    queries, keys = counted_ranges(pool, plan)
    assert listed(pool, plan.queries) == queries
    assert listed(pool, plan.keys) == keys
    exchanged(pool)


def test_a_hand_counted_exchange():
    # One document of 4 rows on 2 workers, one head: homes [0, 2), [2, 4). Work of rows 1, 2, 3, 4; C = 5.15. The rows
    # in descending order: row 3 (4) stays at its home 1; row 2 (3) finds no room at home (7 > C) and goes to worker
    # 0; row 1 (2) fits at its home 0 (5); row 0 (1) fits only at worker 1 (5).
    pool = Pool(
        documents=((4,),),
        block_size=1,
        head_shards=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=1,
        bytes_per_element=1,
        placement="paper",
        fetch="prefix",
    )
    plan = plan_of(pool)
    assert plan.tile_worker.tolist() == [1, 0, 0, 1]
    # Queries 2 to worker 0 and 0 to worker 1; key 2 to worker 0; keys 0 and 1 to worker 1.
    assert listed(pool, plan.queries) == [(0, 1, 0, 0, 0), (1, 0, 0, 2, 0)]
    assert listed(pool, plan.keys) == [(0, 1, 0, 0, 0), (0, 1, 0, 1, 0), (1, 0, 0, 2, 0)]
    assert [np.asarray(sizes).tolist() for sizes in plan.split_sizes(0, "queries", 0)] == [[0, 1], [0, 1]]
    assert [np.asarray(sizes).tolist() for sizes in plan.split_sizes(0, "keys", 0)] == [[0, 4], [0, 2]]
    assert [np.asarray(sizes).tolist() for sizes in plan.split_sizes(0, "outputs", 0)] == [[0, 1], [0, 1]]
    assert plan.sent_bytes.tolist() == [6, 4]
    assert plan.received_bytes.tolist() == [4, 6]
    assert plan.bytes_moved == 10


def test_bytes_of_a_million_tokens_are_exact():
    rows, width, parts, shards = 1_048_576, 8, 4, 4
    plan = plan_pool(
        [[rows], [1024] * 1024],
        context_parallel=parts,
        block_size=65_536,
        head_shards=shards,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        bytes_per_element=2,
        chunks=4,
    )
    documents = np.stack([np.zeros(rows, int), np.arange(rows) // 1024])
    home = np.stack([np.arange(rows) * parts // rows, np.arange(rows) * parts // rows + parts])
    got = np.zeros((2 * parts, 2, rows, shards), bool)  # one KV head a shard: [worker, sequence, row, KV head]
    vectors = 0
    cut = blocks_of(plan)
    for tile, worker in enumerate(plan.tile_worker.tolist()):
        block, shard = divmod(tile, shards)
        sequence, start, stop = cut[block]
        vectors += 2 * (stop - start) * width if home[sequence, start] != worker else 0
        first = int(np.searchsorted(documents[sequence], documents[sequence][start]))
        got[worker, sequence, first:stop, shard] = True
    for worker in range(2 * parts):
        vectors += 2 * int((got[worker] & (home != worker)[..., None]).sum())
    assert plan.bytes_moved == vectors * 128 * 2 > 2**32
