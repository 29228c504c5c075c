"""Replay of placement, plans and latencies over the optimizer steps of a corpus, for every configuration of a grid.

It says before a run which pool size, head shards, block size and chunks suit a corpus and a cluster. Source: Libra
(arXiv:2607.23250), section 7, whose simulator reports the two imbalances and the communication; the predicted latency,
and a choice by it, go further.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from odb_libra_lightning.libra.attention_costs import (
    AttentionCost,
    check_ulysses,
    pool_cost,
    ring_cost,
    ulysses_cost,
)
from odb_libra_lightning.libra.calibration import DEFAULT_CALIBRATION, Calibration
from odb_libra_lightning.libra.layout import PoolLayout, check_degrees
from odb_libra_lightning.libra.load import attention_load, pool_imbalance
from odb_libra_lightning.libra.packing import pack_best_fit, pack_sequential
from odb_libra_lightning.libra.pool_plan import layout_plan
from odb_libra_lightning.libra.sequence_placement import place_sequences
from odb_libra_lightning.libra.simulation_results import (
    METHODS,
    Grid,
    GridPoint,
    Method,
    MethodFigures,
    SimulatedRun,
    Simulation,
)
from odb_libra_lightning.libra.whole_numbers import LARGEST_SETTING, checked_count
from odb_libra_lightning.libra.wlb import wlb_step

Packing = Literal["sequential", "best_fit"]
Progress = Callable[[int, int], None]
Step = list[list[int]]  # document lengths of each micro-batch of an optimizer step, GA-major

_PLACED: tuple[Method, ...] = ("tap_vrsp", "libra")  # the others take sequences in the order of the sampler
_MOST_BYTES = 2**62  # that a pool may send: sums stay within int64
_MOST_WORKERS = 1024  # of a pool of distca: a plan works with tables of workers squared
_WLB_ROOM = 2  # packed lengths that a micro-batch of wlb may hold


def simulate(
    document_lengths: Sequence[int] | NDArray[np.integer],
    *,
    run: SimulatedRun,
    grid: Grid,
    methods: Sequence[Method] = METHODS,
    steps: int = 4,
    packing: Packing = "sequential",
    calibration: Calibration = DEFAULT_CALIBRATION,
    seed: int | None = 0,
    progress: Progress | None = None,
) -> Simulation:
    """Simulate methods on the packed sequences of a corpus.

    Methods: `ulysses`; `ulysses_sorted`, the sequences of each step ordered by load, so that a micro-step holds those
    of like load; `ring`; `wlb`, the documents of each step packed anew by WLB-LLM's rule without deferral, in
    micro-batches of up to twice the packed length, then Ulysses; `distca`, one pool of all replicas in the order of
    the sampler, overlapped; `tap`, pools in that order, not overlapped; `tap_vrsp`, sequences placed by VRSP and its
    refinement; `libra`, overlapped as well.

    Args:
        document_lengths: tokens, each at least 1.
        run: degrees and the layer.
        grid: configurations.
        methods: which to simulate.
        steps: optimizer steps to replay, at least 1; fewer where the documents do not suffice.
        packing: `sequential` cuts a document where a packed sequence is full; `best_fit` packs documents whole.
        calibration: of the cluster.
        seed: of the order of documents (and of sequences after `best_fit`); None: as they come.
        progress: called with the number of plans made and to be made.

    Raises:
        ValueError: degrees, documents or a grid that do not fit, before anything is planned.

    Complexity: O(steps * GBS / P) plans for each `(P, H, B)`; different chunks share a plan.
    """
    check_simulation(run, grid, methods)
    packed = pack_steps(document_lengths, run, steps=steps, packing=packing, seed=seed)
    alone: tuple[Method, ...] = ("ulysses", "ulysses_sorted", "ring", "wlb")
    figures = [_replica_figures(method, packed, run, calibration) for method in alone if method in methods]
    notes = []
    scopes: dict[tuple[int, tuple[Method, ...]], None] = {}
    if "distca" in methods and not _plans_distca(run, methods):
        notes.append(
            f"distca is left out: its one pool would have {run.num_workers} workers, and the simulator plans pools of "
            f"at most {_MOST_WORKERS}."
        )
    elif "distca" in methods:
        scopes[run.data_parallel, ("distca",)] = None
    if pooled := tuple(method for method in methods if method in ("tap", "tap_vrsp", "libra")):
        scopes.update(dict.fromkeys((size, pooled) for size in grid.pool_sizes))
    cuts = list(dict.fromkeys(itertools.product(grid.head_shards, grid.block_sizes)))
    total = sum(
        len(cuts) * len(packed) * (run.global_batch // size) * len({method in _PLACED for method in names})
        for size, names in scopes
    )
    made = itertools.count(1)

    def planned() -> None:
        if progress is not None:
            progress(next(made), total)

    for (size, names), (shards, block) in itertools.product(scopes, cuts):
        points = [
            (method, GridPoint(pool_size=size, head_shards=shards, block_size=block, chunks=chunks))
            for method in names
            for chunks in (dict.fromkeys(grid.chunks) if method in ("libra", "distca") else (1,))
        ]
        figures += _pool_figures(points, packed, run, calibration, planned)
    return Simulation(
        run=run,
        steps=len(packed),
        documents=sum(len(documents) for step in packed for documents in step),
        figures=tuple(figures),
        notes=tuple(notes),
    )


def check_simulation(run: SimulatedRun, grid: Grid, methods: Sequence[Method] = METHODS) -> None:
    """Check a run, every grid point and the methods against each other, before any data is read.

    Of the grid only what the methods look at is checked: pool sizes for `tap`, `tap_vrsp` and `libra`, chunks for
    `libra` and `distca`, head shards and blocks for all four.

    Raises:
        ValueError: a number that does not fit; the sentence says which would.
    """
    for method in methods:
        if method not in METHODS:
            raise ValueError(f"no method is called {method!r}: there are {', '.join(METHODS)}")
    _layout(run, head_shards=1, block_size=1, chunks=1)
    _check_degrees(run, pool_size=1, block_size=1)
    if {"ulysses", "ulysses_sorted", "wlb"} & set(methods):
        check_ulysses(run.shape)
    pooled, sliced = {"tap", "tap_vrsp", "libra"} & set(methods), {"distca", "libra"} & set(methods)
    for name, needed in (
        ("pool_sizes", pooled),
        ("head_shards", pooled | sliced),
        ("block_sizes", pooled | sliced),
        ("chunks", sliced),
    ):
        if needed and not getattr(grid, name):
            raise ValueError(f"{name}: expected at least one number, for {', '.join(sorted(needed))}")
    sizes = [*(grid.pool_sizes if pooled else ()), *([run.data_parallel] if _plans_distca(run, methods) else ())]
    for size, block in itertools.product(sizes, grid.block_sizes):
        _check_degrees(run, pool_size=size, block_size=block)
    if pooled | sliced:
        chunks = grid.chunks if sliced else (1,)
        for shards, block, slices in itertools.product(grid.head_shards, grid.block_sizes, chunks):
            _layout(run, head_shards=shards, block_size=block, chunks=slices)
    _check_bytes(run, max(sizes, default=1))


def _plans_distca(run: SimulatedRun, methods: Sequence[Method]) -> bool:
    return "distca" in methods and run.num_workers <= _MOST_WORKERS


def _check_degrees(run: SimulatedRun, *, pool_size: int, block_size: int) -> None:
    check_degrees(
        sequence_length=run.sequence_length,
        global_batch=run.global_batch,
        data_parallel=run.data_parallel,
        pool_size=pool_size,
        context_parallel=run.shape.context_parallel,
        block_size=block_size,
    )


def _check_bytes(run: SimulatedRun, pool_size: int) -> None:
    """Refuse what int64 could not count: all rows of a pool, and their keys once to every worker, there and back."""
    shape = run.shape
    heads = 4 * shape.num_heads + 4 * shape.num_kv_heads * pool_size * shape.context_parallel
    most = pool_size * run.sequence_length * heads * shape.head_dim * max(shape.bytes_per_element, 4)
    if most > _MOST_BYTES:
        raise ValueError(
            f"a pool of {pool_size} sequences of sequence_length={run.sequence_length} with num_heads="
            f"{shape.num_heads}, head_dim={shape.head_dim}, bytes_per_element={shape.bytes_per_element} and "
            f"context_parallel={shape.context_parallel} could move {most:.1e} bytes, above 2**62: make some of them "
            "smaller"
        )


def pack_steps(
    document_lengths: Sequence[int] | NDArray[np.integer],
    run: SimulatedRun,
    *,
    steps: int,
    packing: Packing,
    seed: int | None,
) -> list[Step]:
    """The document lengths of each packed sequence of each optimizer step, in the order of the sampler.

    Raises:
        ValueError: documents that do not fill a single step, or lengths or settings that are none.
    """
    checked_count("steps", steps)
    if seed is not None and (not isinstance(seed, int) or seed < 0):
        raise ValueError(f"seed={seed!r}: expected a whole number of at least 0, or None for no shuffling")
    if packing not in get_args(Packing):
        raise ValueError(f"packing={packing!r}: choose one of {', '.join(get_args(Packing))}")
    lengths = np.asarray(document_lengths)
    rng = None if seed is None else np.random.default_rng(seed)
    if rng is not None and lengths.ndim == 1:
        lengths = rng.permutation(lengths)
    size = run.global_batch
    if packing == "sequential":
        most = min(steps * size, LARGEST_SETTING)
        sequences = pack_sequential(lengths, run.sequence_length, drop_last=True, most=most).all_document_lengths()
    else:
        sequences = pack_best_fit(lengths, run.sequence_length).all_document_lengths()
        if rng is not None:  # they come with the longest documents first
            sequences = [sequences[i] for i in rng.permutation(len(sequences))]
    enough_for = min(steps, len(sequences) // size)
    if not enough_for:
        raise ValueError(
            f"the {len(lengths)} documents fill {len(sequences)} packed sequences of {run.sequence_length} tokens, "
            f"fewer than the global_batch={size} of one optimizer step: give more documents, or a smaller batch or "
            "sequence length"
        )
    return [sequences[at * size : (at + 1) * size] for at in range(enough_for)]


@dataclass(frozen=True, kw_only=True)
class _Group:
    """One pool, or replica, in one micro-step."""

    micro_step: int
    cost: AttentionCost
    imbalance: float = 0.0


def _replica_figures(method: Method, steps: list[Step], run: SimulatedRun, calibration: Calibration) -> MethodFigures:
    """A method that shares work within each replica only, and there evenly."""
    price = ring_cost if method == "ring" else ulysses_cost
    groups, inter = [], []
    for number, step in enumerate(steps):
        if method == "ulysses_sorted":
            loads = _loads(step, run)
            step = [step[at] for at in sorted(range(len(step)), key=lambda at: -loads[at])]
        elif method == "wlb":
            lengths = list(itertools.chain.from_iterable(step))
            room = _WLB_ROOM * run.sequence_length
            step = wlb_step(lengths, micro_batches=run.global_batch, max_tokens=room).document_lengths()
        for at, documents in enumerate(step):
            micro_step, replica = divmod(at, run.data_parallel)
            cost = price(
                documents,
                sum(documents) if method == "wlb" else run.sequence_length,
                run.shape,
                first_worker=replica * run.shape.context_parallel,
                calibration=calibration,
            )
            groups.append(_Group(micro_step=number * run.accumulation + micro_step, cost=cost))
        inter.append(pool_imbalance(_loads(step, run), [[at] for at in range(len(step))]))
    return _figures(method, None, groups, inter)


def _pool_figures(
    points: Sequence[tuple[Method, GridPoint]],
    steps: list[Step],
    run: SimulatedRun,
    calibration: Calibration,
    planned: Callable[[], None],
) -> list[MethodFigures]:
    """Methods that share work within pools, at grid points that differ in their chunks only: they share plans."""
    point = points[0][1]
    layout = _layout(run, head_shards=point.head_shards, block_size=point.block_size, chunks=1)
    pools_at_once = run.data_parallel // point.pool_size
    groups: list[list[_Group]] = [[] for _ in points]
    inter: dict[bool, list[float]] = {placed: [] for placed in (False, True)}
    for placed in sorted({method in _PLACED for method, _ in points}):
        for number, step in enumerate(steps):
            loads = _loads(step, run)
            order = place_sequences(loads, point.pool_size, method="vrsp" if placed else "sequential", refine=placed)
            inter[placed].append(pool_imbalance(loads, order))
            for at, pool in enumerate(order):
                plan = layout_plan([step[sequence] for sequence in pool], layout)
                micro_step, instance = divmod(at, pools_at_once)
                for (method, asked), those in zip(points, groups, strict=True):
                    if (method in _PLACED) == placed:
                        first = instance * point.pool_size * run.shape.context_parallel
                        cost = pool_cost(plan, chunks=asked.chunks, first_worker=first, calibration=calibration)
                        index = number * run.accumulation + micro_step
                        those.append(_Group(micro_step=index, cost=cost, imbalance=plan.imbalance))
                planned()
    return [
        _figures(method, asked, those, inter[method in _PLACED])
        for (method, asked), those in zip(points, groups, strict=True)
    ]


def _figures(method: Method, point: GridPoint | None, groups: list[_Group], inter: list[float]) -> MethodFigures:
    count = 1 + max(group.micro_step for group in groups)
    latency, moved = [0.0] * count, [0] * count
    for group in groups:
        latency[group.micro_step] = max(latency[group.micro_step], group.cost.seconds)
        moved[group.micro_step] += group.cost.bytes_moved
    return MethodFigures(
        method=method,
        point=point,
        inter_pool_imbalance=sum(inter) / len(inter),
        intra_pool_imbalance=sum(group.imbalance for group in groups) / len(groups),
        worst_intra_pool_imbalance=max(group.imbalance for group in groups),
        bytes_moved=sum(moved) / count,
        busiest_bytes=max(group.cost.busiest_bytes for group in groups),
        mean_latency=sum(latency) / count,
        worst_latency=max(latency),
    )


def _layout(run: SimulatedRun, *, head_shards: int, block_size: int, chunks: int) -> PoolLayout:
    shape = run.shape
    return PoolLayout(
        context_parallel=shape.context_parallel,
        block_size=block_size,
        head_shards=head_shards,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        bytes_per_element=shape.bytes_per_element,
        chunks=chunks,
        window=shape.window,
        sequence_length=run.sequence_length,
    )


def _loads(step: Step, run: SimulatedRun) -> list[int]:
    return [attention_load(np.asarray(documents), window=run.shape.window) if documents else 0 for documents in step]
