"""The handle of a collate process: what it reads ahead, how it ends, and what it leaves."""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from odb_libra_lightning.odb import collate_process
from odb_libra_lightning.odb.collate_process import CollateProcess
from odb_libra_lightning.odb.config import LoaderConfig
from odb_libra_lightning.odb.epoch import EpochStart
from odb_libra_lightning.odb.errors import PeerLostError
from odb_libra_lightning.odb.rank_data import RankJob
from odb_libra_lightning.odb.wire import from_bytes
from tests.launch import REPOSITORY, children, start, wait_all
from tests.samples import Documents, identities, pad

# Steps are let go up to four at a time, so one fewer than that may go beyond the room there was.
BURST = 3


def collating(dataset: Any, decode: Callable[[bytearray], Any] = from_bytes, **settings: Any) -> CollateProcess:
    config = LoaderConfig(**{"l_max": 400, "num_workers": 1, **settings})
    return CollateProcess(job(dataset, config), decode)


def job(dataset: Any, config: LoaderConfig) -> RankJob:
    return RankJob(
        dataset=dataset,
        num_samples=len(dataset),
        collate_fn=pad,
        config=config,
        rank=0,
        world_size=1,
        control=None,
    )


def wait_until(true: Callable[[], bool], limit: float = 30) -> None:
    deadline = time.monotonic() + limit
    while not true():
        assert time.monotonic() < deadline, "not within the time limit"
        time.sleep(0.01)


class Hangs(Documents):
    def __getitem__(self, index: int) -> Any:
        time.sleep(100)


@pytest.mark.parametrize("prefetch_batches", [1, 6])
def test_batches_are_decoded_ahead_of_the_trainer_and_no_more_than_are_allowed(prefetch_batches: int) -> None:
    decoded_in: list[str] = []

    def decode(payload: bytearray) -> Any:
        decoded_in.append(threading.current_thread().name)
        return from_bytes(payload)

    process = collating(Documents(300), decode, prefetch_batches=prefetch_batches)
    seen = []
    for taken, step in enumerate(process.steps(EpochStart()), start=1):
        seen.extend(identities(step.payload))
        if taken == 1:
            wait_until(lambda: len(decoded_in) >= 1 + prefetch_batches)
            time.sleep(0.3)  # for a thread that would not stop
        assert len(decoded_in) <= taken + prefetch_batches + BURST
    process.close()
    assert set(decoded_in) == {"odb-receive-0"}
    assert sorted(seen) == list(range(300))


def test_without_decode_the_bytes_come_as_they_are() -> None:
    process = CollateProcess(job(Documents(5), LoaderConfig(l_max=10_000, num_workers=1)))
    assert sorted(i for step in process.steps(EpochStart()) for i in identities(from_bytes(step.payload))) == [
        *range(5)
    ]
    process.close()


def test_an_error_of_decoding_is_raised_where_the_batch_is_awaited() -> None:
    def decode(payload: bytearray) -> Any:
        raise MemoryError("no page-locked memory left")

    process = collating(Documents(50), decode)
    with pytest.raises(MemoryError, match="no page-locked memory left"):
        next(process.steps(EpochStart()))
    process.close()


def test_ctrl_c_is_obeyed_while_a_batch_is_awaited() -> None:
    process = collating(Hangs(10))
    interrupt = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        next(process.steps(EpochStart()))
    process.close()


@pytest.mark.parametrize("start_method", ["fork", "forkserver"])
def test_signals_that_the_trainer_answers_do_nothing_to_the_processes_behind_it(start_method: str) -> None:
    """A terminal or a cluster sends them to all processes of a job; by SIGTERM a DataLoader ends its workers."""
    process = collating(Documents(300), prefetch_batches=1, start_method=start_method)
    steps = process.steps(EpochStart())
    seen = identities(next(steps).payload)
    collate = process._process.pid
    workers = children(collate)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        for pid in (collate, *workers):
            os.kill(pid, number)
    os.kill(collate, signal.SIGTERM)
    assert sorted(seen + [i for step in steps for i in identities(step.payload)]) == list(range(300))
    process.close()


def ends(process: CollateProcess) -> Callable[[], bool]:
    """Whether its process and its thread are gone; holds on to neither's handle."""
    child, threads = process._process, [t for t in threading.enumerate() if t.name.startswith("odb-")]
    assert child.is_alive()
    assert len(threads) == 1
    return lambda: not child.is_alive() and not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("dataset", [Documents(500), Hangs(10)], ids=["batches wait", "no batch comes"])
def test_close_ends_process_and_thread_within_an_epoch(dataset: Documents) -> None:
    process = collating(dataset, prefetch_batches=2)
    ended = ends(process)
    steps = process.steps(EpochStart())
    if type(dataset) is Documents:
        next(steps)
    process.close()
    assert ended()
    process.close()  # once more does no harm


def test_a_handle_that_nobody_holds_ends_its_process_and_thread() -> None:
    process = collating(Documents(500))
    next(process.steps(EpochStart()))
    ended, handle = ends(process), weakref.ref(process)
    del process
    gc.collect()
    assert handle() is None
    assert ended()


def test_a_process_that_is_stopped_is_an_error_in_time_and_ends_when_closed() -> None:
    process = collating(Documents(500), timeout=1, prefetch_batches=1)
    ended = ends(process)
    steps = process.steps(EpochStart())
    next(steps)
    os.kill(process._process.pid, signal.SIGSTOP)
    with pytest.raises(PeerLostError, match="rank 0: no batch within 1 s"):
        list(steps)
    process.close()
    assert ended()


def test_a_process_that_is_killed_is_an_error_even_where_its_socket_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[socket.socket] = []

    def socketpair() -> tuple[socket.socket, socket.socket]:
        mine, theirs = real()
        kept.append(theirs.dup())  # as a descendant of the process may keep it
        return mine, theirs

    real = socket.socketpair
    monkeypatch.setattr(socket, "socketpair", socketpair)
    process = collating(Documents(500), prefetch_batches=1)
    steps = process.steps(EpochStart())
    next(steps)
    os.kill(process._process.pid, signal.SIGKILL)
    with pytest.raises(PeerLostError, match="rank 0: its collate process ended by signal 9 before the epoch did"):
        list(steps)
    process.close()
    kept[0].close()


SCRIPT = """
import sys
sys.path.insert(0, {root!r})
from odb_libra_lightning import ODBLoader
from tests.samples import Documents, pad
if __name__ == "__main__":
    def loader():
        return ODBLoader(Documents(3000), pad, l_max=300, num_workers=2, start_method={start_method!r})
    for batch in loader():
        break
    batches = iter(loader())
    next(batches)
    print("within an epoch", flush=True)
    sys.exit(3)
"""


@pytest.mark.parametrize("start_method", ["fork", "spawn", "forkserver"])
def test_leaving_a_loop_and_the_program_leaves_no_semaphore_behind(start_method: str, tmp_path: Path) -> None:
    """The resource tracker, which Python starts under spawn and forkserver, complains at exit of what was left."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(root=str(REPOSITORY), start_method=start_method))
    with (tmp_path / "log").open("w+") as log:
        process = start([sys.executable, str(script)], log)
        wait_all([process], 60)
        log.seek(0)
        assert (process.returncode, log.read()) == (3, "within an epoch\n")


def test_a_fork_that_inherits_a_held_lock_is_given_up_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """glibc resets most locks in a forked child; a Python lock stands for one that it does not."""
    held = threading.Lock()
    held.acquire()
    marker = tmp_path / "first"
    resolve = socket.getnameinfo

    def getnameinfo(*arguments: Any) -> Any:
        if not marker.exists():
            marker.touch()
            held.acquire()
        return resolve(*arguments)

    monkeypatch.setattr(socket, "getnameinfo", getnameinfo)
    monkeypatch.setattr(collate_process, "_START_S", 3.0)
    process = collating(Documents(20), start_method="fork")
    assert sum(1 for _ in process.steps(EpochStart())) > 0
    assert marker.exists()
    process.close()
