"""Rows between processes over gloo: what arrives, and what is said when a worker dies or hangs."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from odb_libra_lightning.libra.attention import libra_attention
from odb_libra_lightning.libra.kernel_interface import AttentionKernel
from odb_libra_lightning.libra.kernels import kernel_for
from odb_libra_lightning.libra.pool_plan import plan_pool
from odb_libra_lightning.libra.prepared_plan import prepare_plan
from odb_libra_lightning.libra.transport import GroupTransport, LocalTransport
from tests.launch import begin_ranks, ends, run_ranks, wait_all

# Rows that each of three workers sends to each; the last sends and receives nothing.
SENT = [[2, 3, 0], [0, 1, 0], [0, 0, 0]]
DTYPES = (torch.bfloat16, torch.float64, torch.float32)


def exchange(subgroup: bool) -> list[Any]:
    """What this rank receives of rows that hold 10 * sender + receiver, for each dtype, several under way at once."""
    dist.init_process_group("gloo")
    group = dist.new_group([0, 1, 2], timeout=timedelta(seconds=30)) if subgroup else None
    transport = GroupTransport(group, timeout=None if subgroup else 30)
    rank = transport.rank
    under_way = []
    for dtype in DTYPES:
        content = [10 * rank + receiver for receiver, rows in enumerate(SENT[rank]) for _ in range(rows)]
        sent = torch.tensor(content, dtype=dtype)[:, None, None].repeat(1, 2, 3)
        splits = [row[rank] for row in SENT]
        received = torch.empty(sum(splits), 2, 3, dtype=dtype)
        under_way.append((transport.all_to_all(received, sent, splits, SENT[rank]), received, sent))
    nothing = torch.empty(0, 4)
    transport.all_to_all(nothing, torch.empty(0, 4), [0] * 3, [0] * 3).wait()
    heard = []
    for handle, received, _ in reversed(under_way):
        handle.wait()
        handle.wait()
        assert received.numel() == 0 or (received == received[:, :1, :1]).all()
        heard.append(received[:, 0, 0].tolist())
    sizes = [transport.rank, transport.size]
    dist.destroy_process_group()
    return [sizes, heard]


@pytest.mark.parametrize("subgroup", [True, pytest.param(False, marks=pytest.mark.full)])
def test_each_worker_receives_what_was_sent_to_it(subgroup: bool, tmp_path: Path) -> None:
    arriving = [[0, 0], [1, 1, 1, 11], []]
    assert run_ranks(exchange, 3, tmp_path, subgroup=subgroup) == [
        [[rank, 3], [rows] * len(DTYPES)] for rank, rows in enumerate(arriving)
    ]


def test_a_worker_alone_keeps_its_rows() -> None:
    transport = LocalTransport()
    received = torch.zeros(3, 2)
    transport.all_to_all(received, torch.ones(3, 2), [3], [3]).wait()
    assert (transport.rank, transport.size, received.sum()) == (0, 1, 6)


@pytest.mark.parametrize(
    ("output", "sent", "splits", "message"),
    [
        (torch.empty(2, 3), torch.ones(3, 2).t(), [2], "input is not contiguous"),
        (torch.empty(3, 2).t(), torch.ones(2, 3), [2], "output is not contiguous"),
        (torch.empty(2, 3), torch.ones(2, 3), [1], "add up to 1, it has 2 rows"),
        (torch.empty(2, 3), torch.ones(2, 3), [1, 1], "2 splits of output for 1 workers"),
        (torch.empty(2, 3), torch.ones(2, 3).double(), [2], "output is torch.float32, input torch.float64"),
    ],
)
def test_a_call_that_cannot_be_meant_is_caught(
    output: torch.Tensor, sent: torch.Tensor, splits: list[int], message: str
) -> None:
    with pytest.raises(AssertionError, match=message):
        LocalTransport().all_to_all(output, sent, splits, splits)


class _Failing:
    """A kernel that lets something happen to its process in its second backward."""

    def __init__(self, inner: AttentionKernel, happens: str) -> None:
        self.forward = inner.forward
        self._inner = inner
        self._happens = happens
        self._calls = 0

    def backward(self, *args: Any, **options: Any) -> Any:
        self._calls += 1
        if self._calls == 2:
            _happen(self._happens)
        return self._inner.backward(*args, **options)


def _happen(what: str) -> None:
    if what == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif what == "sleeps":
        time.sleep(1000)
    elif what == "is late":
        time.sleep(1)


def attend(happens: dict[str, str], limit: float, own_limit: bool = False, roll_call_s: float = 3) -> list[Any]:
    """What this rank is told in backward, and after how many seconds; its pool is all ranks but rank 0."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    pool = list(range(1, dist.get_world_size()))
    group = dist.new_group(pool, timeout=timedelta(seconds=60 if own_limit else limit))
    if (rank := dist.get_rank()) == 0:
        dist.barrier()
        _happen(happens.get("0", ""))
        _wait_for_all_but(happens)
        return []
    plan = plan_pool(
        [[64], *([8] * 8 for _ in pool[1:])],
        context_parallel=1,
        block_size=8,
        head_shards=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        bytes_per_element=4,
        chunks=2,
    )
    transport = GroupTransport(group, timeout=limit if own_limit else None, roll_call_s=roll_call_s)
    prepared = prepare_plan(plan, transport.rank)
    assert prepared.moves_queries
    q, k, v = (torch.randn(64, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    kernel = _Failing(kernel_for(q.device), happens.get(str(rank), ""))
    out = libra_attention(q, k, v, prepared, transport=transport, kernel=kernel)  # type: ignore[arg-type]
    dist.barrier()  # in forward workers agree on the plan, and need the store for it
    begin = time.monotonic()
    with pytest.raises(RuntimeError) as told:
        out.sum().backward()
    seconds = time.monotonic() - begin
    again = time.monotonic()
    with pytest.raises(RuntimeError, match=re.escape(str(told.value))):
        transport.all_to_all(torch.empty(0), torch.empty(0), [0] * len(pool), [0] * len(pool))
    assert time.monotonic() - again < 1
    if "0" not in happens:
        dist.distributed_c10d._get_default_store().set(f"told {rank}", "")
        dist.destroy_process_group()
    return [str(told.value), seconds]


def _wait_for_all_but(happens: dict[str, str]) -> None:
    """Keep the store until those have ended who will."""
    lost = [int(rank) for rank, what in happens.items() if what != "is late"]
    told = [f"told {rank}" for rank in range(1, dist.get_world_size()) if rank not in lost]
    dist.distributed_c10d._get_default_store().wait(told, timedelta(seconds=60))


def told_by(tmp_path: Path, world_size: int, *, without: list[int], **arguments: Any) -> dict[int, Any]:
    """What each rank was told; those in `without` die or hang."""
    processes = begin_ranks(attend, world_size, tmp_path, **arguments)
    others = [rank for rank in range(world_size) if rank not in without]
    deadline = time.monotonic() + 60
    try:
        for rank in others:
            with contextlib.suppress(subprocess.TimeoutExpired):  # it is then killed, and its return code says so
                processes[rank].wait(max(deadline - time.monotonic(), 0.01))
    finally:
        wait_all(processes, 0)
    for rank, end in enumerate(ends(processes, tmp_path)):
        assert end.code == (-signal.SIGKILL if rank in without else 0), (
            f"rank {rank} ended with {end.code}:\n{end.output}"
        )
    return {rank: json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in others if rank}


def test_a_worker_killed_in_backward_is_named_by_all_others(tmp_path: Path) -> None:
    told = told_by(tmp_path, 5, without=[2], happens={"2": "killed", "3": "is late"}, limit=50)
    assert sorted(told) == [1, 3, 4]
    for rank, (sentence, seconds) in told.items():
        assert sentence.startswith(
            f"worker {rank - 1} of 4 (global rank {rank}): worker 1 (global rank 2) did not answer,"
        )
        assert "its own output" in sentence
        assert seconds < 20


@pytest.mark.full
@pytest.mark.parametrize("own_limit", [False, True])
def test_a_worker_that_sleeps_for_ever_is_named_by_all_others(own_limit: bool, tmp_path: Path) -> None:
    happens = {"1": "sleeps"}
    told = told_by(tmp_path, 4, without=[1], happens=happens, limit=5, own_limit=own_limit)
    assert sorted(told) == [2, 3]
    for rank, (sentence, seconds) in told.items():
        assert sentence.startswith(
            f"worker {rank - 1} of 3 (global rank {rank}): worker 0 (global rank 1) did not answer,"
        )
        assert "py-spy dump" in sentence
        assert 3 < seconds < 20


@pytest.mark.full
def test_two_missing_workers_are_both_named(tmp_path: Path) -> None:
    told = told_by(tmp_path, 5, without=[2, 4], happens={"2": "killed", "4": "stopped"}, limit=5)
    assert sorted(told) == [1, 3]
    for sentence, _ in told.values():
        assert "): worker 1 (global rank 2) and worker 3 (global rank 4) did not answer," in sentence


@pytest.mark.full
@pytest.mark.parametrize("what", ["killed", "stopped"])
def test_a_lost_store_is_named_with_who_holds_it(what: str, tmp_path: Path) -> None:
    told = told_by(tmp_path, 4, without=[0, 2], happens={"0": what, "2": "killed"}, limit=5)
    assert sorted(told) == [1, 3]
    for sentence, seconds in told.values():
        assert "group's store does not answer: global rank 0 or the launcher" in sentence
        assert seconds < 20


def disagree() -> str:
    dist.init_process_group("gloo", timeout=timedelta(seconds=4))
    transport = GroupTransport(roll_call_s=10)
    expected = 3 if transport.rank else 2
    rows = torch.empty(2 * expected, 1)
    with pytest.raises(RuntimeError) as told:
        transport.all_to_all(rows, torch.ones(4, 1), [expected] * 2, [2, 2]).wait()
    return str(told.value)


@pytest.mark.full
def test_workers_that_part_are_told_that_nobody_is_missing(tmp_path: Path) -> None:
    for rank, sentence in enumerate(run_ranks(disagree, 2, tmp_path)):
        assert sentence.startswith(f"worker {rank} of 2 (global rank {rank}): the transfer failed after")
        assert "though all workers answer" in sentence


@pytest.mark.parametrize("options", [{"timeout": 0}, {"timeout": -1.0}, {"roll_call_s": 0}])
def test_times_that_are_not_positive_are_refused(options: dict[str, float]) -> None:
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=f"{name}={value}: expected seconds, more than 0"):
        GroupTransport(**options)


def attend_differently(differs: str) -> str:
    """One attention call in which rank 1 comes with something else than the others."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    rank = dist.get_rank()
    settings = {"block_size": 8, "head_shards": 1, "num_heads": 2, "num_kv_heads": 2, "head_dim": 4, "chunks": 1}
    lengths, options = [[32]], {}
    if rank == 1:
        settings |= {"window": 19} if differs == "window" else {}
        lengths = [[27, 3, 1, 1]] if differs == "lengths" else lengths
        options = {"scale": 0.25} if differs == "scale" else options
    plan = plan_pool(lengths, context_parallel=dist.get_world_size(), bytes_per_element=4, **settings)
    rows = torch.ones(32 // dist.get_world_size(), 2, 4)
    transport = GroupTransport(timeout=4, roll_call_s=2)
    try:
        libra_attention(rows, rows, rows, plan, transport=transport, **options)
        return "no error"
    except (ValueError, RuntimeError) as error:
        return str(error)


@pytest.mark.parametrize("differs", ["window", "lengths", "scale"])
def test_a_worker_with_another_plan_or_option_computes_nothing(tmp_path: Path, differs: str) -> None:
    first, second = run_ranks(attend_differently, 2, tmp_path, timeout=60, differs=differs)
    for rank, said in enumerate((first, second)):
        assert f"worker {rank} of 2 comes with [libra " in said
        assert "with the same plan, dtype and options" in said


def agree_often() -> int:
    """Many agreements, each on a transport of its own, as of calls without one; ranks run ahead of one another."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    draw = random.Random(dist.get_rank())
    for number in range(60):
        time.sleep(draw.choice([0, 0, 0.01]))
        GroupTransport(timeout=10, roll_call_s=1).agree(f"plan {number // 2}")
    dist.barrier()
    dist.destroy_process_group()
    return 60


def test_several_transports_of_a_group_do_not_take_one_agreement_for_another(tmp_path: Path) -> None:
    assert run_ranks(agree_often, 3, tmp_path, timeout=60) == [60, 60, 60]
