"""Index arrays of every worker of a pool, played with names of rows instead of rows, against masks written out."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from odb_libra_lightning.libra.pool_plan import Phase, PoolPlan
from odb_libra_lightning.libra.prepared_plan import PreparedPlan, prepare_plan
from odb_libra_lightning.libra.worker_plan import WorkerPlan, plan_worker
from tests.libra.attention_of_pools import with_placement
from tests.libra.oracles import Pool, random_pool, tiles_of
from tests.libra.plans import blocks_of, plan_of

Names = NDArray[np.int64]  # row of the pool * number of heads + head, or of slices

SEEDS = pytest.mark.parametrize("seed", [*range(2), *(pytest.param(s, marks=pytest.mark.full) for s in range(2, 40))])


def random_plans(seed: int, count: int = 60) -> list[tuple[Pool, PoolPlan]]:
    """Plans of the planner, and, every other time, the same tiles thrown anywhere."""
    rng = random.Random(seed)
    found = []
    for number in range(count):
        pool = random_pool(rng)
        plan = plan_of(pool)
        if number % 2:
            workers = rng.sample(range(pool.num_workers), rng.randint(1, pool.num_workers))
            plan = with_placement(plan, [rng.choice(workers) for _ in plan.tile_worker])
        found.append((pool, plan))
    return found


def exchange(sent: list[Names], sent_splits: list[list[int]], received_splits: list[list[int]]) -> list[Names]:
    """What each worker receives: every sender's part, in order of the senders."""
    pieces = [np.split(each, np.cumsum(splits)[:-1]) for each, splits in zip(sent, sent_splits, strict=True)]
    for worker, splits in enumerate(received_splits):
        assert splits == [len(piece[worker]) for piece in pieces]
    return [np.concatenate([piece[worker] for piece in pieces]) for worker in range(len(sent))]


def filled(length: int, *parts: tuple[Names, Names]) -> Names:
    """An array in which every place is written exactly once."""
    found = np.full(length, -1)
    for places, names in parts:
        assert (found[places] == -1).all()
        assert len(set(places.tolist())) == len(places)
        found[places] = names
    assert (found >= 0).all()
    return found


class Played:
    """All workers' plans of a pool, and the names of the rows that each calls the kernel on."""

    def __init__(self, pool: Pool, plan: PoolPlan) -> None:
        self.pool, self.plan = pool, plan
        self.work: list[WorkerPlan] = [plan_worker(plan, worker) for worker in range(pool.num_workers)]
        self.home = np.cumsum([0, *(work.rows for work in self.work)])
        self.slices = pool.head_shards * pool.chunks
        self.arrived = [np.zeros(0, np.int64) for _ in self.work]
        for chunk in range(pool.chunks):
            came = self._keys(chunk, [w.keys[chunk].sent for w in self.work])
            self.arrived = [np.concatenate(each) for each in zip(self.arrived, came, strict=True)]

    def _keys(self, chunk: int, entries: list[Names]) -> list[Names]:
        keys = [work.keys[chunk] for work in self.work]
        names = [at + self.home[w] * self.pool.num_kv_heads for w, at in enumerate(entries)]
        return exchange(names, [k.sent_splits for k in keys], [k.received_splits for k in keys])

    def queries(self, chunk: int) -> list[Names]:
        """Names `row * S + slice` in each worker's kernel queries."""
        sent = [work.sent + chunk + self.home[w] * self.slices for w, work in enumerate(self.work)]
        came = exchange(sent, [w.sent_splits for w in self.work], [w.received_splits for w in self.work])
        return [
            filled(
                sum(work.query_lengths),
                (work.home_at, work.home + chunk + self.home[w] * self.slices),
                (work.remote_at, came[w]),
            )
            for w, work in enumerate(self.work)
        ]

    def keys(self, chunk: int) -> list[Names]:
        """Names `row * KV heads + head` in each worker's kernel keys, `[Tk, heads]`."""
        found = []
        for worker, work in enumerate(self.work):
            keys = work.keys[chunk]
            names = filled(
                sum(work.key_lengths) * keys.heads,
                (keys.home_at, keys.home + self.home[worker] * self.pool.num_kv_heads),
                (keys.remote_at, self.arrived[worker][keys.remote]),
            )
            found.append(names.reshape(-1, keys.heads))
        return found


def mask_of(pool: Pool) -> NDArray[np.bool_]:
    """Which query sees which key, over all rows of the pool."""
    rows = [len(mask) for mask in pool.masks]
    whole = np.zeros((sum(rows), sum(rows)), bool)
    for mask, start in zip(pool.masks, np.cumsum([0, *rows]), strict=False):
        whole[start : start + len(mask), start : start + len(mask)] = mask
    return whole


@SEEDS
def test_every_query_is_computed_where_the_plan_says_with_the_keys_and_heads_it_sees(seed: int) -> None:
    for pool, plan in random_plans(seed):
        played, mask = Played(pool, plan), mask_of(pool)
        tiles = tiles_of(pool, blocks_of(plan))
        first = plan.tiles.sequence_start.tolist()
        right: list[Counter[tuple[int, int]]] = [Counter() for _ in played.work]
        for tile, worker in zip(tiles, plan.tile_worker.tolist(), strict=True):
            right[worker].update((first[tile.sequence] + row, tile.shard) for row in pool.query_rows(tile))
        for chunk in range(pool.chunks):
            queries, keys = played.queries(chunk), played.keys(chunk)
            for worker, work in enumerate(played.work):
                row, part = np.divmod(queries[worker], played.slices)
                shard, at = np.divmod(part, pool.chunks)
                assert (at == chunk).all()
                assert Counter(zip(row.tolist(), shard.tolist(), strict=True)) == right[worker], (pool, worker)
                heads = work.keys[chunk].heads
                q_starts, k_starts = (np.cumsum([0, *n]) for n in (work.query_lengths, work.key_lengths))
                for (q0, q1), (k0, k1) in zip(pairwise(q_starts), pairwise(k_starts), strict=True):
                    key_row, key_head = np.divmod(keys[worker][k0:k1], pool.num_kv_heads)
                    assert (key_row == key_row[:, :1]).all()
                    assert (key_head == key_head[:1]).all()
                    assert len({*shard[q0:q1].tolist()}) == 1
                    for number in range(q1 - q0):
                        # The kernel's promise: the last query sees all keys, each earlier one a key fewer.
                        stop = k1 - k0 - (q1 - q0 - 1 - number)
                        start = 0 if pool.window is None else max(0, stop - pool.window)
                        seen = key_row[start:stop, 0].tolist()
                        assert seen == np.flatnonzero(mask[row[q0 + number]]).tolist(), (pool, worker)
                    for number in range(pool.chunk_heads):
                        head = int(shard[q0]) * pool.shard_heads + chunk * pool.chunk_heads + number
                        assert key_head[0, number // (pool.chunk_heads // heads)] == pool.kv_head(head), (pool, worker)


@SEEDS
def test_gradients_of_keys_go_home_once_and_not_before_their_last_use(seed: int) -> None:
    for pool, plan in random_plans(seed):
        played = Played(pool, plan)
        gone = [np.zeros(work.received_keys, bool) for work in played.work]
        for chunk in range(pool.chunks):
            keys = [work.keys[chunk] for work in played.work]
            for worker, each in enumerate(keys):
                assert not gone[worker][each.remote].any(), (pool, worker)
                gone[worker][each.returned] = True
            came = exchange(
                [played.arrived[w][each.returned] for w, each in enumerate(keys)],
                [each.returned_splits for each in keys],
                [each.added_splits for each in keys],
            )
            for worker, each in enumerate(keys):
                assert (came[worker] == each.added + played.home[worker] * pool.num_kv_heads).all(), (pool, worker)
        assert all(each.all() for each in gone)
        for work in played.work:
            assert sum(len(keys.returned) for keys in work.keys) == work.received_keys


@SEEDS
def test_splits_are_those_of_the_plan(seed: int) -> None:
    for pool, plan in random_plans(seed):
        for worker in range(pool.num_workers):
            work = plan_worker(plan, worker)
            query, pair = pool.chunk_heads * pool.head_dim, 2 * pool.head_dim
            out, back = (np.array(each) * query for each in (work.sent_splits, work.received_splits))
            for chunk, keys in enumerate(work.keys):
                sent, received = (np.array(each) * pair for each in (keys.sent_splits, keys.received_splits))
                returned, added = (np.array(each) * pair for each in (keys.returned_splits, keys.added_splits))
                right: dict[Phase, Any] = {
                    "queries": (out, back),
                    "outputs": (back, out),
                    "keys": (sent, received),
                    "key_gradients": (returned, added),
                }
                for phase, splits in right.items():
                    assert plan.split_sizes(worker, phase, chunk) == tuple(each.tolist() for each in splits)


@SEEDS
def test_keys_are_called_unchanged_where_they_are_and_only_there(seed: int) -> None:
    for pool, plan in random_plans(seed):
        played = Played(pool, plan)
        before, read_before = None, None
        for chunk in range(pool.chunks):
            keys = played.keys(chunk)
            # KV heads that a chunk reads, of every head shard in the pool: the rule is one for all workers.
            read = [
                {pool.kv_head(shard * pool.shard_heads + chunk * pool.chunk_heads + n) for n in range(pool.chunk_heads)}
                for shard in range(pool.head_shards)
            ]
            for worker, work in enumerate(played.work):
                same = work.keys[chunk].same_as_before
                assert same == (read == read_before), (pool, worker)
                if same:
                    assert before is not None
                    assert np.array_equal(before[worker], keys[worker]), (pool, worker)
            before, read_before = keys, read


@SEEDS
def test_blocks_that_follow_each_other_in_a_document_are_one_segment(seed: int) -> None:
    for pool, plan in random_plans(seed):
        if pool.window == 1:  # its segments have nothing to share
            continue
        documents = np.concatenate([each + 1000 * s for s, each in enumerate(pool.document_of)])
        played = Played(pool, plan)
        for worker, work in enumerate(played.work):
            row, shard = np.divmod(played.queries(0)[worker], played.slices)
            for start in np.cumsum(work.query_lengths)[:-1].tolist():
                last, first = row[start - 1 : start + 1].tolist()
                apart = shard[start - 1] != shard[start] or first != last + 1 or documents[first] != documents[last]
                assert apart, (pool, worker)


@SEEDS
def test_additions_come_in_layers_without_a_row_twice(seed: int) -> None:
    for _, plan in random_plans(seed):
        for worker in range(plan.num_workers):
            work = plan_worker(plan, worker)
            index = PreparedPlan(plan=plan, worker=worker, work=work).index(torch.device("cpu"))
            for keys, tensors in zip(work.keys, index.keys, strict=True):
                for rows, places, layers in (
                    (keys.home, keys.home_at, tensors.home_rounds),
                    (keys.remote, keys.remote_at, tensors.remote_rounds),
                    (keys.added, np.arange(len(keys.added)), tensors.added_rounds),
                ):
                    right: dict[int, list[int]] = {}
                    for row, at in zip(rows.tolist(), places.tolist(), strict=True):
                        right.setdefault(row, []).append(at)
                    ours: dict[int, list[int]] = {}
                    for layer_rows, layer_places in layers:
                        assert len(set(layer_rows.tolist())) == len(layer_rows)
                        for row, at in zip(layer_rows.tolist(), layer_places.tolist(), strict=True):
                            ours.setdefault(row, []).append(at)
                    assert ours == right


def test_a_worker_that_the_plan_does_not_have_is_refused() -> None:
    plan = plan_of(Pool(documents=((8,),)))
    with pytest.raises(ValueError, match=r"worker=2: the pool has 2, numbered from 0"):
        plan_worker(plan, 2)


def test_a_plan_is_prepared_once_for_all_layers() -> None:
    plan = plan_of(Pool(documents=((8,),)))
    prepared = prepare_plan(plan, 1)
    assert prepare_plan(plan, 1) is prepared
    cpu = torch.device("cpu")
    assert prepared.index(cpu) is prepared.index(cpu)
