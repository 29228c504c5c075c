"""Which worker computes which tile: Algorithm 2 played in plain loops, and what any placement owes."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from tests.libra.oracles import Pool, algorithm_2, home_first, loads, random_pool, tiles_of
from tests.libra.plans import blocks_of, plan_of, seeds

OPTIONS = [
    {"fetch": fetch, "share_kv_heads": share, "skip_home_rows": skip, "split_oversize": split}
    for fetch, share, skip, split in itertools.product(["document", "prefix"], *[[False, True]] * 3)
]


def as_text(options: dict[str, Any]) -> str:
    return "-".join(str(value) for value in options.values())


def same_as_in_plain_loops(placement: str, draw: random.Random, options: dict[str, Any], cases: int) -> None:
    played = algorithm_2 if placement == "paper" else home_first
    for _ in range(cases):
        pool = random_pool(draw, placement=placement, **options)
        plan = plan_of(pool)
        assert plan.tile_worker.tolist() == played(pool, tiles_of(pool, blocks_of(plan))), pool


@pytest.mark.parametrize("options", OPTIONS, ids=as_text)
def test_paper_is_algorithm_2_to_the_letter(options: dict[str, Any]):
    same_as_in_plain_loops("paper", random.Random(as_text(options)), options, 30)


@pytest.mark.parametrize("options", OPTIONS, ids=as_text)
def test_home_first_places_only_what_workers_give_away(options: dict[str, Any]):
    same_as_in_plain_loops("home_first", random.Random(as_text(options)), options, 30)


@pytest.mark.full
@pytest.mark.parametrize("placement", ["paper", "home_first"])
@pytest.mark.parametrize("options", OPTIONS, ids=as_text)
def test_placements_in_plain_loops_many_times(options: dict[str, Any], placement: str):
    same_as_in_plain_loops(placement, random.Random("full" + as_text(options)), options, 1000)


@pytest.mark.parametrize("placement", ["paper", "home_first"])
@pytest.mark.parametrize("seed", seeds(2, 5))
def test_every_tile_has_one_worker_and_loads_are_counted(placement: str, seed: int):
    draw = random.Random(seed)
    for _ in range(60):
        pool = random_pool(draw, placement=placement)
        plan = plan_of(pool)
        worker, tiles = plan.tile_worker.tolist(), tiles_of(pool, blocks_of(plan))
        assert len(worker) == len(tiles)
        assert set(worker) <= set(range(pool.num_workers))
        load = loads(pool, tiles, worker)
        assert plan.worker_load.tolist() == load, pool
        assert sum(load) == pool.total
        assert plan.imbalance == pytest.approx(max(load) / (pool.total / pool.num_workers) - 1, abs=1e-12)


@pytest.mark.parametrize("placement", ["paper", "home_first"])
@pytest.mark.parametrize("seed", seeds(2, 5))
def test_no_worker_exceeds_the_target_by_more_than_a_tile(placement: str, seed: int):
    """A tile goes where it fits, or to the lightest worker, which has no more than the mean: the greedy bound."""
    draw = random.Random(50 + seed)
    for _ in range(60):
        pool = random_pool(draw, placement=placement)
        plan = plan_of(pool)
        work = [pool.work(tile) for tile in tiles_of(pool, blocks_of(plan))]
        bound = max(pool.capacity, pool.total / pool.num_workers + max(work))
        assert max(plan.worker_load.tolist()) <= bound, pool


@pytest.mark.parametrize("seed", seeds(2, 5))
def test_home_first_moves_nothing_where_every_home_fits(seed: int):
    draw, seen = random.Random(70 + seed), 0
    for _ in range(200):
        pool = random_pool(draw, placement="home_first", split_oversize=False, tau=draw.choice([0.25, 1.0, 3.0]))
        tiles = tiles_of(pool)
        at_home = [int(pool.home_of[tile.sequence][tile.start]) for tile in tiles]
        if max(loads(pool, tiles, at_home)) <= pool.capacity:
            seen += 1
            plan = plan_of(pool)
            assert plan.tile_worker.tolist() == at_home, pool
            # Keys and values of a document still go along its homes.
            assert len(plan.queries) == 0
    assert seen > 10


@pytest.mark.parametrize("seed", seeds(2, 5))
def test_home_first_takes_nothing_from_a_worker_that_fits(seed: int):
    draw = random.Random(80 + seed)
    for _ in range(60):
        pool = random_pool(draw, placement="home_first")
        plan = plan_of(pool)
        tiles = tiles_of(pool, blocks_of(plan))
        at_home = [int(pool.home_of[tile.sequence][tile.start]) for tile in tiles]
        load = loads(pool, tiles, at_home)
        for home, worker in zip(at_home, plan.tile_worker.tolist(), strict=True):
            assert worker == home or load[home] > pool.capacity, pool


@pytest.mark.parametrize("seed", seeds(2, 5))
def test_cutting_finer_where_tiles_find_no_room_never_makes_the_heaviest_worker_heavier(seed: int):
    draw = random.Random(60 + seed)
    for _ in range(30):
        pool = random_pool(draw, placement="home_first", split_oversize=True)
        coarse = tiles_of(pool)
        assert max(plan_of(pool).worker_load.tolist()) <= max(loads(pool, coarse, home_first(pool, coarse))), pool


@pytest.mark.parametrize("placement", ["paper", "home_first"])
def test_no_worker_exceeds_the_target_where_no_tile_exceeds_the_slack(placement: str):
    draw, seen = random.Random(90), 0
    for _ in range(60):
        documents = tuple(tuple(draw.choice([1, 2, 3, 20]) for _ in range(draw.randint(8, 16))) for _ in range(2))
        pool = random_pool(
            draw,
            documents=documents,
            placement=placement,
            block_size=1,
            tau=0.25,
            num_heads=8,
            num_kv_heads=2,
            head_shards=8,
            chunks=1,
            context_parallel=2,
        )
        plan = plan_of(pool)
        if max(plan.tile_flops.tolist()) <= pool.tau * pool.total / pool.num_workers:
            seen += 1
            assert max(plan.worker_load.tolist()) <= pool.capacity, pool
    assert seen > 20


def test_a_tie_goes_to_the_lowest_worker_and_the_lowest_tile():
    # Four tiles of equal work, all at home at worker 0 or 1; every destination but home costs the same.
    pool = Pool(documents=((1, 1), (1, 1)), block_size=1, head_shards=1, placement="paper", tau=0.0)
    assert plan_of(pool).tile_worker.tolist() == [0, 1, 2, 3]


def test_a_worker_may_have_no_tile():
    pool = Pool(documents=((1,),), context_parallel=4, block_size=1, head_shards=1)
    plan = plan_of(pool)
    assert sorted(plan.worker_load.tolist()) == [0, 0, 0, 4]
    assert plan.imbalance == pytest.approx(3)
