"""How evenly a training with Libra keeps its processes busy, beside plain data parallelism and Ulysses.

Four processes over gloo, one thread each, train a small transformer on the same long-tailed packed sequences, method
after method, in turns of one run:

    none      4 replicas of 1 process: each computes the attention of whole sequences of its own, as under DDP
    ulysses   2 replicas of 2 processes, heads exchanged within each
    libra     2 replicas of 2 processes, one pool of both: sequences placed by VRSP, tiles by home-first placement
    libra-4   4 replicas of 1 process, one pool of all

    python benchmarks/libra_training.py              # some seven minutes on 2 busy cores
    python benchmarks/libra_training.py --dry-run    # small and fast, to see that all of it works

With four processes on fewer cores wall time measures the sum of all work, however it is spread, so step times and
tokens/s cannot show balance there. What does is CPU time that each process spends inside attention kernels, by the
strategy's own facts (`MicroBatchFacts.kernel`): of each micro-step and process the least of all turns. The straggler
ratio of a micro-step is the slowest process's over the mean of all. "predicted" is the simulator's slowest process,
with kernel rates measured in the same processes before, and exchanges that cost nothing. The wait for plans is wall
time, all micro-steps but the first of a turn, whose plan nothing can be ahead of.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import time
import warnings
from dataclasses import dataclass
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.distributed as dist
from attention_measures import Step, machine, scaled_step, visible_pairs, whole
from libra_attention import random_rows, run
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from typing_extensions import override

from odb_libra_lightning import PackedDataModule
from odb_libra_lightning.libra import core_attention
from odb_libra_lightning.libra.attention_costs import AttentionShape
from odb_libra_lightning.libra.calibration import Calibration
from odb_libra_lightning.libra.kernels import KERNELS
from odb_libra_lightning.libra.simulation_results import Grid, Method, SimulatedRun
from odb_libra_lightning.libra.simulator import simulate
from odb_libra_lightning.strategies import LibraStrategy

WORKERS, HEADS, KV_HEADS, HEAD_DIM, LAYERS, WIDTH, VOCABULARY = 4, 8, 2, 64, 2, 64, 256
HEAD_SHARDS, CHUNKS = 2, 4
ALONE: dict[str, Any] = {"pool_size": 1, "sequence_placement": "sequential", "refine": False}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to train.

    Attributes:
        simulated: what the simulator calls it.
        context_parallel: processes of a replica, `CP`.
        pool_size: replicas of a pool, `P`.
        options: further options of the strategy.
    """

    simulated: Method
    context_parallel: int
    pool_size: int
    options: dict[str, Any]

    @property
    def replicas(self) -> int:
        """Packed sequences of a micro-step, `DP`."""
        return WORKERS // self.context_parallel


CASES = {
    # A replica of one process attends as `core_attention` does under plain DDP: one kernel call on whole sequences.
    "none": Case(simulated="ulysses", context_parallel=1, pool_size=1, options=ALONE),
    "ulysses": Case(simulated="ulysses", context_parallel=2, pool_size=1, options=ALONE | {"attention": "ulysses"}),
    "libra": Case(simulated="libra", context_parallel=2, pool_size=2, options={"pool_size": 2}),
    "libra-4": Case(simulated="libra", context_parallel=1, pool_size=4, options={"pool_size": 4}),
}


class Decoder(L.LightningModule):
    """A small transformer whose attention is `core_attention`'s."""

    def __init__(self, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, WIDTH)
        inner = (HEADS + 2 * KV_HEADS) * HEAD_DIM
        self.projections = nn.ModuleList(nn.Linear(WIDTH, inner) for _ in range(LAYERS))
        self.outputs = nn.ModuleList(nn.Linear(HEADS * HEAD_DIM, WIDTH) for _ in range(LAYERS))

    @override
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        x = self.embedding(batch["input_ids"])
        for projection, output in zip(self.projections, self.outputs, strict=True):
            heads = projection(x).unflatten(-1, (-1, HEAD_DIM))
            q, k, v = heads.split((HEADS, KV_HEADS, KV_HEADS), dim=2)
            x = x + output(core_attention(q, k, v, position_ids=batch["position_ids"]).flatten(2))
        logits = x @ self.embedding.weight.T
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Recorder(L.Callback):
    """Wall seconds of each micro-step, and the strategy's facts about it."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.facts: list[dict[str, float]] = []

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        dist.barrier()
        self._since = time.perf_counter()

    @override
    def on_train_batch_end(self, *_: Any) -> None:
        now = time.perf_counter()
        self.seconds.append(now - self._since)
        self._since = now

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(trainer.strategy, LibraStrategy)
        assert trainer.strategy.session is not None
        self.facts = [
            {"kernel": one.kernel.seconds(), "waited": one.waited_s, "planning": one.planning_s}
            for one in trainer.strategy.session.facts
        ]


def train(case: Case, settings: dict[str, Any]) -> dict[str, Any]:
    """Train one method once, and say what was recorded of each micro-step."""
    torch.manual_seed(0)
    step: Step = settings["step"]
    rng = np.random.default_rng(0)
    documents = [rng.integers(VOCABULARY, size=length) for sequence in step for length in sequence]
    recorder = Recorder()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=WORKERS,
        strategy=LibraStrategy(
            context_parallel=case.context_parallel,
            block_size=settings["block_size"],
            head_shards=HEAD_SHARDS,
            chunks=CHUNKS,
            **case.options,
        ),
        max_epochs=1,
        accumulate_grad_batches=settings["global_batch"] // case.replicas,
        callbacks=[recorder],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    # End to end, these documents fill the same sequences again.
    data = PackedDataModule(documents, settings["length"], packing="sequential", shuffle=False, num_workers=0)
    trainer.fit(Decoder(), datamodule=data)
    return {"seconds": recorder.seconds, "facts": recorder.facts}


def kernel_rates(length: int) -> dict[str, Any]:
    """FLOP/s of the kernel by rows of a segment and heads, and the ratio of backward to forward, by CPU time."""
    kernel = KERNELS["cpu"]()
    rates, ratios = [], []
    rows_axis = [rows for rows in (64, 256, 1024, 4096, 16384) if rows <= length]
    mask: dict[str, Any] = {"causal": True, "scale": HEAD_DIM**-0.5, "window": None}
    for rows in rows_axis:
        segments = whole([rows] * (min(length, 4096) // rows or 1))
        q, k, v, grad = random_rows(segments.query_starts[-1], 0, torch.float32)
        row = []
        for heads in (1, HEADS):
            # So many query heads read one KV head in a plan, and all of them theirs otherwise.
            kv = k[:, : max(heads * KV_HEADS // HEADS, 1)].contiguous(), v[:, : max(heads * KV_HEADS // HEADS, 1)]
            own = [q[:, :heads].contiguous(), kv[0], kv[1].contiguous()]
            times = []
            for _ in range(3):
                begin = time.thread_time()
                out, lse = kernel.forward(*own, segments, **mask)
                between = time.thread_time()
                kernel.backward(grad[:, :heads].contiguous(), *own, out, lse, segments, **mask)
                times.append((between - begin, time.thread_time() - between))
            forward, backward = (min(each) for each in zip(*times, strict=True))
            row.append(4 * HEAD_DIM * heads * visible_pairs(segments, causal=True, window=None) / forward)
            ratios.append(backward / forward)
        rates.append(row)
    return {"rows": rows_axis, "rates": rates, "backward_ratio": statistics.median(ratios)}


def calibration_of(ranks: list[dict[str, Any]]) -> Calibration:
    """What the simulator knows of this machine: the median process's kernel rates, and exchanges without a price."""
    rates = np.median([rank["kernel_rates"]["rates"] for rank in ranks], axis=0)
    first = ranks[0]["kernel_rates"]
    return Calibration(
        source="measured in this run; exchanges cost nothing",
        peak_flops=float(rates.max()),
        efficiency_rows=tuple(first["rows"]),
        efficiency_heads=(1, HEADS),
        efficiency=tuple(tuple(float(rate / rates.max()) for rate in row) for row in rates),
        backward_ratio=statistics.median(rank["kernel_rates"]["backward_ratio"] for rank in ranks),
        launch_seconds=0.0,
        workers_per_node=WORKERS,
        intra_node_alpha=0.0,
        intra_node_beta=1e30,
        inter_node_alpha=0.0,
        inter_node_beta=1e30,
    )


def predict(case: Case, settings: dict[str, Any], calibration: Calibration) -> tuple[float, float]:
    """Kernel seconds of the slowest process of a micro-step by the simulator, mean and worst, all layers."""
    grid = Grid(
        pool_sizes=(case.pool_size,),
        head_shards=(HEAD_SHARDS,),
        block_sizes=(settings["block_size"],),
        chunks=(CHUNKS,),
    )
    shape = AttentionShape(
        context_parallel=case.context_parallel,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        bytes_per_element=4,
    )
    found = simulate(
        [length for sequence in settings["step"] for length in sequence],
        run=SimulatedRun(
            sequence_length=settings["length"],
            global_batch=settings["global_batch"],
            data_parallel=case.replicas,
            shape=shape,
        ),
        grid=grid,
        methods=(case.simulated,),
        steps=settings["steps"],
        calibration=calibration,
        seed=None,
    ).figures[0]
    return LAYERS * found.mean_latency, LAYERS * found.worst_latency


def as_launched() -> None:
    """Say to Lightning what a launcher says. The process group is there already."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "benchmark"}
    os.environ |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def measure_rank(settings: dict[str, Any]) -> dict[str, Any]:
    """All that one process measures: kernel rates, then all methods in turns."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    as_launched()
    rates = kernel_rates(settings["length"])
    turns = [{name: train(case, settings) for name, case in CASES.items()} for _ in range(settings["turns"])]
    return {"kernel_rates": rates, "turns": turns}


def summary(
    name: str, ranks: list[dict[str, Any]], settings: dict[str, Any], calibration: Calibration
) -> dict[str, Any]:
    """Figures of one method."""
    case = CASES[name]
    by_rank = [[turn[name] for turn in rank["turns"]] for rank in ranks]
    # [rank][micro-step]
    kernel = [
        [min(each) for each in zip(*([one["kernel"] for one in turn["facts"]] for turn in turns), strict=True)]
        for turns in by_rank
    ]
    slowest = [max(each) for each in zip(*kernel, strict=True)]
    ratios = [max(each) / statistics.mean(each) for each in zip(*kernel, strict=True)]
    accumulation = settings["global_batch"] // case.replicas
    steps = [
        sum(turn["seconds"][at : at + accumulation])
        for turn in by_rank[0]
        for at in range(0, len(turn["seconds"]), accumulation)
    ]
    later = [(turn["facts"][1:], turn["seconds"][1:]) for turns in by_rank for turn in turns]
    waited = sum(one["waited"] for facts, _ in later for one in facts)
    predicted_mean, predicted_worst = predict(case, settings, calibration)
    per_rank = [sum(steps_of) for steps_of in kernel]
    return {
        "method": name,
        "data_parallel": case.replicas,
        "context_parallel": case.context_parallel,
        "pool_size": case.pool_size,
        "step_s_mean": statistics.mean(steps),
        "step_s_worst": max(steps),
        "tokens_per_s": settings["global_batch"] * settings["length"] / statistics.mean(steps),
        "kernel_s_per_process": per_rank,
        "straggler_mean": statistics.mean(ratios),
        "straggler_worst": max(ratios),
        "slowest_s_mean": statistics.mean(slowest),
        "slowest_s_worst": max(slowest),
        "slowest_s_total": sum(slowest),
        "predicted_s_mean": predicted_mean,
        "predicted_s_worst": predicted_worst,
        "plan_wait_share": waited / sum(sum(seconds) for _, seconds in later),
        "planning_ms": 1000 * statistics.median(one["planning"] for facts, _ in later for one in facts),
    }


def show(report: dict[str, Any], console: Console) -> None:
    """The report as a table for people."""
    console.print(f"{report['machine']}; {report['about']}")
    table = Table()
    heads = ("method", "DP", "CP", "P", "step s, mean", "worst", "tokens/s", "kernel s a process: mean", "most")
    for column in (
        *heads,
        "straggler, mean",
        "worst",
        "slowest s, mean",
        "predicted",
        "worst",
        "predicted",
        "plan wait",
    ):
        table.add_column(column, justify="left" if column == "method" else "right")
    for row in report["methods"]:
        kernel = row["kernel_s_per_process"]
        table.add_row(
            row["method"],
            *(str(row[key]) for key in ("data_parallel", "context_parallel", "pool_size")),
            *(f"{row[key]:.2f}" for key in ("step_s_mean", "step_s_worst")),
            f"{row['tokens_per_s']:,.0f}",
            *(f"{value:.2f}" for value in (statistics.mean(kernel), max(kernel))),
            *(f"{row[key]:.2f}" for key in ("straggler_mean", "straggler_worst")),
            *(f"{row[f'{kind}_s_{key}']:.3f}" for key in ("mean", "worst") for kind in ("slowest", "predicted")),
            f"{row['plan_wait_share']:.2%}",
        )
    console.print(table)
    console.print(f"Kernel rate at its best: {report['peak_flops'] / 1e9:.1f} GFLOP/s of a process, by CPU time.")


def main() -> None:
    """Train, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mix", default="magiattention", help="of document lengths, scaled down to the sequences")
    parser.add_argument("--length", type=int, default=8192, help="tokens of a packed sequence")
    parser.add_argument("--global-batch", type=int, default=8, help="packed sequences of a step, a multiple of 4")
    parser.add_argument("--steps", type=int, default=2, help="optimizer steps of a turn")
    parser.add_argument("--block-size", type=int, help="rows of a block; default: a 16th of a sequence")
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--limit", type=float, default=1500, help="seconds after which all processes are ended")
    parser.add_argument("--dry-run", action="store_true", help="small and fast")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args()
    if options.dry_run:
        options.length, options.global_batch, options.steps, options.turns = 256, 4, 2, 1
    settings = {
        "step": scaled_step(options.mix, options.length, options.global_batch * options.steps, options.seed),
        "length": options.length,
        "global_batch": options.global_batch,
        "steps": options.steps,
        "block_size": options.block_size or options.length // 16,
        "turns": options.turns,
        "limit": options.limit,
        "timeout": min(options.limit, 300.0),
    }
    ranks = run(settings, measure_rank)
    calibration = calibration_of(ranks)
    report = {
        "machine": machine(),
        "about": f"{options.steps} steps of {options.global_batch} sequences of {options.length:,} tokens, "
        f"{options.mix} scaled down, seed {options.seed}, {LAYERS} layers of {HEADS} heads, {KV_HEADS} KV heads of "
        f"{HEAD_DIM}, float32, {options.turns} turns, {WORKERS} processes",
        "peak_flops": calibration.peak_flops,
        "methods": [summary(name, ranks, settings, calibration) for name in CASES],
    }
    if options.json:
        print(json.dumps(report, indent=2))
        return
    show(report, Console(width=200))


if __name__ == "__main__":
    main()
