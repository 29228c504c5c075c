"""Exchanges in lockstep and between processes: both transports, lost peers, ranks of several processes."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from odb_libra_lightning.odb.errors import ODBError, PeerLostError
from odb_libra_lightning.odb.exchange import Broadcast, Gather
from odb_libra_lightning.odb.rendezvous import ControlStore, outer_address
from odb_libra_lightning.odb.transport import LocalTransport, MeteredTransport, drive, play
from tests.launch import run_ranks, start_ranks

TRANSPORTS = pytest.mark.parametrize("transport", ["gloo", "store"])
GLOO_OR_IN_FULL = pytest.mark.parametrize("transport", ["gloo", pytest.param("store", marks=pytest.mark.full)])
# Sizes around what a store takes in one piece (4 MiB) and refuses (8 MiB).
SIZES = (0, 1, 7, 1 << 22, (1 << 22) + 1, 9 << 20)


def talk(rank: int, program: list[int | None]) -> Any:
    """A generator that gathers where the program says None, broadcasts from a root where it names one."""
    heard: list[Any] = []
    for number, root in enumerate(program):
        if root is None:
            heard.append((yield Gather(np.array([rank, number]))).tolist())
        else:
            heard.append((yield Broadcast(root, f"{root}, {number}".encode() if rank == root else None)).decode())
    yield heard


def expected(world_size: int, program: list[int | None]) -> list[Any]:
    return [
        [[rank, number] for rank in range(world_size)] if root is None else f"{root}, {number}"
        for number, root in enumerate(program)
    ]


@given(st.data(), st.integers(1, 5))
def test_ranks_in_lockstep_hear_the_same(data: st.DataObject, world_size: int) -> None:
    program = data.draw(st.lists(st.none() | st.integers(0, world_size - 1), max_size=6))
    heard = play(talk(rank, program) for rank in range(world_size))
    assert heard == [[expected(world_size, program)]] * world_size


@pytest.mark.parametrize("programs", [([0], [1]), ([0], [None]), ([0], [])])
def test_ranks_in_lockstep_that_part_are_told_so(programs: list[list[int | None]]) -> None:
    with pytest.raises(AssertionError, match="parted"):
        play(talk(rank, program) for rank, program in enumerate(programs))


def test_what_ranks_in_lockstep_share_cannot_be_changed() -> None:
    def change() -> Any:
        gathered = yield Gather(np.zeros(1, np.int64))
        gathered += 1

    with pytest.raises(ValueError, match="read-only"):
        play([change(), change()])


def test_one_rank_alone_broadcasts_to_itself_and_its_bytes_are_counted() -> None:
    transport = MeteredTransport(LocalTransport())
    assert list(drive(talk(0, [0, None, 0]), transport)) == [expected(1, [0, None, 0])]
    assert transport.bytes == 4 + 2 * 8 + 4


def join(transport: str, timeout: float) -> tuple[int, Any, ControlStore]:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    store = ControlStore(rank=rank, world_size=dist.get_world_size(), timeout=timeout, transport=transport)  # type: ignore[arg-type]
    group = store.next_group()
    assert group is not None
    return rank, group.join(), store


def content(size: int) -> bytes:
    return np.random.default_rng(size).bytes(size)


def exchange(transport: str, program: list[int | None]) -> Any:
    rank, carrier, _store = join(transport, 60)
    heard = list(drive(talk(rank, program), carrier))
    for size in SIZES:
        for root in range(3):
            assert carrier.broadcast(content(size) if rank == root else None, root) == content(size)
    for size in (0, 1, 1000):
        assert np.array_equal(carrier.all_gather(np.arange(size) + rank), [np.arange(size) + r for r in range(3)])
    keys = []
    for _ in range(20):
        carrier.all_gather(np.array([rank]))
        carrier.broadcast(b"x" if rank == 1 else None, 1)
        carrier.broadcast(b"y" if rank == 1 else None, 1)
        carrier.all_gather(np.array([rank]))
        carrier.all_gather(np.array([rank]))
        dist.barrier()
        keys.append(carrier._roll.store.num_keys())
        dist.barrier()
    dist.destroy_process_group()
    return [heard, keys]


@TRANSPORTS
def test_real_ranks_hear_the_same_and_leave_nothing_in_the_store(transport: str, tmp_path: Path) -> None:
    program = [0, None, 2, 2, None, None, 1, 0, None]
    for heard, keys in run_ranks(exchange, 3, tmp_path, transport=transport, program=program):
        assert heard == [expected(3, program)]
        assert len(set(keys)) == 1


def lose(transport: str, how: str, patience: float) -> str:
    rank, carrier, _store = join(transport, patience)
    try:
        for number in range(5):
            carrier.all_gather(np.array([rank]))
            if number == 2 and rank == 1 and how == "stop":
                time.sleep(patience + 2)
            elif number == 2 and how == "stop in it" and rank == 1:
                threading.Timer(1, os.kill, (os.getpid(), signal.SIGSTOP)).start()
            elif number == 2 and how == str(rank):
                os.kill(os.getpid(), signal.SIGKILL)
            elif number == 2 and rank == 2:
                time.sleep(2.5)  # still at its own work when the other goes
    except PeerLostError as error:
        if how == "stop" and rank == 0:
            time.sleep(4)  # for the late one to find the store
        dist.destroy_process_group()
        return str(error)
    raise AssertionError(f"rank {rank} did not notice")


def check_lost(transport: str, lost: int, says: str, folder: Path) -> None:
    ended = start_ranks(lose, 4, folder, timeout=60, transport=transport, how=str(lost), patience=600)
    for me, end in enumerate(ended):
        assert end.code == (-signal.SIGKILL if me == lost else 0), end.output
        if me != lost:
            assert json.loads((folder / f"rank{me}.json").read_text()).startswith(f"rank {me}: {says}")


@TRANSPORTS
def test_a_dead_rank_is_named_long_before_the_timeout(transport: str, tmp_path: Path) -> None:
    check_lost(transport, 1, "rank 1 does not answer, its process has ended", tmp_path)


@GLOO_OR_IN_FULL
def test_the_end_of_the_rank_that_holds_the_store_is_told_as_such(transport: str, tmp_path: Path) -> None:
    check_lost(transport, 0, "rank 0's process has ended, and the control store with it", tmp_path)


@GLOO_OR_IN_FULL
def test_a_rank_that_hangs_is_named_after_the_timeout(transport: str, tmp_path: Path) -> None:
    zero, one, two, three = run_ranks(lose, 4, tmp_path, transport=transport, how="stop", patience=3)
    assert zero.startswith("rank 0: rank 1 does not answer within 3 s")
    assert two.startswith("rank 2: rank 1 does not answer within 3 s")
    assert three.startswith("rank 3: rank 1 does not answer within 3 s")
    assert re.match("rank 1: (the exchange failed though no rank is missing|rank [023])", one)


@pytest.mark.full
def test_a_rank_that_is_stopped_while_it_waits_is_named(tmp_path: Path) -> None:
    ended = start_ranks(lose, 4, tmp_path, timeout=25, transport="gloo", how="stop in it", patience=4)
    assert [end.code for end in ended] == [0, -signal.SIGKILL, 0, 0], [end.output for end in ended]
    for me in (0, 2, 3):
        error = json.loads((tmp_path / f"rank{me}.json").read_text())
        assert error.startswith(f"rank {me}: rank 1 does not answer within 4 s")


def share_ranks(layout: str) -> Any:
    dist.init_process_group("gloo")
    me = dist.get_rank()
    rank = me // 2 if layout == "blocks" else me % 2
    store = ControlStore(rank=rank, world_size=2, timeout=30)
    channel = store.replica_channel()
    assert channel is not None
    gathered = None
    if store.leads:
        group = store.next_group()
        assert group is not None
        gathered = group.join().all_gather(np.array([me])).flatten().tolist()
    received = [channel.broadcast(f"{me}, {n}".encode() if store.leads else None).decode() for n in range(3)]
    refused = ""
    try:
        store.leads or store.next_group()
    except ODBError as error:
        refused = str(error)
    dist.barrier()
    dist.destroy_process_group()
    return [list(store.members), store.leads, gathered, received, refused]


@pytest.mark.parametrize(
    ("layout", "members"),
    [("blocks", [[0, 1], [2, 3]]), pytest.param("stripes", [[0, 2], [1, 3]], marks=pytest.mark.full)],
)
def test_processes_that_share_a_rank_receive_from_its_leader(
    layout: str, members: list[list[int]], tmp_path: Path
) -> None:
    leaders = [ranks[0] for ranks in members]
    for me, (mine, leads, gathered, received, refused) in enumerate(run_ranks(share_ranks, 4, tmp_path, layout=layout)):
        assert mine == next(ranks for ranks in members if me in ranks)
        assert leads == (me in leaders)
        assert gathered == (leaders if leads else None)
        assert received == [f"{mine[0]}, {number}" for number in range(3)]
        assert bool(refused) != leads


def lose_a_replica(silent: int) -> Any:
    dist.init_process_group("gloo")
    me = dist.get_rank()
    store = ControlStore(rank=0, world_size=1, timeout=30)
    assert store.members == (0, 1, 2)
    assert store.leads == (me == 0)
    assert not store.leads or store.next_group() is None
    channel = store.replica_channel()
    assert channel is not None
    channel.broadcast(b"x" if me == 0 else None)
    if me == silent:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:  # the leader need not notice in the first
            channel.broadcast(b"x" if me == 0 else None)
    except PeerLostError as error:
        dist.destroy_process_group()
        return str(error)


def test_a_dead_replica_is_named(tmp_path: Path) -> None:
    ended = start_ranks(lose_a_replica, 3, tmp_path, timeout=60, silent=1)
    assert [end.code for end in ended] == [0, -signal.SIGKILL, 0], [end.output for end in ended]
    for me in (0, 2):
        error = json.loads((tmp_path / f"rank{me}.json").read_text())
        assert error.startswith(f"process {me} (of rank 0): process 1 (of rank 0) does not answer")


def build_wrongly(ranks: list[list[int]]) -> Any:
    dist.init_process_group("gloo")
    errors = []
    for case in ranks:
        rank, world_size = case[2 * dist.get_rank() :][:2]
        try:
            ControlStore(rank=rank, world_size=world_size, timeout=30)
        except ODBError as error:
            errors.append(str(error))
    dist.barrier()
    dist.destroy_process_group()
    return errors


def test_ranks_of_unequal_size_are_refused_on_all(tmp_path: Path) -> None:
    cases = [[0, 2, 1, 2, 1, 2], [0, 2, 1, 3, 2, 3], [0, 4, 1, 4, 2, 4]]
    says = [
        r"3 processes do not make 2 data-parallel ranks of equal size, they make sizes \[1, 2\]",
        "global rank 1 loads as rank 1 of 3, global rank 0 as rank 0 of 2",
        r"3 processes do not make 4 data-parallel ranks of equal size, they make sizes \[1, 1, 1, 0\]",
    ]
    for errors in run_ranks(build_wrongly, 3, tmp_path, ranks=cases):
        assert len(errors) == 3
        assert all(re.match(text, error) for text, error in zip(says, errors, strict=True))


def be_alone() -> Any:
    dist.init_process_group("gloo")
    store = ControlStore(rank=0, world_size=1, timeout=30)
    dist.destroy_process_group()
    return [list(store.members), store.leads, store.next_group(), store.replica_channel()]


def test_one_process_needs_no_group_and_no_channel(tmp_path: Path) -> None:
    assert run_ranks(be_alone, 1, tmp_path) == [[[0], True, None, None]]


def test_a_loopback_address_serves_only_where_all_have_one() -> None:
    assert outer_address(["127.0.0.1", "::1"], 1) == "::1"
    assert outer_address(["127.0.0.1", "10.7.0.2"], 1) == "10.7.0.2"
    assert outer_address(["127.0.1.1", "127.0.0.5"], 0) == "127.0.1.1"
