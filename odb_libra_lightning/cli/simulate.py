"""What `odb-libra simulate` does: read its options, simulate, and show the figures."""

from __future__ import annotations

import csv
import dataclasses
import io
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from odb_libra_lightning.cli.length_sources import document_lengths
from odb_libra_lightning.cli.output_files import check_outputs, write_whole
from odb_libra_lightning.libra.attention_costs import AttentionShape
from odb_libra_lightning.libra.calibration import DEFAULT_CALIBRATION, Calibration
from odb_libra_lightning.libra.choice import at_choice, choose, three_digits
from odb_libra_lightning.libra.scaling import ScalingFigures, check_linear_seconds, check_scaling, scaling
from odb_libra_lightning.libra.simulation_results import (
    METHODS,
    Choice,
    Grid,
    Method,
    MethodFigures,
    SimulatedRun,
    Simulation,
)
from odb_libra_lightning.libra.simulator import Packing, check_simulation, simulate
from odb_libra_lightning.libra.whole_numbers import checked_count

_WIDTH = 100  # of lines where stdout is no terminal


@dataclass(frozen=True, kw_only=True)
class SimulateOptions:
    """The options of the command, as they are written on the command line; `docs/simulate.md` explains them."""

    lengths: str
    sequence_length: str = "256K"
    global_batch: int = 128
    data_parallel: int = 16
    context_parallel: int = 8
    pool_size: str | None = None
    block_size: str = "4K,8K"
    head_shards: str = "2,4,8"
    chunks: str = "4"
    num_heads: int = 32
    num_kv_heads: int = 4
    head_dim: int = 128
    bytes_per_element: int = 2
    window: str | None = None
    packing: str = "sequential"
    methods: str = ",".join(METHODS)
    steps: int = 4
    documents: int | None = None
    column: str | None = None
    calibration: Path | None = None
    seed: int = 0
    scaling: str | None = None
    linear_seconds: float = 0.0
    csv: Path | None = None
    picture: Path | None = None


def run_simulation(options: SimulateOptions, *, notice: Callable[[str], None]) -> dict[str, Any]:
    """Simulate, and write the files that were asked for.

    Args:
        options: of the command line.
        notice: is called with sentences for stderr.

    Returns:
        `simulation`, a `Simulation`; `choice`, a `Choice` or None; `calibration`, a `Calibration`; `scaling`, a tuple
        of `ScalingFigures`.

    Raises:
        ValueError: an option that cannot be used, before anything is computed; one sentence.
    """
    run = SimulatedRun(
        sequence_length=parse_count(options.sequence_length, "--sequence-length"),
        global_batch=options.global_batch,
        data_parallel=options.data_parallel,
        shape=AttentionShape(
            context_parallel=options.context_parallel,
            num_heads=options.num_heads,
            num_kv_heads=options.num_kv_heads,
            head_dim=options.head_dim,
            bytes_per_element=options.bytes_per_element,
            window=None if options.window is None else parse_count(options.window, "--window"),
        ),
    )
    grid = Grid(
        pool_sizes=(
            _usual_pool_sizes(run.data_parallel)
            if options.pool_size is None
            else parse_counts(options.pool_size, "--pool-size")
        ),
        head_shards=parse_counts(options.head_shards, "--head-shards"),
        block_sizes=parse_counts(options.block_size, "--block-size"),
        chunks=parse_counts(options.chunks, "--chunks"),
    )
    methods = cast("list[Method]", [name.strip() for name in options.methods.split(",")])
    check_simulation(run, grid, methods)
    check_linear_seconds(options.linear_seconds)
    degrees = () if options.scaling is None else parse_counts(options.scaling, "--scaling")
    if degrees and "libra" not in methods:
        raise ValueError("--scaling shows the chosen configuration of libra: add libra to --methods")
    if degrees:
        check_scaling(run, grid, methods, data_parallel=degrees, linear_seconds=options.linear_seconds)
    if options.packing not in get_args(Packing):
        raise ValueError(f"--packing {options.packing}: choose one of {', '.join(get_args(Packing))}")
    checked_count("--steps", options.steps)
    if options.seed < 0:
        raise ValueError(f"--seed {options.seed}: expected a whole number of at least 0")
    calibration = DEFAULT_CALIBRATION if options.calibration is None else Calibration.from_json(options.calibration)
    _check_files(options)
    tokens = (options.steps * run.global_batch + 1) * run.sequence_length
    with _progress_bar("Reading lengths") as advance:
        lengths = document_lengths(
            options.lengths,
            tokens=tokens,
            documents=options.documents,
            column=options.column,
            seed=options.seed,
            progress=advance,
        )
    packing = cast("Packing", options.packing)
    longest = int(lengths.max())
    if packing == "best_fit" and longest > run.sequence_length:
        raise ValueError(
            f"{options.lengths} has a document of {longest} tokens, which does not fit whole in a sequence of "
            f"{run.sequence_length}: use --packing sequential, which splits documents, or a larger --sequence-length"
        )
    with _progress_bar("Planning pools") as advance:
        found = simulate(
            lengths,
            run=run,
            grid=grid,
            methods=methods,
            steps=options.steps,
            packing=packing,
            calibration=calibration,
            seed=options.seed,
            progress=advance,
        )
    if found.steps < options.steps:
        notice(f"The documents of {options.lengths} suffice for {found.steps} of {options.steps} optimizer steps.")
    for note in found.notes:
        notice(note)
    with _progress_bar("Planning pools of half and twice the size") as advance:
        choice = choose(found, lengths, packing=packing, calibration=calibration, seed=options.seed, progress=advance)
    scaled: tuple[ScalingFigures, ...] = ()
    if degrees and choice is not None:
        scaled = scaling(
            lengths,
            run=run,
            point=choice.point,
            data_parallel=degrees,
            methods=[method for method in ("ulysses", "ulysses_sorted", "libra") if method in methods],
            linear_seconds=options.linear_seconds,
            steps=options.steps,
            packing=packing,
            calibration=calibration,
            seed=options.seed,
        )
    if options.csv is not None:
        table = figures_csv(found)
        write_whole(options.csv, lambda path: path.write_text(table, encoding="utf-8"), option="--csv")
    if options.picture is not None:
        from odb_libra_lightning.cli.simulation_picture import draw_simulation

        write_whole(options.picture, lambda path: draw_simulation(found, choice, path), option="--picture")
    return {"simulation": found, "choice": choice, "calibration": calibration, "scaling": scaled}


def parse_count(text: str, option: str) -> int:
    """A whole number of at least 1, with an optional K (1,024) or M (1,048,576) behind it.

    Raises:
        ValueError: it is not.
    """
    match = re.fullmatch(r"\s*(\d+)\s*([KMkm]?)\s*", text)
    number = int(match[1]) * {"": 1, "k": 2**10, "m": 2**20}[match[2].lower()] if match else 0
    if number < 1:
        raise ValueError(f"{option} {text.strip()!r}: expected a whole number of at least 1, such as 4096, 4K or 1M")
    return number


def parse_counts(text: str, option: str) -> tuple[int, ...]:
    """Whole numbers with commas between, each once.

    Raises:
        ValueError: one that is none.
    """
    return tuple(dict.fromkeys(parse_count(part, option) for part in text.split(",")))


def figures_csv(found: Simulation) -> str:
    """All figures, one line each; seconds and bytes are those of one layer."""
    out = io.StringIO()
    names = [field.name for field in dataclasses.fields(MethodFigures) if field.name not in ("method", "point")]
    point_names = ["pool_size", "head_shards", "block_size", "chunks"]
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["method", *point_names, *names])
    for one in found.figures:
        point = ["" if one.point is None else getattr(one.point, name) for name in point_names]
        writer.writerow([one.method, *point, *(getattr(one, name) for name in names)])
    return out.getvalue()


def as_json(results: dict[str, Any]) -> dict[str, Any]:
    """The results as plain values."""
    found: Simulation = results["simulation"]
    return {
        **dataclasses.asdict(found),
        "choice": None if results["choice"] is None else dataclasses.asdict(results["choice"]),
        "calibration": dataclasses.asdict(results["calibration"]),
        "scaling": [dataclasses.asdict(one) for one in results["scaling"]],
    }


def print_results(results: dict[str, Any]) -> None:
    """Tables on stdout, then the choice and why."""
    found: Simulation = results["simulation"]
    choice: Choice | None = results["choice"]
    plain: dict[str, Any] = {"highlight": False, "markup": False, "emoji": False}  # text can come from a file
    console = Console(**plain)
    if not console.is_terminal:
        console = Console(**plain, width=_WIDTH)
    run = found.run
    console.print(
        f"{found.steps} x {run.global_batch} packed sequences of {run.sequence_length:,} tokens "
        f"({found.documents:,} documents and pieces) on {run.data_parallel} x {run.shape.context_parallel} workers. "
        "Times are of one attention layer, forward and backward."
    )
    console.print(_table("Methods, at the chosen configuration", at_choice(found, choice), found, choice))
    swept = [one for one in found.figures if one.method == "libra"]
    if len(swept) > 1:
        console.print(_table("Libra, over the grid", swept, found, choice))
    if results["scaling"]:
        console.print(_scaling_table(results["scaling"]))
    if choice is not None:
        console.print(f"\n{choice.reason}")
    console.print(f"\nLatencies are predicted, with figures that are {results['calibration'].source}.")


def _table(title: str, rows: Sequence[MethodFigures], found: Simulation, choice: Choice | None) -> Table:
    table = _plain_table(title)
    table.add_column("\nmethod")
    numbers = ("\nP", "\nH", "\nB", "\nM", "inter-\npool", "intra\nmean", "intra\nworst", "moved\nGiB", "most\nGiB")
    for name in (*numbers, "mean\nms", "worst\nms", "speed\nmean", "speed\nworst"):
        table.add_column(name, justify="right")
    base = next((one for one in found.figures if one.method == "ulysses"), None)
    chosen = choice.point if choice is not None else None
    for one in rows:
        point = one.point
        cells = ["", "", "", ""]
        if point is not None:
            block = f"{point.block_size // 1024}K" if point.block_size % 1024 == 0 else str(point.block_size)
            cells = [str(point.pool_size), str(point.head_shards), block, str(point.chunks)]
        imbalances = (one.inter_pool_imbalance, one.intra_pool_imbalance, one.worst_intra_pool_imbalance)
        sizes = (one.bytes_moved / 2**30, one.busiest_bytes / 2**30, one.mean_latency * 1e3, one.worst_latency * 1e3)
        speeds = ["", ""]
        if base is not None:
            pairs = ((base.mean_latency, one.mean_latency), (base.worst_latency, one.worst_latency))
            speeds = [f"{theirs / ours:.2f}x" for theirs, ours in pairs]
        table.add_row(
            one.method,
            *cells,
            *(f"{share:.2%}" if share < 0.1 else f"{share:.1%}" for share in imbalances),
            *map(three_digits, sizes),
            *speeds,
            style="bold" if one.method == "libra" and point == chosen else None,
        )
    return table


def _scaling_table(scaled: Sequence[ScalingFigures]) -> Table:
    table = _plain_table("More replicas, the same batch")
    for name in ("method", "data parallel", "step ms", "speed-up", "efficiency"):
        table.add_column(name, justify="left" if name == "method" else "right")
    for one in scaled:
        numbers = (three_digits(one.step_seconds * 1e3), f"{one.speedup:.2f}x", f"{one.efficiency:.1%}")
        table.add_row(one.method, str(one.data_parallel), *numbers)
    return table


def _plain_table(title: str) -> Table:
    """A table without lines, so that all columns fit into 80 characters."""
    return Table(title=f"\n{title}", title_justify="left", box=None, padding=(0, 1, 0, 0), pad_edge=False)


def _usual_pool_sizes(data_parallel: int) -> tuple[int, ...]:
    """4 and 8 replicas where they divide the replicas of the run, else the largest number below that does."""
    fitting = [size for size in range(1, 9) if data_parallel % size == 0]
    return tuple(size for size in fitting if size in (4, 8)) or (fitting[-1],)


def _check_files(options: SimulateOptions) -> None:
    if options.picture is not None:
        if options.picture.suffix not in (".svg", ".png"):
            raise ValueError(f"--picture {options.picture}: expected a name that ends in .svg or .png")
        try:
            import matplotlib  # noqa: F401
        except ModuleNotFoundError as error:
            raise ValueError("--picture needs matplotlib: pip install 'odb-libra-lightning[simulate]'") from error
    check_outputs(
        {"--csv": options.csv, "--picture": options.picture},
        inputs={"LENGTHS": Path(options.lengths), "--calibration": options.calibration},
    )


@contextmanager
def _progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr that goes when it is done; none where stderr is no terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total or None)
