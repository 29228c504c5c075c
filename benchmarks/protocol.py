"""What ranks' exchanges cost: all_gather over Gloo and over the control store, flat and in groups.

`messages` measures rounds between processes of this machine. All variants take turns round by round, so that a noisy
machine is noisy for all; figures are medians. In a hierarchical round the ranks of a group gather, the first of each
group gather what their groups said, and broadcast it back.

`model` extends that to a thousand ranks. Gloo's all_gather is a ring of W-1 messages one after another, its broadcast
a binary tree, and the store answers one request after another. What a message costs comes from two processes (more
than this machine has cores would measure the scheduler), what a request costs from one client; `--latency-us` and
`--gbit` put a network in the place of this machine's loopback. Nothing in it is parallel to anything else, so it
compares variants and predicts no absolute time.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing as mp
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, get_args

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch._C._distributed_c10d import TCPStore

from odb_libra_lightning.odb.exchange import Message
from odb_libra_lightning.odb.rendezvous import ControlGroup, TransportName
from odb_libra_lightning.odb.transport import Transport

HOST = "127.0.0.1"
MEASURED = (2, 4, 8)
MODELLED = (2, 4, 8, 16, 64, 256, 1024)
INT64S = (8, 1024)
LIMIT_S = 300.0


def group_size(world_size: int) -> int:
    """The smallest divisor of the number of ranks that is not below its square root."""
    return next(size for size in range(math.isqrt(world_size - 1) + 1, world_size + 1) if world_size % size == 0)


class Grouped:
    """A hierarchical all_gather."""

    def __init__(self, group: Transport, leaders: Transport | None) -> None:
        self.group = group
        self.leaders = leaders

    def all_gather(self, message: Message) -> Message:
        """Gather in the group, among its leaders, and back."""
        mine = self.group.all_gather(message)
        everyone = None if self.leaders is None else self.leaders.all_gather(mine.reshape(-1)).tobytes()
        return np.frombuffer(self.group.broadcast(everyone, 0), np.int64).reshape(-1, len(message))


def join(port: int, transport: TransportName, name: str, ranks: range, rank: int) -> Transport:
    return ControlGroup(
        host=HOST,
        port=port,
        name=f"{transport}/{name}",
        rank=ranks.index(rank),
        names=tuple(f"rank {member}" for member in ranks),
        address=HOST,
        timeout=LIMIT_S,
        transport=transport,
    ).join()


def _rank(port: int, rank: int, world_size: int, rounds: int, results: Any) -> None:
    """One process: milliseconds of each round, by variant and message."""
    torch.set_num_threads(1)
    size = group_size(world_size)
    variants: dict[str, Any] = {}
    for transport in get_args(TransportName):
        variants[f"{transport}, flat"] = join(port, transport, "all", range(world_size), rank)
        if 1 < size < world_size:
            first = rank - rank % size
            group = join(port, transport, f"group/{first}", range(first, first + size), rank)
            leaders = range(0, world_size, size)
            above = join(port, transport, "leaders", leaders, rank) if rank in leaders else None
            variants[f"{transport}, grouped"] = Grouped(group, above)
    times: dict[tuple[str, int], list[float]] = {(v, n): [] for v in variants for n in INT64S}
    for _ in range(rounds):
        for (variant, int64s), spent in times.items():
            message = np.full(int64s, rank)
            begin = time.perf_counter()
            gathered = variants[variant].all_gather(message)
            spent.append(1000 * (time.perf_counter() - begin))
            assert np.array_equal(gathered[:, 0], np.arange(world_size))
    if rank == 0:
        results.send({key: statistics.median(spent) for key, spent in times.items()})


def measure_messages(world_size: int, rounds: int) -> dict[tuple[str, int], float]:
    """Median milliseconds of a round between `world_size` processes, by variant and int64s of a message."""
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=LIMIT_S))
    context = mp.get_context("fork")
    results, theirs = context.Pipe(duplex=False)
    processes = [
        context.Process(target=_rank, args=(store.port, rank, world_size, rounds, theirs)) for rank in range(world_size)
    ]
    try:
        for process in processes:
            process.start()
        if not results.poll(LIMIT_S):
            raise TimeoutError(f"{world_size} processes did not end within {LIMIT_S:g} s")
        medians: dict[tuple[str, int], float] = results.recv()
        for process in processes:
            process.join(LIMIT_S)
        return medians
    finally:
        for process in processes:
            process.kill()


@dataclass(frozen=True)
class Costs:
    """What the model knows, in milliseconds and bytes.

    Attributes:
        message: a message from one process to another.
        byte: each byte of it.
        request: a request of a store.
        key: each key in it.
        store_byte: each byte of its values.
    """

    message: float
    byte: float
    request: float
    key: float
    store_byte: float

    def ring(self, world_size: int, size: float) -> float:
        """All_gather of `size` bytes over Gloo."""
        return (world_size - 1) * (self.message + size * self.byte)

    def tree(self, world_size: int, size: float) -> float:
        """Broadcast of `size` bytes over Gloo, the length before it."""
        return math.ceil(math.log2(world_size)) * (2 * self.message + size * self.byte)

    def read(self, keys: int, size: float) -> float:
        """One client's request for values of `size` bytes."""
        return self.request + keys * (self.key + size * self.store_byte)

    def gather_in_store(self, world_size: int, size: float) -> float:
        """All_gather over the store: each rank writes one value and reads all."""
        return world_size * (self.read(1, size) + self.read(world_size, size))

    def rounds(self, world_size: int, int64s: int) -> dict[str, float]:
        """Milliseconds of a round in each variant."""
        size, group = 8.0 * int64s, group_size(world_size)
        groups = world_size // group
        whole = world_size * size
        flat = {"gloo, flat": self.ring(world_size, size), "store, flat": self.gather_in_store(world_size, size)}
        if groups == 1:
            return flat
        return {
            "gloo, flat": flat["gloo, flat"],
            "gloo, grouped": self.ring(group, size) + self.ring(groups, group * size) + self.tree(group, whole),
            "store, flat": flat["store, flat"],
            "store, grouped": groups * self.gather_in_store(group, size)
            + self.gather_in_store(groups, group * size)
            + world_size * self.read(1, whole),
        }


def fit_messages(rounds: int, *, latency_us: float | None, gbit: float | None) -> tuple[float, float]:
    """Milliseconds of a message and of each byte, between two processes or as given."""
    median = measure_messages(2, rounds)
    short, long = (median["gloo, flat", int64s] for int64s in INT64S)
    byte = max(long - short, 0.0) / (8 * (INT64S[1] - INT64S[0])) if gbit is None else 8 / (gbit * 1e6)
    return (short if latency_us is None else latency_us / 1000), byte


def fit_store(repeats: int = 20) -> tuple[float, float, float]:
    """Milliseconds of a request, of each key in it, and of each byte, by least squares over one client's requests."""
    server = TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=LIMIT_S))
    client: Any = TCPStore(HOST, server.port, is_master=False, timeout=timedelta(seconds=LIMIT_S))
    rows, spent = [], []
    for size in (64, 1024, 8192):
        for keys in (1, 16, 64, 256, 1024):
            names = [f"{size}/{number}" for number in range(keys)]
            for name in names:
                client.set(name, bytes(size))
            client.multi_get(names)
            times = []
            for _ in range(repeats):
                begin = time.perf_counter()
                client.multi_get(names)
                times.append(1000 * (time.perf_counter() - begin))
            rows.append([1, keys, keys * size])
            spent.append(statistics.median(times))
    # Relative errors count: the times span three orders of magnitude.
    weight = 1 / np.array(spent)
    request, key, byte = np.linalg.lstsq(np.array(rows) * weight[:, None], np.ones(len(rows)), rcond=None)[0]
    return max(float(request), 0.0), max(float(key), 0.0), max(float(byte), 0.0)


def messages(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measured rounds."""
    return [
        {"ranks": world_size, "int64s": int64s, **{v: ms for (v, n), ms in medians.items() if n == int64s}}
        for world_size in MEASURED
        for medians in [measure_messages(world_size, options.rounds)]
        for int64s in INT64S
    ]


def model(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Modelled rounds."""
    costs = Costs(*fit_messages(options.rounds, latency_us=options.latency_us, gbit=options.gbit), *fit_store())
    return [
        {"ranks": world_size, "int64s": int64s, **costs.rounds(world_size, int64s)}
        for world_size in MODELLED
        for int64s in INT64S
    ]


# Rounds of simulated ranks are a section of their own here.
SECTIONS: dict[str, Callable[[argparse.Namespace], list[dict[str, Any]]]] = {"messages": messages, "model": model}


def main() -> None:
    """Measure, and print tables or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", help=f"which of {', '.join(SECTIONS)}; all if none is given")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--latency-us", type=float, help="microseconds of a message, in place of the measured ones")
    parser.add_argument("--gbit", type=float, help="Gbit/s of the network, in place of the measured ones")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    options = parser.parse_args()
    unknown = set(options.sections) - set(SECTIONS)
    if unknown:
        parser.error(f"no such section: {', '.join(unknown)}; choose among {', '.join(SECTIONS)}")

    report: dict[str, Any] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"torch {torch.__version__}",
        "settings": vars(options),
    }
    for name in options.sections or SECTIONS:
        report[name] = SECTIONS[name](options)
    if options.json:
        print(json.dumps(report, indent=2))
        return
    console = Console()
    console.print(f"{report['machine']}; median ms of a round")
    for name in options.sections or SECTIONS:
        columns = list(dict.fromkeys(key for row in report[name] for key in row))
        table = Table(*columns, title=name)
        for row in report[name]:
            cells = (row.get(column, "") for column in columns)
            table.add_row(*(f"{cell:,.2f}" if isinstance(cell, float) else str(cell) for cell in cells))
        console.print(table)


if __name__ == "__main__":
    main()
