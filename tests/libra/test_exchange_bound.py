"""The bound on the busiest worker's bytes against all placements of tiny pools, and worked out by hand."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import numpy as np
import pytest

from odb_libra_lightning.libra.exchange_bound import busiest_floor
from odb_libra_lightning.libra.pool_plan import PoolPlan
from tests.libra.oracles import Pool, tiles_of
from tests.libra.plans import blocks_of, plan_of


def placed(plan: PoolPlan, tile_worker: tuple[int, ...] | list[int]) -> PoolPlan:
    """The plan with other workers for its tiles. Its transfers are still the old ones: the bound reads none."""
    return dataclasses.replace(plan, tile_worker=np.array(tile_worker, np.int32))


def tiny_pool(draw: random.Random) -> Pool:
    replicas, parts = draw.choice([(1, 2), (1, 2), (2, 1), (2, 1), (1, 3), (3, 1), (2, 2), (1, 4)])
    longest = draw.choice([2, 9, 30])
    documents = tuple(
        tuple(draw.randint(1, longest) for _ in range(draw.choice([1, 1, 2, 3]))) for _ in range(replicas)
    )
    heads, kv_heads, shards = draw.choice([(1, 1, 1), (1, 1, 1), (2, 1, 1), (2, 1, 2), (2, 2, 2), (2, 2, 1)])
    rows = max(map(sum, documents))
    return Pool(
        documents=documents,
        context_parallel=parts,
        block_size=draw.randint(1, -(-rows // parts)),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_shards=shards,
        head_dim=7,
        split_oversize=False,
        window=draw.choice([None, None, None, 1, 3]),
        sequence_length=draw.choice([None, None, rows + 2]),
    )


def placements(draw: random.Random, home: list[int], workers: int) -> list[tuple[int, ...]]:
    """All of them; where there are more than a thousand, that with every tile at home and some drawn from near it."""
    if workers ** len(home) <= 1024:
        return list(itertools.product(range(workers), repeat=len(home)))
    found = [tuple(home)]
    for _ in range(500):
        moved = draw.random()
        found.append(tuple(draw.randrange(workers) if draw.random() < moved else at for at in home))
    return found


class Counted:
    """Loads and bytes of placements: sets of rows and heads as bits of a number, counted."""

    def __init__(self, pool: Pool, plan: PoolPlan) -> None:
        self.pool, self.tiles = pool, tiles_of(pool, blocks_of(plan))
        self.work = [pool.work(tile) for tile in self.tiles]
        self.home = [int(pool.home_of[tile.sequence][tile.start]) for tile in self.tiles]
        self.queries = [len(pool.query_rows(tile)) * pool.shard_heads for tile in self.tiles]
        sizes = [pool.rows(s) * pool.num_kv_heads for s in range(len(pool.documents))]
        first = [sum(sizes[:s]) for s in range(len(sizes))]
        self.keys = [self.bits(pool.needs(tile)) << first[tile.sequence] for tile in self.tiles]
        self.at_home = [0] * pool.num_workers
        for sequence, home in enumerate(pool.home_of):
            for worker in set(home.tolist()):
                rows = np.repeat((home == worker)[:, None], pool.num_kv_heads, axis=1)
                self.at_home[worker] = self.bits(rows) << first[sequence]

    @staticmethod
    def bits(chosen: Any) -> int:
        return sum(1 << at for at in np.flatnonzero(chosen.ravel()).tolist())

    def heaviest(self, tile_worker: tuple[int, ...]) -> int:
        load = [0] * self.pool.num_workers
        for work, worker in zip(self.work, tile_worker, strict=True):
            load[worker] += work
        return max(load)

    def busiest(self, tile_worker: tuple[int, ...]) -> int:
        workers = range(self.pool.num_workers)
        sent, received, fetched = [0 for _ in workers], [0 for _ in workers], [0 for _ in workers]
        for tile, worker in enumerate(tile_worker):
            fetched[worker] |= self.keys[tile]
            if worker != self.home[tile]:
                for one, other in ((self.home[tile], worker), (worker, self.home[tile])):  # Q, and the output
                    sent[one] += self.queries[tile]
                    received[other] += self.queries[tile]
        for worker, home in itertools.permutations(workers, 2):
            rows = 2 * (fetched[worker] & self.at_home[home]).bit_count()  # K and V
            sent[home] += rows
            received[worker] += rows
        return max(sent + received) * self.pool.head_dim * self.pool.bytes_per_element


def test_no_placement_that_is_as_even_moves_less_than_the_floor() -> None:
    draw = random.Random(0)
    positive = 0
    for _ in range(150):
        pool = tiny_pool(draw)
        plan = plan_of(pool)
        counted = Counted(pool, plan)
        assert counted.busiest(tuple(plan.tile_worker.tolist())) == plan.busiest_bytes, pool
        least: dict[int, tuple[int, tuple[int, ...]]] = {}  # by load of the heaviest, the least bytes and their plan
        for tile_worker in placements(draw, counted.home, pool.num_workers):
            heaviest, busiest = counted.heaviest(tile_worker), counted.busiest(tile_worker)
            least[heaviest] = min(least.get(heaviest, (busiest, tile_worker)), (busiest, tile_worker))
        for heaviest in sorted(least, reverse=True):
            reached = min(busiest for load, (busiest, _) in least.items() if load <= heaviest)
            floor = busiest_floor(placed(plan, least[heaviest][1]))
            assert floor <= reached, (pool, least[heaviest])
            positive += floor > 0
    assert positive > 150


# Ten bytes a row.
ONE_HEAD = {"num_heads": 1, "num_kv_heads": 1, "head_shards": 1, "head_dim": 5, "split_oversize": False}


def test_work_that_must_leave_takes_the_densest_rows_with_it() -> None:
    """Home 0 has 1 + 2 + 3 + 4 + 5 + 6 = 21 pairs, and no worker more than 14: 7 must leave.

    The row of 6 and a fifth of the row of 5 are the fewest rows that bear 7: 1.2 rows of Q.
    """
    plan = plan_of(Pool(documents=((6,), (1,) * 6), context_parallel=1, block_size=1, **ONE_HEAD))
    plan = placed(plan, [0, 1, 0, 0, 1, 0] + [1] * 6)
    assert plan.worker_load.tolist() == [14, 13]
    assert busiest_floor(plan) == 12


def test_under_a_window_the_densest_rows_see_no_more_than_it() -> None:
    """Home 0 has 1 + 2 + 2 + 2 + 2 + 2 = 11 pairs of 2 heads, and no worker more than 18: 4 of 22 must leave.

    A row bears 2 pairs of each head: 1 row of 2 heads.
    """
    settings = {**ONE_HEAD, "num_heads": 2, "head_shards": 2}
    plan = plan_of(Pool(documents=((6,), (1,) * 6), context_parallel=1, block_size=3, window=2, **settings))
    plan = placed(plan, [0, 0, 0, 1] + [1] * 4)
    assert plan.worker_load.tolist() == [22 - 6, 12 + 6]
    assert busiest_floor(plan) == 20


@pytest.mark.parametrize(
    ("documents", "tile_worker", "loads", "floor"),
    [
        # Rows 2 and 3 bear 3 + 4 and read both rows of home 0. At 5 a worker, 7/5 of one compute them, and 2/5 of one
        # are not home 0: 2/5 of K and V of 2 rows. (Home 1 has 2 too many: half a row of Q.)
        ((4,), [1, 0, 0, 1], [5, 5], 16),
        # The second document begins at row 1: rows 2 and 3 bear 2 + 3 and read one row of home 0. At 4 a worker, a
        # quarter of one is not home 0: a quarter of K and V of 1 row. (Home 1 has 1 too many: a third of a row.)
        ((1, 3), [0, 1, 1, 0], [4, 3], 5),
        # Nothing has to move: at home every worker may compute what it has.
        ((4,), [0, 0, 1, 1], [3, 7], 0),
    ],
)
def test_queries_behind_a_home_need_as_many_copies_of_its_keys_as_workers_hold_their_work(
    documents: tuple[int, ...], tile_worker: list[int], loads: list[int], floor: int
) -> None:
    plan = placed(plan_of(Pool(documents=(documents,), context_parallel=2, block_size=1, **ONE_HEAD)), tile_worker)
    assert plan.worker_load.tolist() == loads
    assert busiest_floor(plan) == floor
