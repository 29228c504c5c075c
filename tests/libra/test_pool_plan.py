"""A plan as a value: the same on every worker, small, frozen, and refused where it cannot be."""

from __future__ import annotations

import dataclasses
import os
import pickle
import random
import subprocess
import sys
from typing import Any, get_args

import numpy as np
import pytest

from odb_libra_lightning.libra.pool_plan import Phase, PoolPlan, plan_pool
from tests.libra.oracles import Pool, home_first, loads, random_pool, tiles_of
from tests.libra.plans import plan_of

POOL = Pool(
    documents=((40, 3, 21), (5, 5, 54), (64,), (1,) * 64),
    block_size=8,
    num_heads=8,
    num_kv_heads=2,
    head_shards=4,
    chunks=2,
)


def arrays_of(value: Any, prefix: str = "") -> dict[str, list[Any]]:
    """All arrays in a plan by name, those of its tables too."""
    found = {}
    for field in dataclasses.fields(value):
        inner = getattr(value, field.name)
        if isinstance(inner, np.ndarray):
            found[prefix + field.name] = [str(inner.dtype), inner.tolist()]
        elif dataclasses.is_dataclass(inner):
            found |= arrays_of(inner, f"{field.name}.")
    return found


def same(ours: PoolPlan, other: PoolPlan) -> bool:
    return ours.hash == other.hash and arrays_of(ours) == arrays_of(other)


def test_two_calls_and_a_pickle_give_the_same_plan():
    draw = random.Random(0)
    for _ in range(100):
        pool = random_pool(draw)
        plan = plan_of(pool)
        assert "tile_worker" in arrays_of(plan)
        assert same(plan, plan_of(pool)), pool
        again = pickle.loads(pickle.dumps(plan))
        assert same(plan, again), pool
        for chunk in range(pool.chunks):
            assert plan.split_sizes(0, "keys", chunk) == again.split_sizes(0, "keys", chunk)


def test_another_process_with_another_hash_seed_gives_the_same_plan():
    script = """
import pickle, random, sys
from tests.libra.oracles import random_pool
from tests.libra.plans import plan_of
draw = random.Random(5)
sys.stdout.buffer.write(pickle.dumps([plan_of(random_pool(draw)) for _ in range(50)]))
"""
    draw = random.Random(5)
    ours = [plan_of(random_pool(draw)) for _ in range(50)]
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", script]
        other = pickle.loads(
            subprocess.run(command, env=environment, check=True, capture_output=True, timeout=120).stdout
        )
        assert all(same(*pair) for pair in zip(ours, other, strict=True))


@pytest.mark.parametrize(
    "change",
    [
        {"documents": ((40, 3, 21), (5, 5, 54), (64,), (1,) * 62 + (2,))},
        {"documents": ((3, 40, 21), (5, 5, 54), (64,), (1,) * 64)},
        {"documents": ((5, 5, 54), (40, 3, 21), (64,), (1,) * 64)},
        {"window": 7},
        {"window": 1000},
        {"block_size": 4},
        {"context_parallel": 4},
        {"head_shards": 2},
        {"num_heads": 16},
        {"num_kv_heads": 4},
        {"head_dim": 4},
        {"bytes_per_element": 4},
        {"chunks": 1},
        {"tau": 0.04},
        {"placement": "paper"},
        {"fetch": "document"},
        {"share_kv_heads": False},
        {"skip_home_rows": False},
        {"split_oversize": False},
        {"sequence_length": 65},
    ],
    ids=str,
)
def test_another_setting_gives_another_hash(change: dict[str, Any]):
    other = dataclasses.replace(POOL, **change)
    assert plan_of(POOL).hash != plan_of(other).hash


@pytest.mark.parametrize("pickled", [False, True])
def test_a_plan_cannot_be_changed(pickled: bool):
    plan = plan_of(POOL)
    plan = pickle.loads(pickle.dumps(plan)) if pickled else plan
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.tile_worker = np.zeros(0, np.int32)  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.keys.start = plan.keys.stop  # type: ignore[misc]
    parts = [
        getattr(part, field.name)
        for part in (plan.tiles, plan.queries, plan.keys, plan.kernel_segments)
        for field in dataclasses.fields(part)
    ]
    computed = [plan.tile_flops, plan.worker_load, plan.sent_bytes, plan.received_bytes]
    tables = [plan.elements(phase, chunk) for phase in get_args(Phase) for chunk in range(POOL.chunks)]
    for array in (plan.tile_worker, *parts, *computed, *tables):
        assert array.size
        with pytest.raises(ValueError, match="read-only"):
            array[(0,) * array.ndim] = 1


def test_a_pickle_holds_the_fields_alone():
    plan = plan_of(POOL)
    expected = plan.elements("keys", 0).tolist(), plan.worker_load.tolist(), plan.sent_bytes.tolist(), plan.hash
    again = pickle.loads(pickle.dumps(plan))
    assert set(vars(again)) == {"layout", "tiles", "tile_worker", "queries", "keys"}
    assert (again.elements("keys", 0).tolist(), again.worker_load.tolist(), again.sent_bytes.tolist(), again.hash) == (
        expected
    )


def test_where_a_tile_finds_no_room_all_are_cut_finer_until_loads_are_even():
    """Four workers, blocks of 16 rows: one of the longest document has 0.8 of the mean load and finds no room."""
    pool = Pool(documents=((23, 41), (64,)), block_size=16, head_shards=1, num_heads=2, num_kv_heads=1)
    coarse = tiles_of(pool)
    load = loads(pool, coarse, home_first(pool, coarse))
    assert max(load) * 4 / sum(load) - 1 > 0.1
    assert plan_of(pool).imbalance <= pool.tau


def test_documents_of_any_integer_kind_give_the_same_plan():
    expected = plan_of(POOL)
    arrays = [np.array(lengths, np.int32) for lengths in POOL.documents]
    assert same(plan_pool(arrays, **POOL.options), expected)
    assert same(plan_pool(tuple(POOL.documents), **POOL.options), expected)


def test_a_pickled_plan_is_small():
    """24 bytes a tile, 32 a transfer, 40 a segment, and 4 KiB for names: it goes to other processes every step."""
    draw = random.Random(1)
    documents = []
    for _ in range(8):
        lengths, left = [], 65_536
        while left:
            lengths.append(min(left, int(draw.lognormvariate(6.5, 1.5)) + 1))
            left -= lengths[-1]
        documents.append(lengths)
    plan = plan_pool(
        documents,
        context_parallel=4,
        block_size=2048,
        head_shards=4,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        bytes_per_element=2,
    )
    tiles, transfers = len(plan.tile_worker), len(plan.queries) + len(plan.keys)
    segments = len(plan.tiles.segment_block)
    assert len(pickle.dumps(plan)) <= 4096 + 24 * tiles + 32 * transfers + 40 * segments


@pytest.mark.parametrize("kv_heads", [1, 2, 8])
@pytest.mark.parametrize("shards", [1, 2, 4, 8])
def test_work_does_not_depend_on_how_heads_are_shared(kv_heads: int, shards: int):
    pool = dataclasses.replace(POOL, num_kv_heads=kv_heads, head_shards=shards, chunks=1)
    plan = plan_of(pool)
    assert sum(plan.worker_load.tolist()) == pool.total
    assert len(plan.tile_worker) == shards * len(plan.tiles.block_start)


def test_shards_that_share_a_kv_head_fetch_it_once():
    pool = dataclasses.replace(POOL, num_kv_heads=1, head_shards=8, chunks=1)
    ranges = plan_of(pool).keys
    sent = [
        (int(ranges.destination[i]), int(ranges.sequence[i]), row, head)
        for i in range(len(ranges))
        for row in range(ranges.start[i], ranges.stop[i])
        for head in range(ranges.head_start[i], ranges.head_stop[i])
    ]
    assert sent
    assert len(sent) == len(set(sent))
    assert {head for *_, head in sent} == {0}


@pytest.mark.parametrize(
    "documents", [((1,),), ((2,),), ((3,),), ((1,), (1,)), ((1, 1, 1), (7,)), ((5,), (3, 8), (1,))]
)
@pytest.mark.parametrize("context_parallel", [1, 2, 3, 4, 8])
def test_short_and_uneven_sequences(documents: tuple[tuple[int, ...], ...], context_parallel: int):
    pool = Pool(documents=documents, context_parallel=context_parallel, block_size=1)
    plan = plan_of(pool)
    assert sum(plan.worker_load.tolist()) == pool.total
    assert len(plan.worker_load) == plan.num_workers == len(documents) * context_parallel
    assert plan.num_replicas == len(documents)


COUNT = "expected a whole number from 1 to 2147483647"
TAU = "the share above the mean load is a finite number of at least 0"
FLAT = "expected a flat list of whole numbers"
REFUSED: list[tuple[dict[str, Any], str]] = [
    # What is wrong, and the sentence that names the value and what would fit.
    ({"head_shards": 3}, r"head_shards=3 does not divide num_heads=8; 1, 2, 4 or 8 would fit"),
    ({"head_shards": 0}, rf"head_shards=0: {COUNT}"),
    ({"head_shards": 16}, r"head_shards=16 does not divide num_heads=8; 1, 2, 4 or 8 would fit"),
    (
        {"chunks": 4},
        r"chunks=4 does not divide the 2 query heads of a shard \(num_heads=8, head_shards=4\); 1 or 2 would fit",
    ),
    ({"chunks": 0}, rf"chunks=0: {COUNT}"),
    (
        {"num_kv_heads": 3},
        r"num_heads=8 is no multiple of num_kv_heads=3; KV heads: 1, 2, 4 or 8 would fit",
    ),
    (
        {"num_kv_heads": 16},
        r"num_heads=8 is no multiple of num_kv_heads=16; KV heads: 1, 2, 4 or 8 would fit",
    ),
    ({"num_kv_heads": 0}, rf"num_kv_heads=0: {COUNT}"),
    ({"num_heads": 0}, rf"num_heads=0: {COUNT}"),
    (
        {"block_size": 33},
        r"block_size=33 is larger than any home: no worker of this pool has more than 32 rows "
        r"\(context_parallel=2\); at most 32 would fit",
    ),
    ({"block_size": 0}, rf"block_size=0: {COUNT}"),
    ({"block_size": -8}, rf"block_size=-8: {COUNT}"),
    ({"documents": ()}, r"a pool has at least one packed sequence, got none"),
    (
        {"documents": ((40, 3, 21), ())},
        r"packed sequence 1 of the pool: no document lengths: expected at least one",
    ),
    (
        {"documents": ((40, 3, 21), (5, -4, 63))},
        r"packed sequence 1 of the pool: document length -4 at position 1: expected 1 token to 2\*\*62",
    ),
    (
        {"documents": ((40, 3, 21), (5, 0, 59))},
        r"packed sequence 1 of the pool: document length 0 at position 1: expected 1 token to 2\*\*62",
    ),
    (
        {"documents": ((40, 3, 21), (5, 0.5, 59))},
        rf"packed sequence 1 of the pool: document lengths of type float64 and shape \[3\]: {FLAT}",
    ),
    (
        {"documents": ((40, 3, 21), ((5,), (59,)))},
        rf"packed sequence 1 of the pool: document lengths of type int64 and shape \[2, 1\]: {FLAT}",
    ),
    (
        {"sequence_length": 63},
        r"the documents of packed sequence 0 have 64 tokens, more than sequence_length=63; at most 63 would fit",
    ),
    ({"sequence_length": 0}, rf"sequence_length=0: {COUNT}"),
    ({"placement": "nearest"}, r"placement='nearest': choose one of home_first, paper"),
    ({"fetch": "suffix"}, r"fetch='suffix': choose one of prefix, document"),
    ({"tau": -0.01}, rf"tau=-0\.01: {TAU}"),
    ({"tau": float("nan")}, rf"tau=nan: {TAU}"),
    ({"tau": float("inf")}, rf"tau=inf: {TAU}"),
    ({"head_dim": 0}, rf"head_dim=0: {COUNT}"),
    ({"bytes_per_element": 0}, rf"bytes_per_element=0: {COUNT}"),
    ({"window": 0}, rf"window=0: {COUNT}"),
    ({"window": -1}, rf"window=-1: {COUNT}"),
    ({"context_parallel": 0}, rf"context_parallel=0: {COUNT}"),
]


@pytest.mark.parametrize(("change", "says"), REFUSED, ids=[str(change) for change, _ in REFUSED])
def test_a_setting_that_cannot_be_is_refused_by_name(change: dict[str, Any], says: str):
    with pytest.raises(ValueError, match=f"^{says}$"):
        plan_of(dataclasses.replace(POOL, **change))


def test_a_worker_or_chunk_or_phase_that_is_not_there_is_refused():
    plan = plan_of(POOL)
    for worker in (-1, 8):
        with pytest.raises(ValueError, match=f"^worker={worker}: this plan has 8, numbered from 0$"):
            plan.split_sizes(worker, "queries", 0)
    for chunk in (-1, 2):
        with pytest.raises(ValueError, match=f"^chunk={chunk}: this plan has 2, numbered from 0$"):
            plan.split_sizes(0, "queries", chunk)
    with pytest.raises(ValueError, match=r"^phase='sideways': choose one of queries, keys, outputs, key_gradients$"):
        plan.split_sizes(0, "sideways", 0)  # type: ignore[arg-type]
