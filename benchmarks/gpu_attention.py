"""Attention on one GPU: speed of the kernels by block length and heads, their rounding, and what the executor adds.

`kernels` measures what share of its best rate each kernel reaches, and writes it as the calibration that
`odb-libra simulate --calibration` reads; `equality` compares kernels with float64 beside dense attention in bf16 and
the CPU kernel; `executor` runs `libra_attention` with 1 to 8 workers as threads on one device beside one bare kernel
call over everything; `remember` compares `keep` with `refetch`. Each is a process of its own with a time limit, so that
a failure of one loses no other; all together take 8 minutes at the most.

    python benchmarks/gpu_attention.py --json runs/attention.json --calibration runs/gpu.json
    python benchmarks/gpu_attention.py --device cpu          # the same code, tiny, to see that all of it works
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from attention_measures import machine
from gpu_attention_measures import SECTIONS, SIZES, Row, calibration_of
from rich.console import Console
from rich.table import Table

SECONDS = {"kernels": 170, "equality": 60, "executor": 90, "remember": 50}  # after which a section begins nothing new
GRACE = 25  # seconds more, after which its process is ended: 470 in all


def run_section(name: str, device: str, seconds: float, lines: Path) -> None:
    """Write rows as they come, as JSON lines, until there are no more or the time is over."""
    # Where the parent is killed, nobody else ends a section that hangs.
    watchdog = threading.Timer(seconds + GRACE, os._exit, [1])
    watchdog.daemon = True
    watchdog.start()
    if device == "cpu":
        torch.set_num_threads(1)  # small and shared machines are slower with more
    deadline = time.monotonic() + seconds
    with lines.open("a", encoding="utf-8") as file:
        for row in SECTIONS[name](device, SIZES[device]):
            file.write(json.dumps(row) + "\n")
            file.flush()
            if time.monotonic() > deadline:
                file.write(json.dumps({"cut_short": seconds}) + "\n")
                return


def start_section(name: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """A section in a process of its own: its rows, and why there are no more."""
    seconds, lines, log = SECONDS[name] * options.budget, folder / f"{name}.jsonl", folder / f"{name}.log"
    command = [sys.executable, __file__, "--device", options.device, "--budget", str(options.budget)]
    begin, error = time.monotonic(), None
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, "--section", name, "--lines", str(lines)],
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            if code := process.wait(seconds + GRACE):
                error = f"ended with {code}: {log.read_text()[-2000:]}"
        except subprocess.TimeoutExpired:
            error = f"not over after {seconds + GRACE:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)
    rows = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    if any("cut_short" in row for row in rows):
        error = f"no time for the rest after {seconds:.0f} s"
    rows = [row for row in rows if "cut_short" not in row]
    return {"rows": rows, "seconds": time.monotonic() - begin, "error": error}


def tables(name: str, rows: list[Row]) -> Iterator[Table]:
    """What a person wants to see of a section."""
    if name == "kernels":
        cells = [row for row in rows if "rows" in row]
        for kernel, kind, way in dict.fromkeys(
            (r["kernel"], r["kind"], w) for r in cells for w in ("forward", "backward")
        ):
            own = {
                (r["rows"], r["heads"]): r[f"{way}_rate"] for r in cells if (r["kernel"], r["kind"]) == (kernel, kind)
            }
            best = max(r[f"{way}_rate"] for r in cells if r["kernel"] == kernel)
            heads = sorted({each[1] for each in own})
            kinds = {"whole": "whole documents", "end": "at the end of long documents"}
            title = f"{kernel}, {way}, {kinds[kind]}: share of {best / 1e12:.3g} TFLOP/s"
            table = Table("rows", *(f"{count} heads" for count in heads), title=title)
            for length in sorted({each[0] for each in own}):
                shares = (own.get((length, count)) for count in heads)
                table.add_row(f"{length:,}", *("" if one is None else f"{one / best:.1%}" for one in shares))
            yield table
    elif name == "equality":
        table = Table(
            "case", "kernel", "out", "dq", "dk", "dv", "close", title="error, of that of dense attention in bf16"
        )
        for row in rows:
            ratios = (f"{ratio:.2f}" for ratio in row["of_dense"].values())
            table.add_row(row["case"], row["kernel"], *ratios, "yes" if row["close"] else "NO")
        yield table
    else:
        keys = list(dict.fromkeys(key for row in rows for key in row))
        table = Table(*keys, title=name)
        for row in rows:
            table.add_row(*(_cell(key, row.get(key)) for key in keys))
        yield table


def _cell(key: str, value: Any) -> str:
    if value is None:
        return ""
    if key in ("held", "peak", "moved"):
        return f"{value / 1e6:,.1f} MB"
    return f"{1000 * value:.2f} ms" if key == "seconds" else f"{value:.3f}" if key == "of_bare" else str(value)


def main() -> None:
    """Run the sections, print their tables, and write files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=list(SIZES), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", choices=list(SECTIONS), nargs="+", default=list(SECTIONS), help="these sections")
    parser.add_argument("--budget", type=float, default=1.0, help="factor of the sections' times")
    parser.add_argument("--json", type=Path, help="file for the report")
    parser.add_argument("--calibration", type=Path, help="file for `odb-libra simulate --calibration`")
    parser.add_argument("--section", choices=list(SECTIONS), help=argparse.SUPPRESS)
    parser.add_argument("--lines", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.section:
        run_section(options.section, options.device, SECONDS[options.section] * options.budget, options.lines)
        return
    console, where = Console(), machine(options.device)
    console.print(where)
    report: dict[str, Any] = {"machine": where, "sections": {}}
    with tempfile.TemporaryDirectory() as folder:
        for name in options.only:
            report["sections"][name] = found = start_section(name, options, Path(folder))
            for table in tables(name, found["rows"]):
                console.print(table)
            console.print(f"{name}: {found['seconds']:.0f} s" + (f"; {found['error']}" if found["error"] else ""))
            if options.json:  # after each, so that an end from outside loses little
                options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if options.calibration:
        rows = _rows(report, "kernels")
        kernel = rows[0]["kernel"] if rows else ""
        calibration = calibration_of(rows, kernel, where)
        if calibration is None:
            raise SystemExit(f"no calibration is written: the section `kernels` has not measured enough of {kernel!r}")
        calibration.to_json(options.calibration)
    faults = [name for name, found in report["sections"].items() if found["error"]]
    faults += [f"{row['case']} of {row['kernel']}" for row in _rows(report, "equality") if not row["close"]]
    if faults:
        raise SystemExit(f"not as it should be: {', '.join(faults)}")


def _rows(report: dict[str, Any], name: str) -> list[Row]:
    return report["sections"].get(name, {"rows": []})["rows"]


if __name__ == "__main__":
    main()
