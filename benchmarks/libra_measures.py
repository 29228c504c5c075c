"""What the benchmark of Libra's planning measures: placement of sequences, planning time, exchange."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, get_args

import numpy as np
from libra_windows import PLAIN, Corpus, Extent

from odb_libra_lightning.libra.attention_costs import pool_cost, pool_kernel_seconds, ulysses_cost
from odb_libra_lightning.libra.calibration import DEFAULT_CALIBRATION
from odb_libra_lightning.libra.exchange_bound import busiest_floor
from odb_libra_lightning.libra.load import attention_load, expected_imbalance, imbalance_floor, pool_imbalance
from odb_libra_lightning.libra.pool_plan import Phase, PoolPlan, layout_plan
from odb_libra_lightning.libra.sequence_placement import PLACEMENTS, place_sequences

Result = TypeVar("Result")

PREFIX, SHARED, HOME_ROWS, SPLIT, HOME_FIRST = (
    {"fetch": "prefix"},
    {"share_kv_heads": True},
    {"skip_home_rows": True},
    {"split_oversize": True},
    {"placement": "home_first"},
)
ALL = PREFIX | SHARED | HOME_ROWS | SPLIT | HOME_FIRST
VARIANTS: dict[str, dict[str, Any]] = {
    "Algorithm 2 to the letter": {},
    "+ prefix": PREFIX,
    "+ share_kv_heads": SHARED,
    "+ skip_home_rows": HOME_ROWS,
    "+ split_oversize": SPLIT,
    "+ home_first": HOME_FIRST,
    "+ home_first, prefix": HOME_FIRST | PREFIX,
    "all (default)": ALL,
    "all but prefix": ALL | {"fetch": "document"},
    "all but share_kv_heads": ALL | {"share_kv_heads": False},
    "all but skip_home_rows": ALL | {"skip_home_rows": False},
    "all but split_oversize": ALL | {"split_oversize": False},
    "all but home_first": ALL | {"placement": "paper"},
    "all, 1 chunk for 4": ALL | {"chunks": 1},
}


@dataclass(frozen=True, kw_only=True)
class PlacementFigures:
    """One rule for placing sequences, over steps. Imbalance is `R - 1` of pools of 8.

    Attributes:
        corpus: in words.
        global_batch: packed sequences of a step.
        method: the rule, or the bound.
        mean: imbalance, mean over the steps.
        worst: the largest.
        above_floor: by how much it exceeds the highest floor known for its step, at most; None for bounds.
        milliseconds: time, median over the steps; None for bounds.
        slowest: the longest.
    """

    corpus: str
    global_batch: int
    method: str
    mean: float
    worst: float
    above_floor: float | None = None
    milliseconds: float | None = None
    slowest: float | None = None


@dataclass(frozen=True, kw_only=True)
class TimeFigures:
    """Planning time of one size of pool; times in ms.

    Attributes:
        corpus: in words.
        pool_size: replicas of a pool, `P`.
        workers: of a pool, `W`.
        plans: pools that were planned.
        tiles: of a plan, mean.
        median: of a plan.
        worst: the longest.
        splits: what a worker needs after it for one step: the split sizes of all phases and chunks; median.
        plain: median of the same pools by the paper's Algorithm 2.
        ratio: median of the plan over that.
    """

    corpus: str
    pool_size: int
    workers: int
    plans: int
    tiles: float
    median: float
    worst: float
    splits: float
    plain: float
    ratio: float


@dataclass(frozen=True, kw_only=True)
class ExchangeFigures:
    """What one variant of the plan balances and moves in forward, over pools of 8 replicas; a mean if not said.

    Attributes:
        corpus: in words, with the number of head shards.
        variant: in words.
        imbalance: heaviest worker over the mean, minus 1.
        worst_imbalance: the largest.
        moved: share of tiles that are not computed at home; None without tiles.
        total: bytes that all workers send.
        busiest: bytes that the busiest worker sends or receives, the larger of the two.
        worst_busiest: the largest.
        floor: what the busiest worker must move at the least under any placement as even.
        total_ratio: total over that of Algorithm 2 to the letter.
        busiest_ratio: the same of the busiest worker.
        kernel_imbalance: imbalance of the workers' predicted kernel seconds instead of their work.
        latency: predicted seconds of a layer, forward and backward, of the pool.
        milliseconds: time of a plan, median.
    """

    corpus: str
    variant: str
    imbalance: float
    worst_imbalance: float
    moved: float | None
    total: float
    busiest: float
    worst_busiest: float
    floor: float | None
    total_ratio: float
    busiest_ratio: float
    kernel_imbalance: float | None
    latency: float
    milliseconds: float | None


def timed(call: Callable[[], Result], repeats: int = 3) -> tuple[Result, float]:
    """What a call gives, and its shortest process time in ms."""
    times = []
    for _ in range(repeats):
        begin = time.process_time()
        result = call()
        times.append(1000 * (time.process_time() - begin))
    return result, min(times)


def placements(extent: Extent) -> Iterator[PlacementFigures]:
    """All rules on all corpora."""
    rules = [*((name, False) for name in PLACEMENTS), ("vrsp", True)]
    pool_size = 8
    for corpus in extent.corpora:
        for size in extent.batches:
            loads = [[attention_load(one) for one in corpus.step(size, seed)] for seed in range(extent.seeds)]
            named: dict[str, Any] = {"corpus": f"{corpus.mix}, {corpus.sequence_length:,}", "global_batch": size}
            floors = [imbalance_floor(one, pool_size, outliers=size) for one in loads]
            bounds = {
                "E[R]-1, equation 4": [expected_imbalance(one, pool_size) for one in loads],
                "floor, 1 outlier": [imbalance_floor(one, pool_size) for one in loads],
                "floor, all outliers": floors,
            }
            for name, refine in rules:
                found, times = [], []
                for seed, one in enumerate(loads):
                    pools, spent = timed(
                        partial(place_sequences, one, pool_size, method=name, refine=refine, seed=seed)
                    )
                    found.append(pool_imbalance(one, pools))
                    times.append(spent)
                yield PlacementFigures(
                    **named,
                    method=name + " + refine" * refine,
                    mean=statistics.mean(found),
                    worst=max(found),
                    above_floor=max(value - floor for value, floor in zip(found, floors, strict=True)),
                    milliseconds=statistics.median(times),
                    slowest=max(times),
                )
            for name, values in bounds.items():
                yield PlacementFigures(**named, method=name, mean=statistics.mean(values), worst=max(values))


def planning_times(extent: Extent) -> Iterator[TimeFigures]:
    """Whole plans of growing pools."""
    for corpus, sizes in extent.growth:
        for pool_size in sizes:
            ours, theirs, splits, tiles = [], [], [], []
            for seed in range(extent.plan_seeds):
                for pool in corpus.pools(pool_size, max(extent.batches[0], pool_size), seed):
                    plan, spent = timed(partial(layout_plan, pool, corpus.layout()))
                    ours.append(spent)
                    tiles.append(len(plan.tile_worker))
                    splits.append(timed(partial(all_splits, plan), 1)[1])
                    theirs.append(timed(partial(layout_plan, pool, corpus.layout(**PLAIN)))[1])
            yield TimeFigures(
                corpus=str(corpus),
                pool_size=pool_size,
                workers=pool_size * corpus.context_parallel,
                plans=len(ours),
                tiles=statistics.mean(tiles),
                median=statistics.median(ours),
                worst=max(ours),
                splits=statistics.median(splits),
                plain=statistics.median(theirs),
                ratio=statistics.median(ours) / statistics.median(theirs),
            )


def all_splits(plan: PoolPlan) -> None:
    """Split sizes of every collective of one worker."""
    for phase in get_args(Phase):
        for chunk in range(plan.layout.chunks):
            plan.split_sizes(0, phase, chunk)


def exchanges(extent: Extent) -> Iterator[ExchangeFigures]:
    """All variants on all corpora, the first one with more head shards than KV heads too."""
    cases = [(corpus, 4) for corpus in (*extent.corpora, *extent.more_corpora)] + [(extent.corpora[0], 8)]
    for corpus, shards in cases:
        seeds = range(extent.plan_seeds)
        pools = [pool for seed in seeds for pool in corpus.pools(8, extent.batches[0], seed)]
        named: dict[str, Any] = {"corpus": f"{corpus}, H={shards}"}
        base_total = base_busiest = 0.0
        for variant, options in VARIANTS.items():
            layout = corpus.layout(head_shards=shards, **(dict(PLAIN) | options))
            plans, times = [], []
            for pool in pools:
                plan, spent = timed(partial(layout_plan, pool, layout), 1)
                plans.append(plan)
                times.append(spent)
            total = statistics.mean(plan.bytes_moved for plan in plans)
            busiest = statistics.mean(plan.busiest_bytes for plan in plans)
            base_total, base_busiest = base_total or total, base_busiest or busiest
            yield ExchangeFigures(
                **named,
                variant=variant,
                imbalance=statistics.mean(plan.imbalance for plan in plans),
                worst_imbalance=max(plan.imbalance for plan in plans),
                moved=statistics.mean(moved_share(plan) for plan in plans),
                total=total,
                busiest=busiest,
                worst_busiest=max(plan.busiest_bytes for plan in plans),
                floor=statistics.mean(busiest_floor(plan) for plan in plans),
                total_ratio=total / base_total,
                busiest_ratio=busiest / base_busiest,
                kernel_imbalance=statistics.mean(kernel_imbalance(plan) for plan in plans),
                latency=statistics.mean(
                    pool_cost(plan, chunks=layout.chunks, first_worker=0, calibration=DEFAULT_CALIBRATION).seconds
                    for plan in plans
                ),
                milliseconds=statistics.median(times),
            )
        for variant, bytes_of in (("Ulysses", repeated_bytes), ("Ulysses, each KV head once", single_bytes)):
            total, busiest = bytes_of(corpus)
            yield ExchangeFigures(
                **named,
                variant=variant,
                # Between replicas, since Ulysses is even within each.
                imbalance=statistics.mean(replica_imbalance(pool) for pool in pools),
                worst_imbalance=max(replica_imbalance(pool) for pool in pools),
                moved=None,
                total=8 * total,
                busiest=busiest,
                worst_busiest=busiest,
                floor=None,
                total_ratio=8 * total / base_total,
                busiest_ratio=busiest / base_busiest,
                kernel_imbalance=None,
                latency=statistics.mean(max(ulysses_seconds(one, corpus) for one in pool) for pool in pools),
                milliseconds=None,
            )


def moved_share(plan: PoolPlan) -> float:
    """Share of the tiles with work that are not computed at home."""
    at_home = np.repeat(plan.tiles.block_home, plan.layout.head_shards)
    work = plan.tile_flops > 0
    return float((plan.tile_worker != at_home)[work].mean())


def replica_imbalance(pool: list[list[int]]) -> float:
    """Imbalance of replicas that compute their own sequences."""
    loads = [attention_load(one) for one in pool]
    return pool_imbalance(loads, [[at] for at in range(len(loads))])


def kernel_imbalance(plan: PoolPlan) -> float:
    """Longest predicted kernel time of a worker over the mean, minus 1."""
    seconds = pool_kernel_seconds(plan, DEFAULT_CALIBRATION)
    return float(seconds.max() / seconds.mean() - 1)


def ulysses_seconds(document_lengths: list[int], corpus: Corpus) -> float:
    """Predicted seconds of a layer on one replica, forward and backward."""
    rows, shape = corpus.sequence_length, corpus.shape
    return ulysses_cost(document_lengths, rows, shape, first_worker=0, calibration=DEFAULT_CALIBRATION).seconds


def repeated_bytes(corpus: Corpus) -> tuple[float, float]:
    """Ulysses' bytes of a replica and of its busiest worker; a KV head goes to every worker that reads it."""
    cost = ulysses_cost([], corpus.sequence_length, corpus.shape, first_worker=0, calibration=DEFAULT_CALIBRATION)
    return cost.bytes_moved, cost.busiest_bytes


def single_bytes(corpus: Corpus) -> tuple[float, float]:
    """The same if every KV head went to one worker alone: fewer bytes than it can do with where `h_kv < CP`."""
    shape = corpus.shape
    rows = corpus.sequence_length * (shape.context_parallel - 1) / shape.context_parallel
    total = rows * (2 * shape.num_heads + 2 * shape.num_kv_heads) * shape.row_bytes
    return total, total / shape.context_parallel
