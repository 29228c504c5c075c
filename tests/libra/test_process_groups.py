"""Which ranks meet: exact lists, and groups that form whoever comes first."""

from __future__ import annotations

import os
import random
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from odb_libra_lightning.libra.process_groups import RankLayout, new_pool_groups
from odb_libra_lightning.libra.transport import LocalTransport
from tests.launch import run_ranks


def test_pools_and_replicas_of_twelve_ranks() -> None:
    layout = RankLayout(world_size=12, context_parallel=2, pool_size=3)
    assert (layout.num_replicas, layout.num_pools, layout.num_workers) == (6, 2, 6)
    assert [list(layout.pool_ranks(pool)) for pool in range(2)] == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    assert [list(layout.replica_ranks(replica)) for replica in (0, 1, 5)] == [[0, 1], [2, 3], [10, 11]]
    assert [layout.pool_of(rank) for rank in range(12)] == [0] * 6 + [1] * 6
    assert [layout.replica_of(rank) for rank in range(12)] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert [layout.worker_of(rank) for rank in range(12)] == [0, 1, 2, 3, 4, 5] * 2
    assert [layout.cp_rank_of(rank) for rank in range(12)] == [0, 1] * 6


@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5))
def test_every_rank_is_in_one_pool_and_one_replica(context_parallel: int, pool_size: int, pools: int) -> None:
    world_size = context_parallel * pool_size * pools
    layout = RankLayout(world_size=world_size, context_parallel=context_parallel, pool_size=pool_size)
    for count, ranks_of in ((layout.num_pools, layout.pool_ranks), (layout.num_replicas, layout.replica_ranks)):
        members = [rank for number in range(count) for rank in ranks_of(number)]
        assert Counter(members) == Counter(range(world_size))
    for rank in range(world_size):
        replica, cp_rank = layout.replica_of(rank), layout.cp_rank_of(rank)
        assert layout.replica_ranks(replica)[cp_rank] == rank == replica * context_parallel + cp_rank
        # Worker `s * CP + c` of a plan is rank `c` of replica `s` of the pool.
        assert layout.worker_of(rank) == replica % pool_size * context_parallel + cp_rank
        assert layout.pool_ranks(layout.pool_of(rank))[layout.worker_of(rank)] == rank


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        ((8, 3, 1), "context_parallel=3 does not divide world_size=8; 1, 2, 4 or 8 would fit"),
        ((12, 2, 4), "pool_size=4 does not divide the 6 replicas (world_size=12, context_parallel=2); 1, 2, 3 or 6"),
        ((1, 1, 2), "pool_size=2 does not divide the 1 replicas (world_size=1, context_parallel=1); 1 would fit"),
        ((4, 0, 1), "context_parallel=0: expected a whole number"),
        ((4, 1, True), "pool_size=True: expected a whole number"),
        ((4.0, 1, 1), "world_size=4.0: expected a whole number"),
    ],
)
def test_degrees_that_do_not_fit_are_refused(degrees: tuple[int, int, int], message: str) -> None:
    world_size, context_parallel, pool_size = degrees
    with pytest.raises(ValueError, match=re.escape(message)):
        RankLayout(world_size=world_size, context_parallel=context_parallel, pool_size=pool_size)


def test_what_does_not_exist_is_refused() -> None:
    layout = RankLayout(world_size=8, context_parallel=2, pool_size=2)
    for call, message in (
        (lambda: layout.pool_ranks(2), "pool=2: there are 2"),
        (lambda: layout.replica_ranks(-1), "replica=-1: there are 4"),
        (lambda: layout.worker_of(8), "rank=8: there are 8"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_groups_need_a_process_group_to_begin_with() -> None:
    with pytest.raises(RuntimeError, match="init_process_group first"):
        new_pool_groups(context_parallel=1, pool_size=1)


def form(rounds: int, layouts: list[list[int]], folder: str) -> list[Any]:
    """Form groups again and again, with ranks that come at random times; who meets in them, each round."""
    found: list[Any] = []
    delays = random.Random(os.environ["RANK"])
    for number in range(rounds):
        time.sleep(delays.random() / 2)
        dist.init_process_group("gloo", init_method=f"file://{folder}/{number}", **_whoami())
        for context_parallel, pool_size in layouts:
            time.sleep(delays.random() / 2)
            groups = new_pool_groups(context_parallel=context_parallel, pool_size=pool_size, timeout=60)
            found.append([_members(transport) for transport in (groups.pool, groups.replica)])
            alone = [isinstance(transport, LocalTransport) for transport in (groups.pool, groups.replica)]
            assert alone == [context_parallel * pool_size == 1, context_parallel == 1]
            assert (groups.pool is groups.replica) == (pool_size == 1)
        dist.destroy_process_group()
    return found


def _whoami() -> dict[str, int]:
    return {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}


def _members(transport: Any) -> list[int]:
    """Global ranks of the workers, in their order, as each sends its own to all."""
    mine = torch.full((transport.size,), dist.get_rank())
    received = torch.empty_like(mine)
    splits = [1] * transport.size
    transport.all_to_all(received, mine, splits, splits).wait()
    return received.tolist()


def test_groups_of_four_ranks_in_every_layout(tmp_path: Path) -> None:
    pools = {
        (1, 2): [[0, 1], [0, 1], [2, 3], [2, 3]],
        (2, 1): [[0, 1], [0, 1], [2, 3], [2, 3]],
        (2, 2): [[0, 1, 2, 3]] * 4,
        (4, 1): [[0, 1, 2, 3]] * 4,
        (1, 1): [[0], [1], [2], [3]],
    }
    replicas = {1: [[0], [1], [2], [3]], 2: [[0, 1], [0, 1], [2, 3], [2, 3]], 4: [[0, 1, 2, 3]] * 4}
    found = run_ranks(form, 4, tmp_path, rounds=1, layouts=[list(layout) for layout in pools], folder=str(tmp_path))
    for number, (context_parallel, pool_size) in enumerate(pools):
        for rank in range(4):
            expected = [pools[context_parallel, pool_size][rank], replicas[context_parallel][rank]]
            assert found[rank][number] == expected


@pytest.mark.full
def test_two_pools_form_twenty_times_whoever_comes_first(tmp_path: Path) -> None:
    found = run_ranks(form, 4, tmp_path, timeout=300, rounds=20, layouts=[[1, 2]], folder=str(tmp_path))
    for rank, rounds in enumerate(found):
        assert rounds == [[[0, 1] if rank < 2 else [2, 3], [rank]]] * 20
