"""Running a function on several ranks, each in a process of its own, and reading what each one wrote.

A run passes only if every rank wrote its result and every process ended well: a launcher's own exit code would
hide a rank that died. Nothing outlives the time limit.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Ended:
    """How a process ended."""

    code: int
    output: str


def run_ranks(
    function: Callable[..., Any], world_size: int, folder: Path, /, *, timeout: float = 100, **arguments: Any
) -> list[Any]:
    """Results of `function(**arguments)` on each rank; the launcher's variables are set, a group is not.

    Raises:
        AssertionError: if a rank fails, writes no result, or does not end in time.
    """
    ended = start_ranks(function, world_size, folder, timeout=timeout, **arguments)
    for rank, end in enumerate(ended):
        assert end.code == 0, f"rank {rank} ended with {end.code}:\n{end.output}"
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(world_size)]


def start_ranks(
    function: Callable[..., Any], world_size: int, folder: Path, /, *, timeout: float = 100, **arguments: Any
) -> list[Ended]:
    """How each rank ended, well or badly."""
    processes = begin_ranks(function, world_size, folder, **arguments)
    wait_all(processes, timeout)
    return ends(processes, folder)


def begin_ranks(
    function: Callable[..., Any], world_size: int, folder: Path, /, **arguments: Any
) -> list[subprocess.Popen[str]]:
    """Running ranks, for tests that do something to them; `wait_all` must follow, come what may."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    target = f"{function.__module__}:{function.__qualname__}"
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world_size)}
    # Lightning and torch then take the processes for torchrun's.
    common |= {"TORCHELASTIC_RUN_ID": "test", "LOCAL_WORLD_SIZE": str(world_size), "GROUP_RANK": "0"}
    processes = []
    for rank in range(world_size):
        command = [
            sys.executable,
            "-m",
            "tests.launch",
            target,
            str(folder / f"rank{rank}.json"),
            json.dumps(arguments),
        ]
        with (folder / f"rank{rank}.log").open("w") as log:
            processes.append(start(command, log, {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}))
    return processes


def ends(processes: list[subprocess.Popen[str]], folder: Path) -> list[Ended]:
    """How processes of `begin_ranks` that have ended did so."""
    return [Ended(p.returncode, (folder / f"rank{rank}.log").read_text()) for rank, p in enumerate(processes)]


def children(pid: int) -> list[int]:
    """Processes that a process has started and that run, stopped and half-dead ones included."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # ended meanwhile
            _, _, fields = stat.read_text().rpartition(")")
            if int(fields.split()[1]) == pid:
                found.append(int(stat.parent.name))
    return found


def start(command: list[str], log: Any, variables: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """A process in a session of its own, so that all it starts can be ended with it."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **(variables or {})}
    return subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env=environment,
        stdout=log,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def wait_all(processes: list[subprocess.Popen[str]], timeout: float) -> None:
    """Wait for all, and end every process of their sessions that is left."""
    deadline = time.monotonic() + timeout
    try:
        for process in processes:
            process.wait(max(deadline - time.monotonic(), 0.01))
    except subprocess.TimeoutExpired:
        pass  # the return code of a killed process, -9, says so
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)


def session_ends(process: subprocess.Popen[str], within: float = 10) -> bool:
    """Whether every process that it started has ended within so many seconds."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


def main() -> None:
    """One rank: call the function and write down what it returns."""
    target, result, arguments = sys.argv[1:]
    module, name = target.split(":")
    value = getattr(importlib.import_module(module), name)(**json.loads(arguments))
    Path(result).write_text(json.dumps(value))


if __name__ == "__main__":
    main()
