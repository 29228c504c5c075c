"""Every test leaves the machine as it found it."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import pytest
from hypothesis import settings

from tests.launch import children

# No timing decides a test: an example may take as long as the machine makes it.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

SHARED_MEMORY = Path("/dev/shm")
# By it a process is known for ours that was started by one of ours and has outlived that.
MARK = f"STARTED_BY_TESTS_OF={os.getpid()}"
os.environ.update([MARK.split("=")])


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaves a process, a thread of the loader, a listening socket, or a file in shared memory."""
    before = {*_processes(), *_threads(), *_listening(), *_shared_memory()}
    yield
    deadline = time.monotonic() + 10
    while (left := _left(before)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, "left behind: " + "; ".join(left)


def _left(before: set[str]) -> list[str]:
    left = sorted({*_processes(), *_threads(), *_listening()} - before)
    files = _shared_memory() - before
    return left + sorted(files - _in_use_by_others()) if files else left


def _processes() -> set[str]:
    ours = set(children(os.getpid()))
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # ended meanwhile, or another user's
            if f"{MARK}\0".encode() in environment.read_bytes():
                ours.add(int(environment.parent.name))
    # Python keeps these two until it ends.
    ours -= {os.getpid(), resource_tracker._resource_tracker._pid, forkserver._forkserver._forkserver_pid}
    # W&B starts its service once for as long as the interpreter runs.
    return {f"process {pid}: {command}" for pid in ours if "wandb-core" not in (command := _command(pid))}


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
    except OSError:
        return "ended"


def _threads() -> set[str]:
    return {f"thread {thread.name} ({thread.ident})" for thread in threading.enumerate() if "odb-" in thread.name}


def _listening() -> set[str]:
    """Ports that this process listens on; what a child listened on is closed with the child."""
    sockets = set()
    for descriptor in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError):
            sockets.add(str(descriptor.readlink()))
    ports = set()
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:] if Path(table).exists() else []:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                ports.add(f"port {int(fields[1].rpartition(':')[2], 16)}")
    return ports


def _shared_memory() -> set[str]:
    found = set()
    for entry in SHARED_MEMORY.iterdir() if SHARED_MEMORY.is_dir() else []:
        with contextlib.suppress(OSError):
            if entry.stat().st_uid == os.getuid():
                found.add(str(entry))
    return found


def _in_use_by_others() -> set[str]:
    """Files in shared memory that processes of other runs on this machine hold."""
    held = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        if maps.parent.name != str(os.getpid()):
            with contextlib.suppress(OSError):
                held |= {line.split(maxsplit=5)[5] for line in maps.read_text().splitlines() if "/dev/shm/" in line}
    return held
