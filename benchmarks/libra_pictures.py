"""The pictures of docs/libra.md and the figures in them; `libra_planning.py --pictures DIR` measures and draws."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
from libra_measures import repeated_bytes
from libra_windows import DRY_RUN, LIBRA_1M, LIBRA_256K, MAGIATTENTION, PLAIN, SMALL, Corpus
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator
from rich.table import Table

from odb_libra_lightning.libra.attention_costs import pool_cost
from odb_libra_lightning.libra.calibration import DEFAULT_CALIBRATION
from odb_libra_lightning.libra.load import attention_load, imbalance_floor, pool_imbalance
from odb_libra_lightning.libra.pool_plan import layout_plan
from odb_libra_lightning.libra.sequence_placement import place_sequences
from odb_libra_lightning.libra.simulation_results import Grid, SimulatedRun
from odb_libra_lightning.libra.simulator import simulate

BLUE, LIGHT_BLUE, ORANGE, GREEN, RED, GREY, BLACK = (
    "#1f6fb4",
    "#8fbbe0",
    "#e07b1a",
    "#3a923a",
    "#b3403a",
    "#8a949f",
    "#333333",
)
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One line: its figures, and how it is drawn (a matplotlib format, such as `o-`)."""

    label: str
    y: list[float]
    colour: str
    style: str = "o-"


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Curves over the same `x`. `percent` writes the values of `y` as such; `log` is of the y axis."""

    title: str
    xlabel: str
    ylabel: str
    x: list[Any]
    curves: list[Curve]
    log: bool = False
    percent: bool = False


@dataclass(frozen=True, kw_only=True)
class Picture:
    """Panels side by side, with a title that says what they show, and one legend."""

    name: str
    title: str
    panels: list[Panel]

    def table(self) -> Table:
        """All figures."""
        shown = Table(title=f"{self.name}: {self.title}")
        for name in ("panel", "curve", "figures by x"):
            shown.add_column(name)
        for panel in self.panels:
            for curve in panel.curves:
                pairs = zip((str(x).replace("\n", "/") for x in panel.x), curve.y, strict=True)
                figures = "  ".join(f"{x}: {y:.3%}" if panel.percent else f"{x}: {y:.3f}" for x, y in pairs)
                shown.add_row(f"{panel.title} {panel.ylabel}".strip(), curve.label, figures)
        return shown


def all_pictures(*, dry_run: bool) -> Iterator[Picture]:
    """Measured, one after another."""
    corpora = [SMALL] if dry_run else [MAGIATTENTION, LIBRA_256K, LIBRA_1M]
    batch = DRY_RUN.batches[0] if dry_run else 128
    seeds = 1 if dry_run else 3
    yield placement_by_pool_size(corpora[:2], batch if dry_run else 1024, 1 if dry_run else 10)
    yield heads_or_rows(corpora[0] if dry_run else replace(MAGIATTENTION, context_parallel=4), batch, seeds)
    yield exchange_by_pool_size(corpora[0], batch, seeds)
    yield latency_by_pool_size(corpora, batch, seeds)


def placement_by_pool_size(corpora: Sequence[Corpus], batch: int, seeds: int) -> Picture:
    """`R - 1` of the rules, and what bounds it."""
    sizes = [size for size in (2, 4, 8, 16, 32, 64) if size < batch]
    rules = (
        ("random", "random", False, RED),
        ("zigzag", "zigzag", False, GREEN),
        ("Karmarkar-Karp", "karmarkar_karp", False, ORANGE),
        ("VRSP", "vrsp", False, LIGHT_BLUE),
        ("VRSP + refine", "vrsp", True, BLUE),
    )
    panels = []
    for corpus in corpora:
        loads = [[attention_load(one) for one in corpus.step(batch, seed)] for seed in range(seeds)]
        curves = []
        for label, method, refine, colour in rules:
            means = [
                statistics.mean(
                    pool_imbalance(one, place_sequences(one, size, method=method, refine=refine, seed=seed))
                    for seed, one in enumerate(loads)
                )
                for size in sizes
            ]
            curves.append(Curve(label=label, y=means, colour=colour))
        guide = [curves[0].y[0] * math.sqrt(sizes[0] / size) for size in sizes]
        floors = [statistics.mean(imbalance_floor(one, size, outliers=batch) for one in loads) for size in sizes]
        curves.append(Curve(label="1 / sqrt(P)", y=guide, colour=GREY, style=":"))
        curves.append(Curve(label="floor of any rule (none: 0)", y=floors, colour=BLACK, style="x"))
        panels.append(
            Panel(
                title=f"{corpus.mix}, {batch:,} sequences of {corpus.sequence_length // 1024}K",
                xlabel="replicas of a pool, P",
                ylabel="R - 1, heaviest pool over the mean",
                x=sizes,
                curves=curves,
                log=True,
                percent=True,
            )
        )
    return Picture(
        name="libra_placement",
        title="Larger pools even out slowly by themselves; VRSP with refinement is at the floor",
        panels=panels,
    )


def heads_or_rows(corpus: Corpus, batch: int, seeds: int) -> Picture:
    """The same number of tiles a sequence, cut by heads or by rows."""
    tiles = 8 if corpus is SMALL else 128
    cuts = [(shards, corpus.sequence_length * shards // tiles) for shards in (1, 2, 4, 8, 16, 32)]
    home = corpus.sequence_length // corpus.context_parallel
    cuts = [(shards, block) for shards, block in cuts if block <= home and tiles % shards == 0]
    pools = [pool for seed in range(seeds) for pool in corpus.pools(8, batch, seed)]
    measured: dict[str, list[list[float]]] = {}
    for label, split in (("as cut", False), ("split_oversize", True)):
        rows = []
        for shards, block in cuts:
            layout = corpus.layout(block_size=block, head_shards=shards, split_oversize=split)
            plans = [layout_plan(pool, layout) for pool in pools]
            costs = [
                pool_cost(plan, chunks=layout.chunks, first_worker=0, calibration=DEFAULT_CALIBRATION) for plan in plans
            ]
            rows.append(
                [
                    statistics.mean(plan.imbalance for plan in plans),
                    statistics.mean(plan.bytes_moved for plan in plans) / GIB,
                    statistics.mean(cost.seconds for cost in costs) * 1e3,
                ]
            )
        measured[label] = [list(column) for column in zip(*rows, strict=True)]
    ticks = [f"{shards}\n{block // 1024}K" for shards, block in cuts]
    panels = [
        Panel(
            title="",
            xlabel="head shards H,\nrows of a block B",
            ylabel=ylabel,
            x=ticks,
            curves=[
                Curve(label="blocks as cut", y=measured["as cut"][at], colour=LIGHT_BLUE),
                Curve(label="cut finer where tiles find no room", y=measured["split_oversize"][at], colour=BLUE),
            ],
            percent=at == 0,
        )
        for at, ylabel in enumerate(("imbalance of workers", "total moved, GiB", "predicted latency, ms"))
    ]
    moved = measured["split_oversize"][1]
    shards, block = cuts[moved.index(min(moved))]
    return Picture(
        name="libra_heads_or_rows",
        title=f"{tiles} tiles a sequence: H={shards} with B={block // 1024}K moves the least",
        panels=panels,
    )


def exchange_by_pool_size(corpus: Corpus, batch: int, seeds: int) -> Picture:
    """Bytes a worker sends on average, and those of the busiest one."""
    sizes = [size for size in (2, 4, 8, 16, 32) if size < batch]
    named: tuple[tuple[str, dict[str, Any], str], ...] = (
        ("Algorithm 2 to the letter", dict(PLAIN), ORANGE),
        ("home_first and all options", {}, BLUE),
    )
    curves: list[list[Curve]] = [[], []]
    for label, options, colour in named:
        means, busiest = [], []
        for size in sizes:
            layout = corpus.layout(**options)
            plans = [layout_plan(pool, layout) for seed in range(seeds) for pool in corpus.pools(size, batch, seed)]
            means.append(statistics.mean(plan.bytes_moved / plan.num_workers for plan in plans) / GIB)
            busiest.append(statistics.mean(plan.busiest_bytes for plan in plans) / GIB)
        for at, values in enumerate((means, busiest)):
            curves[at].append(Curve(label=label, y=values, colour=colour))
    ulysses = repeated_bytes(corpus)[1] / GIB
    for of in curves:
        of.append(Curve(label="Ulysses", y=[ulysses] * len(sizes), colour=GREY, style="--"))
    ratio = curves[0][1].y[-1] / curves[0][0].y[-1]
    growth = curves[1][1].y[-1] / curves[1][1].y[0]
    return Picture(
        name="libra_exchange",
        title=f"The total stays at {ratio:.2f}x of Algorithm 2's; the busiest worker's share grows {growth:.1f}x",
        panels=[
            Panel(title=title, xlabel="replicas of a pool, P", ylabel="GiB a layer, forward", x=sizes, curves=of)
            for title, of in zip(("sent by a worker, mean", "busiest worker, larger direction"), curves, strict=True)
        ],
    )


def latency_by_pool_size(corpora: Sequence[Corpus], batch: int, windows: int) -> Picture:
    """Predicted straggler latency, over Ulysses'."""
    replicas = min(16, batch)
    sizes = [size for size in (1, 2, 4, 8, 16) if size <= replicas]
    panels, best, safest = [], [], []
    for corpus in corpora:
        lengths = [length for seed in range(windows) for one in corpus.step(batch, seed) for length in one]
        found = simulate(
            lengths,
            run=SimulatedRun(
                sequence_length=corpus.sequence_length, global_batch=batch, data_parallel=replicas, shape=corpus.shape
            ),
            grid=Grid(pool_sizes=sizes, head_shards=(4,), block_sizes=(corpus.block_size,), chunks=(4,)),
            methods=("ulysses", "ulysses_sorted", "libra"),
            steps=windows,
            seed=None,
        )
        by_size = {one.point.pool_size: one for one in found.figures if one.point is not None}
        ulysses, ordered = (
            next(one for one in found.figures if one.method == name) for name in ("ulysses", "ulysses_sorted")
        )
        lines = (
            ("Ulysses, mean", [ulysses.mean_latency] * len(sizes), GREY, "-"),
            ("Ulysses, worst", [ulysses.worst_latency] * len(sizes), GREY, "--"),
            ("Ulysses, sorted by load, mean", [ordered.mean_latency] * len(sizes), GREEN, "-"),
            ("Libra, mean", [by_size[size].mean_latency for size in sizes], BLUE, "o-"),
            ("Libra, worst", [by_size[size].worst_latency for size in sizes], BLUE, "s--"),
        )
        best.append(min(sizes, key=lambda size: by_size[size].mean_latency))
        safest.append(min(sizes, key=lambda size: by_size[size].worst_latency))
        panels.append(
            Panel(
                title=f"{corpus}".replace(", CP", "\nCP"),
                xlabel="replicas of a pool, P",
                ylabel="predicted, ms a layer",
                x=sizes,
                curves=[
                    Curve(label=label, y=[value * 1e3 for value in values], colour=colour, style=style)
                    for label, values, colour, style in lines
                ],
            )
        )
    mean, worst = (", ".join(f"P={size}" for size in chosen) for chosen in (best, safest))
    return Picture(
        name="libra_latency",
        title=f"The mean is least at {mean}; the worst micro-step is shortest at {worst}",
        panels=panels,
    )


def draw(picture: Picture, folder: Path) -> Path:
    """Write `NAME.svg`; the same figures give the same file."""
    style: dict[Any, Any] = {
        "font.size": 8.5,
        "svg.hashsalt": picture.name,
        "svg.fonttype": "path",
        "axes.titlesize": 9,
        "lines.markersize": 4,
    }
    with mpl.rc_context(style):
        figure = Figure(figsize=(7.2, 3.6), layout="constrained")
        for axes, panel in zip(figure.subplots(1, len(picture.panels), squeeze=False)[0], picture.panels, strict=True):
            draw_panel(axes, panel)
        handles, labels = figure.axes[0].get_legend_handles_labels()
        columns = 4 if len(labels) > 5 else min(3, len(labels))
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)
        figure.suptitle(picture.title, fontsize=10, fontweight="bold")
        path = folder / f"{picture.name}.svg"
        figure.savefig(path, metadata={"Date": None})
    return path


def draw_panel(axes: Axes, panel: Panel) -> None:
    """All curves, with equal steps between powers of two."""
    at = list(range(len(panel.x)))
    for curve in panel.curves:
        values = [value if value > 0 or not panel.log else math.nan for value in curve.y]
        axes.plot(at, values, curve.style, color=curve.colour, label=curve.label, zorder=3 if curve.style == "x" else 2)
    axes.set_xticks(at, [str(x) for x in panel.x])
    axes.set(title=panel.title, xlabel=panel.xlabel, ylabel=panel.ylabel)
    if panel.log:
        axes.set_yscale("log")
        axes.set_ylim(bottom=1e-6)
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.set_ylim(bottom=0, top=1.08 * max(max(curve.y) for curve in panel.curves))
    if panel.percent:
        axes.yaxis.set_major_formatter(
            FuncFormatter(lambda value, _: f"{100 * value:.6f}".rstrip("0").rstrip(".") + " %")
        )
    axes.grid(axis="y", color="#e4e7eb", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
