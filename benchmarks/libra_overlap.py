"""How much of the transfers `libra_attention` hides behind computation, for 1, 2, 4 and 8 chunks of the heads.

Two workers run as threads. Computation of all heads takes `--compute` milliseconds by the clock and transfer of all
heads `--transfer`, both asleep, so that the machine does not matter: chunks take their share of both. A step then
takes the first transfer, the computation and the last transfer; forward and backward are measured against that, and
against a step that hides nothing.

    python benchmarks/libra_overlap.py
    python benchmarks/libra_overlap.py --trace runs/overlap.json --picture docs/assets/libra_overlap.svg

`--trace` writes what `torch.profiler` saw of 1 and of 4 chunks, for Perfetto or chrome://tracing; `--picture` draws
worker 0's part of it.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

from odb_libra_lightning.libra.attention import libra_attention
from odb_libra_lightning.libra.pool_plan import PoolPlan, plan_pool
from odb_libra_lightning.libra.segments import Segments
from odb_libra_lightning.libra.thread_transport import DelayedTransport, ThreadTransport, run_workers
from odb_libra_lightning.libra.transport import Handle, Transport

HEADS, HEAD_DIM, ROWS = 8, 4, 64
DRAWN = (1, 4)  # numbers of chunks
LANES = ("out", "compute", "home")
COLORS = {"out": "#3b6ea8", "compute": "#b7b7b7", "home": "#c9803f"}
NAMES = {"out": "to where it is computed", "compute": "kernel", "home": "home"}


class Stub:
    """A kernel that takes its time and gives zeros."""

    def __init__(self, seconds: float, label: str) -> None:
        self.seconds, self.label = seconds, label
        self.has_computed = False  # and nothing has been waited for since: what is sent now goes home

    def _compute(self) -> None:
        with record_function(f"{self.label}compute"):
            time.sleep(self.seconds)
        self.has_computed = True

    def forward(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, **mask: Any) -> tuple[Tensor, Tensor]:
        """Zeros."""
        self._compute()
        return torch.zeros_like(q), q.new_zeros(q.shape[1], q.shape[0])

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any, **mask: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Zeros."""
        self._compute()
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)


@dataclass(kw_only=True)
class Shown:
    """A transport whose transfers are seen by the profiler: each is waited for by a thread of its own."""

    inner: Transport
    kernel: Stub
    label: str

    def __post_init__(self) -> None:
        self.rank, self.size = self.inner.rank, self.inner.size

    def all_to_all(
        self, output: Tensor, input: Tensor, output_splits: Sequence[int], input_splits: Sequence[int]
    ) -> Handle:
        """Begin a transfer."""
        handle = self.inner.all_to_all(output, input, output_splits, input_splits)
        name = f"{self.label}{'home' if self.kernel.has_computed else 'out'}"

        def carry() -> None:
            with record_function(name):
                handle.wait()

        thread = threading.Thread(target=carry, daemon=True)
        thread.start()
        return Carried(thread, self.kernel)


@dataclass
class Carried:
    """A transfer that a thread waits for."""

    thread: threading.Thread
    kernel: Stub

    def wait(self) -> None:
        """Wait for the thread."""
        self.kernel.has_computed = False
        self.thread.join()


def plan_of(chunks: int) -> PoolPlan:
    """One long document and many of one token, so that half of the long one's tiles travel; every chunk has keys."""
    return plan_pool(
        [[ROWS], [1] * ROWS],
        context_parallel=1,
        block_size=8,
        head_shards=1,
        num_heads=HEADS,
        num_kv_heads=HEADS,
        head_dim=HEAD_DIM,
        bytes_per_element=4,
        chunks=chunks,
    )


def run(chunks: int, *, compute: float, transfer: float, repeat: int = 1, shown: bool = False) -> list[list[float]]:
    """Seconds of forward and of backward, for every repetition.

    Args:
        chunks: slices of the heads.
        compute: seconds that the kernel takes for all heads, forward and backward each.
        transfer: seconds that a transfer of all heads takes.
        repeat: how many steps.
        shown: show transfers to the profiler.
    """
    plan = plan_of(chunks)

    def work(transport: ThreadTransport) -> list[list[float]]:
        label = f"{chunks} chunks, worker {transport.rank}: "
        kernel = Stub(compute / chunks, label)
        carrier: Transport = DelayedTransport(transport, transfer / chunks)
        if shown:
            carrier = Shown(inner=carrier, kernel=kernel, label=label)
        q, k, v = (torch.zeros(ROWS, HEADS, HEAD_DIM, requires_grad=True) for _ in "qkv")
        times = []
        for _ in range(repeat):
            begin = time.perf_counter()
            with record_function(f"{label}forward"):
                out = libra_attention(q, k, v, plan, transport=carrier, kernel=kernel)
            middle = time.perf_counter()
            with record_function(f"{label}backward"):
                out.backward(out.detach())
            times.append([middle - begin, time.perf_counter() - middle])
        return times

    return run_workers(work, plan.num_workers)[0]


def measure(compute: float, transfer: float, repeat: int) -> Table:
    """A row for each number of chunks."""
    table = Table(title=f"compute {compute * 1e3:g} ms, transfer {transfer * 1e3:g} ms each way; median of {repeat}")
    for name in ("chunks", "forward, ms", "backward, ms", "first + compute + last", "over it", "nothing hidden"):
        table.add_column(name, justify="right")
    for chunks in (1, 2, 4, 8):
        run(chunks, compute=0, transfer=0)
        forward, backward = (
            median(each) for each in zip(*run(chunks, compute=compute, transfer=transfer, repeat=repeat), strict=True)
        )
        least = compute + 2 * transfer / chunks
        over = f"{(forward + backward) / (2 * least) - 1:+.1%}" if least else "-"
        times = (f"{seconds * 1e3:.1f}" for seconds in (forward, backward, least))
        table.add_row(str(chunks), *times, over, f"{(compute + 2 * transfer) * 1e3:.1f}")
    return table


def trace(path: Path, compute: float, transfer: float) -> None:
    """Write a Chrome trace of one step with few and one with many chunks."""
    for chunks in DRAWN:
        run(chunks, compute=0, transfer=0)  # plans and indices are made
    config = _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=config) as profiler:
        for chunks in DRAWN:
            run(chunks, compute=compute, transfer=transfer, shown=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))


def draw(trace_path: Path, picture: Path, compute: float, transfer: float) -> None:
    """Draw worker 0 of a trace as an SVG: what was under way when, in forward and in backward."""
    events = json.loads(trace_path.read_text())["traceEvents"]
    spans = [e for e in events if e.get("ph") == "X" and e.get("cat") == "user_annotation"]
    left, width, row, parts, y = 150, 640, 16, [], 40
    steps = {chunks: [e for e in spans if e["name"].startswith(f"{chunks} chunks, worker 0: ")] for chunks in DRAWN}
    begins = {chunks: min(float(e["ts"]) for e in of) for chunks, of in steps.items()}
    longest = max(float(e["ts"]) + float(e["dur"]) - begins[chunks] for chunks, of in steps.items() for e in of)
    for chunks, of in steps.items():
        scale = width / longest
        parts.append(f'<text x="10" y="{y + row - 4}" font-weight="bold">{chunks} chunk{"s" * (chunks > 1)}</text>')
        for kind in ("forward", "backward"):
            (span,) = (e for e in of if e["name"].endswith(f": {kind}"))
            x = left + (float(span["ts"]) - begins[chunks]) * scale
            length = float(span["dur"]) * scale
            parts.append(f'<text x="{x + 2:.1f}" y="{y + row - 4}">{kind}, {float(span["dur"]) / 1e3:.0f} ms</text>')
            parts.append(f'<path d="M{x:.1f} {y + 2}v{4 * row}m{length:.1f} 0v-{4 * row}" stroke="#999"/>')
        for lane, kind in enumerate(LANES):
            top = y + (lane + 1) * row
            parts.append(f'<text x="10" y="{top + row - 5}" fill="#777">{NAMES[kind]}</text>')
            for e in of:
                if e["name"].endswith(f": {kind}"):
                    x, length = left + (float(e["ts"]) - begins[chunks]) * scale, float(e["dur"]) * scale
                    parts.append(
                        f'<rect x="{x:.1f}" y="{top}" width="{length:.1f}" height="{row - 3}" fill="{COLORS[kind]}" '
                        'stroke="white"/>'
                    )
        y += 5 * row + 14
    title = f"computation {compute * 1e3:g} ms, transfers {transfer * 1e3:g} ms each way, seen by torch.profiler"
    picture.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + width + 20} {y}" font-family="sans-serif" '
        f'font-size="12" fill="#444"><rect width="100%" height="100%" fill="white"/>'
        f'<text x="10" y="20">{title}</text>{"".join(parts)}</svg>\n',
        encoding="utf-8",
    )


def main() -> None:
    """Measure, and write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compute", type=float, default=160, help="ms that the kernel takes for all heads")
    parser.add_argument("--transfer", type=float, default=80, help="ms that a transfer of all heads takes")
    parser.add_argument("--repeat", type=int, default=5, help="steps to take the median of")
    parser.add_argument("--trace", type=Path, help="Chrome trace to write")
    parser.add_argument("--picture", type=Path, help="SVG to write")
    arguments = parser.parse_args()
    compute, transfer = arguments.compute / 1e3, arguments.transfer / 1e3
    torch.set_num_threads(1)
    Console().print(measure(compute, transfer, arguments.repeat))
    if arguments.trace or arguments.picture:
        with TemporaryDirectory() as folder:
            path = arguments.trace or Path(folder) / "trace.json"
            trace(path, compute, transfer)
            if arguments.picture:
                draw(path, arguments.picture, compute, transfer)


if __name__ == "__main__":
    main()
