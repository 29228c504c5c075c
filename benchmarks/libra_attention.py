"""How evenly attention keeps the workers of a run busy: Libra beside what it is compared with, computed for real.

Four processes over gloo, one thread each, compute the same packed sequences of an optimizer step forward and backward:
as 4 replicas of 1 worker and as 2 replicas of 2. Counted is CPU time that the thread of the attention spends inside
kernel calls (`time.thread_time`), so that waiting for other workers, gloo's own threads and other users of the machine
do not count; of each worker and micro-step the shortest of `--turns` measurements, in which all attentions take turns.
Gathering, copying and Python around the kernel is the column "around", gloo's threads the column "gloo".

    python benchmarks/libra_attention.py                              # some five minutes on 2 cores
    python benchmarks/libra_attention.py --length 16384 --turns 2     # twice that; a call's fixed costs weigh less
    python benchmarks/libra_attention.py --dry-run                    # small and fast, to see that all of it works

The straggler ratio of a micro-step is the kernel time of its slowest worker over the mean of all workers of the run;
"counted" is the same of query-key pairs. Before that, all are compared with attention by a mask in float64.
Overlap cannot be seen here: processes outnumber cores, and gloo computes while it transfers.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import multiprocessing.connection
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from attention_cases import CASES, HEAD_DIM, HEADS, KV_HEADS, WORKERS, Case
from attention_measures import (
    Attention,
    CountedKernel,
    Step,
    machine,
    masked_attention,
    scaled_step,
    whole,
    with_gradients,
)
from rich.console import Console
from rich.table import Table
from torch import Tensor

from odb_libra_lightning.baselines import ring_attention, ulysses_attention
from odb_libra_lightning.libra.attention import libra_attention
from odb_libra_lightning.libra.kernels import KERNELS
from odb_libra_lightning.libra.pool_plan import layout_plan
from odb_libra_lightning.libra.prepared_plan import prepare_plan
from odb_libra_lightning.libra.process_groups import PoolGroups, new_pool_groups
from odb_libra_lightning.libra.thread_transport import DelayedTransport

Measure = Callable[[dict[str, Any]], dict[str, Any]]

CHECKED = 1e-4  # largest difference from float64, relative; float32 has 6e-8, and sums are of hundreds


class MicroStep:
    """One micro-step of one case on this worker, ready to be computed any number of times."""

    def __init__(self, case: Case, sequences: Step, number: int, groups: PoolGroups, block_size: int) -> None:
        self.kernel = CountedKernel(KERNELS["cpu"](), time.thread_time)
        ranks, rank = groups.layout, groups.rank
        replica, cp_rank = ranks.replica_of(rank), ranks.cp_rank_of(rank)
        self.lengths = sequences[replica]
        rows = sum(self.lengths)
        self.home = slice(*(at * rows // case.context_parallel for at in (cp_rank, cp_rank + 1)))
        self.transport = DelayedTransport(groups.pool if case.pooled else groups.replica)  # for its list of events
        attend: Any = libra_attention
        if case.pooled:
            first = ranks.pool_of(rank) * case.pool_size
            plan = layout_plan(sequences[first : first + case.pool_size], case.layout(block_size))
            attend = partial(libra_attention, plan=prepare_plan(plan, ranks.worker_of(rank)))
        else:
            # Only its documents and heads are used.
            plan = layout_plan([self.lengths], case.layout(min(block_size, rows)))
            attend = partial(ring_attention if case.name == "ring" else ulysses_attention, plan=plan)
        self.attend: Attention = partial(attend, transport=self.transport, kernel=self.kernel)
        self.seed = 1000 * number + replica

    def tensors(self, dtype: torch.dtype) -> list[Tensor]:
        """Queries, keys, values and the output's gradient of the whole packed sequence."""
        return random_rows(sum(self.lengths), self.seed, dtype)

    def measure(self) -> dict[str, float]:
        """Compute it once. Seconds of CPU time; bytes to other workers."""
        *leaves, grad = (each[self.home].clone() for each in self.tensors(torch.float32))
        q, k, v = (each.requires_grad_() for each in leaves)
        self.kernel.clear()
        self.transport.events.clear()
        dist.barrier()
        thread, process = time.thread_time(), time.process_time()
        self.attend(q, k, v).backward(grad)  # type: ignore[no-untyped-call]
        thread, process = time.thread_time() - thread, time.process_time() - process
        return {
            "kernel": self.kernel.seconds,
            "around": thread - self.kernel.seconds,
            "gloo": max(process - thread, 0.0),
            "pairs": self.kernel.pairs,
            "calls": self.kernel.calls,
            "sent": sum(event.sent_bytes for event in self.transport.events),
        }

    def error(self) -> float:
        """Largest difference of output and gradients from float64 by an explicit mask, over the largest element."""
        rows = self.tensors(torch.float32)
        mine = with_gradients(self.attend, [each[self.home].clone() for each in rows])
        right = with_gradients(
            lambda q, k, v: masked_attention(q, k, v, whole(self.lengths)), [each.double() for each in rows]
        )
        errors = [
            (ours - all_[self.home]).abs().max() / all_.abs().max() for ours, all_ in zip(mine, right, strict=True)
        ]
        return max(float(each) for each in errors)


def random_rows(rows: int, seed: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    return [torch.randn(rows, count, HEAD_DIM, generator=generator, dtype=dtype) for count in heads]


def dense_seconds(lengths: list[int], seed: int) -> tuple[float, int]:
    """Kernel seconds and work of a packed sequence in one process: one call forward and one backward."""
    kernel = CountedKernel(KERNELS["cpu"](), time.thread_time)
    q, k, v, grad = random_rows(sum(lengths), seed, torch.float32)
    mask: dict[str, Any] = {"causal": True, "scale": HEAD_DIM**-0.5, "window": None}
    out, lse = kernel.forward(q, k, v, whole(lengths), **mask)
    kernel.backward(grad, q, k, v, out, lse, whole(lengths), **mask)
    return kernel.seconds, kernel.pairs


def measure_rank(settings: dict[str, Any]) -> dict[str, Any]:
    """All that one worker measures."""
    step: Step = settings["step"]
    degrees = dict.fromkeys((case.context_parallel, case.pool_size) for case in CASES)
    groups = {
        (cp, pool): new_pool_groups(context_parallel=cp, pool_size=pool, timeout=settings["timeout"])
        for cp, pool in degrees
    }

    def ready(case: Case, step: Step, block_size: int) -> list[MicroStep]:
        own = groups[case.context_parallel, case.pool_size]
        steps = case.micro_steps(step)
        return [MicroStep(case, sequences, at, own, block_size) for at, sequences in enumerate(steps)]

    errors = [max(one.error() for one in ready(case, settings["checked"], 32)) for case in CASES]
    if settings["check_only"]:
        return {"errors": errors}
    work = [ready(case, step, settings["block_size"]) for case in CASES]
    found: list[list[list[dict[str, float]]]] = [[[] for _ in steps] for steps in work]
    dense: list[list[tuple[float, int]]] = []
    for _ in range(settings["turns"]):
        for steps, turns in zip(work, found, strict=True):
            for one, results in zip(steps, turns, strict=True):
                results.append(one.measure())
        # Every worker has its share of the sequences, so that the machine is as busy as in the other cases.
        dist.barrier()
        mine = range(dist.get_rank(), len(step), WORKERS)
        dense.append([dense_seconds(step[at], at) for at in mine])
    least = [[{key: min(turn[key] for turn in turns) for key in turns[0]} for turns in steps] for steps in found]
    return {
        "errors": errors,
        "cases": least,
        "dense": sum(min(turns)[0] for turns in zip(*dense, strict=True)),
        "dense_pairs": sum(pairs for _, pairs in dense[0]),
    }


def run_rank(rank: int, settings: dict[str, Any], results: Any, measure: Measure) -> None:
    """One process: ends with the time limit or with its parent, whatever it is waiting for."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel], timeout=settings["limit"])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    torch.set_num_threads(1)
    timeout = timedelta(seconds=settings["timeout"])
    dist.init_process_group(
        "gloo", init_method=f"file://{settings['store']}", rank=rank, world_size=WORKERS, timeout=timeout
    )
    try:
        results.send(measure(settings))
    finally:
        dist.destroy_process_group()  # without it gloo aborts at exit


def run(settings: dict[str, Any], measure: Measure = measure_rank) -> list[dict[str, Any]]:
    """What each worker measured, by a function of a module; RuntimeError where one fails or does not end in time."""
    context = multiprocessing.get_context("spawn")
    deadline = time.monotonic() + settings["limit"]
    processes, pipes, found = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        settings = settings | {"store": f"{folder}/store"}
        try:
            for rank in range(WORKERS):
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(target=run_rank, args=(rank, settings, sender, measure), daemon=True)
                process.start()
                sender.close()  # so that the end of the process is the end of the pipe
                processes.append(process)
                pipes.append(receiver)
            for rank, pipe in enumerate(pipes):
                if not pipe.poll(max(deadline - time.monotonic(), 0)):
                    raise RuntimeError(f"worker {rank} has not ended within {settings['limit']} s")
                try:
                    found.append(pipe.recv())
                except EOFError:
                    raise RuntimeError(f"worker {rank} has failed; its output says why") from None
            for process in processes:
                process.join(10)
        finally:
            for process in processes:
                process.kill()
                process.join(10)
    return found


def summary(case: Case, ranks: list[list[dict[str, float]]], dense: float) -> dict[str, Any]:
    """Figures of one case from those of every worker and micro-step, `[worker][micro-step]`."""
    steps = list(zip(*ranks, strict=True))

    def ratios(key: str) -> list[float]:
        return [max(one[key] for one in step) / statistics.mean(one[key] for one in step) for step in steps]

    def total(key: str) -> float:
        return sum(one[key] for step in steps for one in step)

    measured, counted = ratios("kernel"), ratios("pairs")
    sent = [one["sent"] for step in steps for one in step]
    workers = [sum(one["kernel"] for one in rank) for rank in ranks]
    return {
        "attention": case.name,
        "context_parallel": case.context_parallel,
        "pool_size": case.pool_size if case.pooled else None,
        "kernel_mean_s": statistics.mean(workers),
        "kernel_max_s": max(workers),
        "straggler_mean": statistics.mean(measured),
        "straggler_worst": max(measured),
        "counted_mean": statistics.mean(counted),
        "counted_worst": max(counted),
        "slowest_s": sum(max(one["kernel"] for one in step) for step in steps),
        "of_dense": total("kernel") / dense,
        "around": total("around") / total("kernel"),
        "gloo": total("gloo") / total("kernel"),
        "calls": total("calls") / len(sent),
        "sent_mean": statistics.mean(sent),
        "sent_most": max(sent),
        "pairs": total("pairs"),
    }


def show(report: dict[str, Any], console: Console) -> None:
    """The report as tables for people."""
    console.print(f"{report['machine']}; {report['about']}")
    console.print(f"largest difference from float64 by a mask: {max(report['errors'].values()):.1e}, relative")
    for workers in dict.fromkeys(row["context_parallel"] for row in report["cases"]):
        rows = [row for row in report["cases"] if row["context_parallel"] == workers]
        table = Table(
            title=f"{WORKERS // workers} replicas of {workers} worker(s): DP={WORKERS // workers}, CP={workers}"
        )
        heads = ("attention", "P", "kernel s, mean", "max", "straggler, mean", "worst", "counted, mean", "worst ")
        for name in (*heads, "slowest, of Ulysses", "work, of dense", "around", "gloo", "MB sent", "most"):
            table.add_column(name, justify="left" if name == "attention" else "right")
        for row in rows:
            table.add_row(
                row["attention"],
                str(row["pool_size"] or ""),
                *(f"{row[key]:.2f}" for key in ("kernel_mean_s", "kernel_max_s")),
                *(f"{row[key]:.3f}" for key in ("straggler_mean", "straggler_worst", "counted_mean", "counted_worst")),
                f"{row['slowest_s'] / rows[0]['slowest_s']:.3f}",
                *(f"{row[key]:.1%}" for key in ("of_dense", "around", "gloo")),
                *(f"{row[key] / 1e6:.1f}" for key in ("sent_mean", "sent_most")),
            )
        console.print(table)


def main() -> None:
    """Check, measure, and print tables or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mix", default="magiattention", help="of document lengths, scaled down to the sequences")
    parser.add_argument("--length", type=int, default=8192, help="rows of a packed sequence")
    parser.add_argument("--global-batch", type=int, default=16, help="packed sequences of the step, a multiple of 4")
    parser.add_argument("--block-size", type=int, help="rows of a block times CP; default: a 16th of a sequence")
    # Of seeds 0 to 9 the one with the most work in Ulysses' slowest replicas: 2.34 of the mean, of all 1.8 to 2.3.
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--limit", type=float, default=1500, help="seconds after which all processes are ended")
    parser.add_argument("--check", action="store_true", help="compare with attention by a mask, and measure nothing")
    parser.add_argument("--dry-run", action="store_true", help="small and fast")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    options = parser.parse_args()
    if options.dry_run:
        options.length, options.global_batch, options.turns = 512, 8, 1
    settings = {
        "step": scaled_step(options.mix, options.length, options.global_batch, options.seed),
        "checked": scaled_step(options.mix, 384, 8, options.seed),
        "block_size": options.block_size or options.length // 16,
        "turns": options.turns,
        "check_only": options.check,
        "limit": options.limit,
        "timeout": min(options.limit, 120.0),
    }
    ranks = run(settings)
    names = [f"{case.name}, CP={case.context_parallel}, P={case.pool_size}" for case in CASES]
    report: dict[str, Any] = {
        "machine": machine(),
        "about": f"{options.global_batch} sequences of {options.length:,} rows, {options.mix} scaled down, seed "
        f"{options.seed}, {HEADS} heads, {KV_HEADS} KV heads of {HEAD_DIM}, float32, best of {options.turns}",
        "errors": {name: max(rank["errors"][at] for rank in ranks) for at, name in enumerate(names)},
        "cases": [],
    }
    if wrong := [f"{name}: {error:.1e}" for name, error in report["errors"].items() if not error < CHECKED]:
        raise SystemExit(f"not what attention by a mask gives, to {CHECKED:g}: {'; '.join(wrong)}")
    if not options.check:
        report["dense_s"] = dense = sum(rank["dense"] for rank in ranks)
        pairs = sum(rank["dense_pairs"] for rank in ranks)
        report["cases"] = [summary(case, [rank["cases"][at] for rank in ranks], dense) for at, case in enumerate(CASES)]
        if wrong := [name for name, row in zip(names, report["cases"], strict=True) if row["pairs"] != pairs]:
            raise SystemExit(f"computed more or fewer query-key pairs than there are: {', '.join(wrong)}")
    if options.json:
        print(json.dumps(report, indent=2))
        return
    show(report, Console(width=200))


if __name__ == "__main__":
    main()
