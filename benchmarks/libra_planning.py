"""Libra's planning: how even pools and workers get, what that moves, and how long it takes to work out.

Everything is planned and nothing is trained. Balance and bytes are exact and the same on every machine. Times are
process time on one core, of each plan the best of three; only those of one run compare with one another.

    python benchmarks/libra_planning.py                            # all tables, some minutes
    python benchmarks/libra_planning.py --only exchange            # one of them
    python benchmarks/libra_planning.py --pictures docs/assets     # the pictures of docs/libra.md too
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"))

import numpy as np
from libra_measures import exchanges, placements, planning_times
from libra_windows import DRY_RUN, FULL, Extent
from rich.console import Console
from rich.table import Table

GIB = 2**30
KINDS = ("placement", "time", "exchange")


def tables(kind: str, rows: list[Any]) -> Iterator[Table]:
    """What a person wants to see: a table for each corpus."""
    groups = dict.fromkeys((row.corpus, getattr(row, "global_batch", None)) for row in rows)
    for corpus, batch in groups:
        own = [row for row in rows if (row.corpus, getattr(row, "global_batch", None)) == (corpus, batch)]
        shown = Table(title=f"{kind}: {corpus}" + ("" if batch is None else f", {batch:,} sequences, pools of 8"))
        columns = COLUMNS[kind]
        for name in columns:
            shown.add_column(name, justify="left" if name in ("rule", "plan") else "right")
        for row in own:
            shown.add_row(*(cell(row) for cell in columns.values()))
        yield shown


def optional(form: str, value: float | None) -> str:
    return "" if value is None else form.format(value)


COLUMNS: dict[str, dict[str, Callable[[Any], str]]] = {
    "placement": {
        "rule": lambda row: row.method,
        "R-1, mean": lambda row: f"{row.mean:.5f}",
        "worst": lambda row: f"{row.worst:.5f}",
        "above floor, worst": lambda row: optional("{:.5f}", row.above_floor),
        "ms, median": lambda row: optional("{:.2f}", row.milliseconds),
        "worst ": lambda row: optional("{:.2f}", row.slowest),
    },
    "time": {
        "P": lambda row: str(row.pool_size),
        "W": lambda row: f"{row.workers:,}",
        "plans": lambda row: str(row.plans),
        "tiles": lambda row: f"{row.tiles:,.0f}",
        "ms, median": lambda row: f"{row.median:.1f}",
        "worst": lambda row: f"{row.worst:.1f}",
        "split sizes": lambda row: f"{row.splits:.1f}",
        "Algorithm 2": lambda row: f"{row.plain:.1f}",
        "ratio": lambda row: f"{row.ratio:.2f}x",
    },
    "exchange": {
        "plan": lambda row: row.variant,
        "imbalance": lambda row: f"{row.imbalance:.2%}",
        "worst": lambda row: f"{row.worst_imbalance:.2%}",
        "tiles moved": lambda row: optional("{:.0%}", row.moved),
        "total GiB": lambda row: f"{row.total / GIB:.2f}",
        "ratio": lambda row: f"{row.total_ratio:.2f}x",
        "busiest GiB": lambda row: f"{row.busiest / GIB:.3f}",
        "ratio ": lambda row: f"{row.busiest_ratio:.2f}x",
        "worst ": lambda row: f"{row.worst_busiest / GIB:.3f}",
        "floor": lambda row: "" if row.floor is None else f"{row.floor / GIB:.3f}",
        "kernels": lambda row: optional("{:.1%}", row.kernel_imbalance),
        "latency ms": lambda row: f"{1000 * row.latency:.1f}",
        "plan ms": lambda row: optional("{:.1f}", row.milliseconds),
    },
}


def machine() -> str:
    """In words."""
    cpu = platform.machine()
    if (info := Path("/proc/cpuinfo")).exists():
        models = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        cpu = models[0] if models else cpu
    return f"{cpu}, {os.cpu_count()} cores, Python {platform.python_version()}, NumPy {np.__version__}"


def main() -> None:
    """Measure, and print tables or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], choices=[*KINDS, "none"], help="tables (default: all)")
    parser.add_argument("--pictures", type=Path, metavar="DIR", help="also draw the pictures of docs/libra.md there")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    options = parser.parse_args()
    extent = DRY_RUN if options.dry_run else FULL
    measures: dict[str, Callable[[Extent], Iterable[Any]]] = dict(
        zip(KINDS, (placements, planning_times, exchanges), strict=True)
    )
    found: dict[str, list[Any]] = {}
    for kind in options.only or KINDS:
        if kind == "none":
            continue
        begin = time.perf_counter()
        found[kind] = list(measures[kind](extent))
        print(f"{kind}: {time.perf_counter() - begin:.0f} s", file=sys.stderr)
    pictures = []
    if options.pictures is not None:
        from libra_pictures import all_pictures, draw

        options.pictures.mkdir(parents=True, exist_ok=True)
        for picture in all_pictures(dry_run=options.dry_run):
            draw(picture, options.pictures)
            pictures.append(picture)
            print(f"drawn: {picture.name}", file=sys.stderr)
    if options.json:
        figures = {kind: [asdict(row) for row in rows] for kind, rows in found.items()}
        print(json.dumps({"machine": machine(), **figures, "pictures": [asdict(picture) for picture in pictures]}))
        return
    console = Console(width=170, highlight=False)
    console.print(machine())
    for kind, rows in found.items():
        for shown in tables(kind, rows):
            console.print(shown)
    for picture in pictures:
        console.print(picture.table())


if __name__ == "__main__":
    main()
