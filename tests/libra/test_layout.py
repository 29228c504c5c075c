"""Settings at the edge: which numbers and types are taken, how large a pool may be, and what errors propose."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from odb_libra_lightning.libra.layout import check_degrees, check_homes, check_replicas
from odb_libra_lightning.libra.pool_plan import PoolPlan, plan_pool

SETTINGS: dict[str, Any] = {
    "context_parallel": 2,
    "block_size": 8,
    "head_shards": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 3,
    "bytes_per_element": 2,
    "chunks": 1,
}
DEGREES = {
    "sequence_length": 262_144,
    "global_batch": 128,
    "data_parallel": 16,
    "pool_size": 8,
    "context_parallel": 4,
    "block_size": 8192,
}


def plan(documents: list[list[int]], **changed: Any) -> PoolPlan:
    return plan_pool(documents, **{**SETTINGS, **changed})


def test_numpy_integers_are_numbers_like_others():
    documents = [[40, 3, 21], [64]]
    extra = {"window": 9, "sequence_length": 70}
    expected = plan(documents, **extra)
    for kind in (np.int32, np.int64, np.uint8):
        as_kind = {name: kind(value) for name, value in {**SETTINGS, **extra}.items()}
        assert plan_pool(documents, **as_kind).hash == expected.hash
        check_degrees(**{name: np.int64(value) for name, value in DEGREES.items()})


def test_one_share_written_in_two_ways_is_one_plan():
    one = plan([[64]], tau=1)
    assert one.hash == plan([[64]], tau=1.0).hash == plan([[64]], tau=np.float32(1)).hash
    assert one.hash != plan([[64]], tau=0.5).hash


@pytest.mark.parametrize("tau", ["0.5", True, None, [0.5]])
def test_a_share_that_is_no_number_is_refused(tau: object):
    with pytest.raises(ValueError, match="the share above the mean load is a finite number of at least 0"):
        plan([[64]], tau=tau)


@pytest.mark.parametrize("count", [2.0, "2", True, None, 2**31])
@pytest.mark.parametrize("name", ["context_parallel", "block_size", "num_heads", "chunks"])
def test_a_count_that_is_no_whole_number_is_refused(name: str, count: object):
    with pytest.raises(ValueError, match=rf"^{name}={count!r}: expected a whole number from 1 to 2147483647$"):
        plan([[64]], **{name: count})


def test_a_switch_is_true_or_false():
    expected = plan([[40, 24]], share_kv_heads=False, split_oversize=True)
    assert plan([[40, 24]], share_kv_heads=np.False_, split_oversize=np.True_).hash == expected.hash
    for value in ("no", 0, None):
        with pytest.raises(ValueError, match=rf"^share_kv_heads={value!r}: expected True or False$"):
            plan([[40, 24]], share_kv_heads=value)


def test_the_most_work_that_a_pool_can_have_is_added_exactly():
    """A document of `2**31 - 1` tokens has `2**61 - 2**30` query-key pairs: twice that fits, three times does not."""
    longest, pairs = 2**31 - 1, 2**61 - 2**30
    settings = {"num_kv_heads": 1, "head_shards": 1, "block_size": 10_000_019, "split_oversize": False}
    most = plan([[longest]], num_heads=2, **settings)
    work, worker = most.tile_flops.tolist(), most.tile_worker.tolist()
    assert sum(work) == 2 * pairs
    assert most.worker_load.tolist() == [sum(f for f, at in zip(work, worker, strict=True) if at == r) for r in (0, 1)]
    says = "query-key pairs times heads: at most 2\\*\\*62 would fit, in fewer or shorter sequences$"
    for sequences, heads in ((1, 3), (3, 1), (8, 1)):  # 8: 2**64 and so nearly 0 in int64
        with pytest.raises(ValueError, match=rf"^the pool has {sequences * heads * pairs} {says}"):
            plan([[longest]] * sequences, num_heads=heads, **settings)


def test_a_pool_of_more_workers_than_fit_is_refused():
    with pytest.raises(
        ValueError, match=r"^2 replicas with context_parallel=40000 are 80000 workers: a pool of at most 65536 would"
    ):
        plan([[64], [64]], context_parallel=40_000, block_size=1)


@pytest.mark.parametrize(
    ("documents", "sequence_length", "says"),
    [
        ([2**31], None, rf"a packed sequence of {2**31} rows: at most {2**31 - 1} would fit"),
        ([2**30, 2**30], None, rf"a packed sequence of {2**31} rows: at most {2**31 - 1} would fit"),
        ([1], 2**31, rf"sequence_length={2**31}: expected a whole number from 1 to {2**31 - 1}"),
        (
            [2**62] * 4,
            None,
            r"packed sequence 0 of the pool: document lengths sum to 18446744073709551616: at most 2\*\*62",
        ),
    ],
)
def test_rows_that_no_transfer_could_name_are_refused(documents: list[int], sequence_length: int | None, says: str):
    with pytest.raises(ValueError, match=f"^{says}"):
        plan([documents], sequence_length=sequence_length, block_size=2**29)


def test_rows_up_to_the_last_that_a_transfer_can_name_are_taken():
    padded = plan([[64]], sequence_length=2**31 - 1, block_size=2**29)
    assert padded.tiles.sequence_start.tolist() == [0, 2**31 - 1]
    assert sum(padded.worker_load.tolist()) == 64 * 65 // 2 * 4


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (
            {"context_parallel": 3},
            r"context_parallel=3 does not divide sequence_length=262144; 1, 2, 4, 8, 16 or 32 would fit",
        ),
        (
            {"block_size": 5000},
            r"block_size=5000 does not divide the 65536 .*; 512, 1024, 2048, 4096, 8192, 16384, 32768 or 65536 would",
        ),
        ({"pool_size": 5}, r"pool_size=5 does not divide data_parallel=16; 1, 2, 4, 8 or 16 would fit"),
        ({"pool_size": 32}, r"pool_size=32 does not divide data_parallel=16; 1, 2, 4, 8 or 16 would fit"),
        ({"global_batch": 100}, r"global_batch=100 packed .* data_parallel=16 replicas; 96 or 112 would fit"),
        ({"global_batch": 8}, r"global_batch=8 packed .* data_parallel=16 replicas; 16 would fit"),
        ({"data_parallel": 0}, r"data_parallel=0: expected a whole number from 1 to 2147483647"),
    ],
    ids=str,
)
def test_degrees_that_do_not_fit_are_told_the_nearest_that_do(changed: dict[str, int], says: str):
    check_degrees(**DEGREES)
    with pytest.raises(ValueError, match=f"^{says}"):
        check_degrees(**{**DEGREES, **changed})


def test_degrees_of_replicas_and_of_their_workers_are_checked_apart():
    """A run whose blocks are cut to its homes asks the first alone, of an odd sequence length too."""
    replicas, homes = ("global_batch", "data_parallel", "pool_size"), ("sequence_length", "context_parallel")
    check_replicas(**{name: DEGREES[name] for name in replicas})
    check_homes(**{name: DEGREES[name] for name in homes}, block_size=8192)
    with pytest.raises(ValueError, match=r"^pool_size=5 does not divide data_parallel=16"):
        check_replicas(global_batch=128, data_parallel=16, pool_size=5)
    with pytest.raises(ValueError, match=r"^context_parallel=2 does not divide sequence_length=63"):
        check_homes(sequence_length=63, context_parallel=2, block_size=1)
