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
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    target = f"{function.__module__}:{function.__qualname__}"
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world_size)}
    # Lightning and torch then take the processes for torchrun's.
    common |= {"TORCHELASTIC_RUN_ID": "test", "LOCAL_WORLD_SIZE": str(world_size), "GROUP_RANK": "0"}
    processes, logs = [], []
    for rank in range(world_size):
        log = (folder / f"rank{rank}.log").open("w+")
        logs.append(log)
        command = [
            sys.executable,
            "-m",
            "tests.launch",
            target,
            str(folder / f"rank{rank}.json"),
            json.dumps(arguments),
        ]
        processes.append(start(command, log, {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}))
    wait_all(processes, timeout)
    ended = []
    for process, log in zip(processes, logs, strict=True):
        log.seek(0)
        ended.append(Ended(process.returncode, log.read()))
        log.close()
    return ended


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
