"""What the benchmark of attention on one GPU measures, section by section, and the calibration that follows."""

from __future__ import annotations

import dataclasses
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, get_args

import torch
from attention_measures import (
    Attention,
    available_kernels,
    masked_attention,
    scaled_step,
    synchronize,
    timed,
    visible_pairs,
    whole,
    with_gradients,
)
from torch import Tensor

from odb_libra_lightning.libra.attention import Remember, libra_attention
from odb_libra_lightning.libra.calibration import DEFAULT_CALIBRATION, Calibration
from odb_libra_lightning.libra.kernel_interface import AttentionKernel, merge_parts
from odb_libra_lightning.libra.kernels import kernel_for
from odb_libra_lightning.libra.load import attention_load
from odb_libra_lightning.libra.pool_plan import PoolPlan, plan_pool
from odb_libra_lightning.libra.prepared_plan import prepare_plan
from odb_libra_lightning.libra.segments import Segments
from odb_libra_lightning.libra.thread_transport import ThreadTransport, run_workers

SIZES: dict[str, dict[str, Any]] = {
    "cuda": {
        "head_dim": 128,
        "heads": (1, 2, 4, 8, 16, 32),
        "whole": (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768),
        "end": (512, 1024, 2048, 4096, 8192, 16384, 32768),
        "before": 32768,  # keys of a document before the rows at its end
        "rows": 32768,  # query rows of a call
        "pool": 131072,
        "layer": (32, 8),
        "batch_s": 0.03,
        "scale": 64,
    },
    "cpu": {
        "head_dim": 16,
        "heads": (1, 2),
        "whole": (16, 64),
        "end": (64,),
        "before": 64,
        "rows": 128,
        "pool": 512,
        "layer": (8, 2),
        "batch_s": 0.0,
        "scale": 8,
    },
}
CLOSE = 1.5  # of the error of dense attention in bf16: what a kernel may have

Row = dict[str, Any]


def rows_of(device: str, queries: int, keys: int, heads: int, kv_heads: int, head_dim: int) -> list[Tensor]:
    """Random Q, K, V and a gradient of the output, bf16."""
    generator = torch.Generator(device).manual_seed(0)
    shapes = ((queries, heads), (keys, kv_heads), (keys, kv_heads), (queries, heads))
    return [torch.randn(*shape, head_dim, generator=generator, device=device, dtype=torch.bfloat16) for shape in shapes]


def kernels(device: str, sizes: dict[str, Any]) -> Iterator[Row]:
    """Rates of every kernel: whole documents, and rows at the end of long ones; 4 query heads read one KV head."""
    found = available_kernels(device)
    head_dim = sizes["head_dim"]
    mask: dict[str, Any] = {"causal": True, "scale": head_dim**-0.5, "window": None}
    if not found:
        raise SystemExit(f"no kernel computes on {device}")
    for name, kernel in found.items():
        q, k, v, _ = rows_of(device, 16, 16, 1, 1, head_dim)
        segments = whole([16])
        least = timed(lambda: kernel.forward(q, k, v, segments, **mask), device, sizes["batch_s"])  # noqa: B023
        yield {"kernel": name, "kind": "launch", "forward_s": least}
    for kind in ("whole", "end"):
        for (name, kernel), rows, heads in (
            (each, rows, heads) for rows in sizes[kind] for heads in sizes["heads"] for each in found.items()
        ):
            count = sizes["rows"] // rows
            keys = rows if kind == "whole" else sizes["before"] + rows
            segments = Segments(query_lengths=(rows,) * count, key_lengths=(keys,) * count)
            q, k, v, grad = rows_of(device, rows * count, keys * count, heads, max(heads // 4, 1), head_dim)
            out, lse = kernel.forward(q, k, v, segments, **mask)
            forward = timed(lambda: kernel.forward(q, k, v, segments, **mask), device, sizes["batch_s"])  # noqa: B023
            backward = timed(
                lambda: kernel.backward(grad, q, k, v, out, lse, segments, **mask),  # noqa: B023
                device,
                sizes["batch_s"],
            )
            flops = 4 * head_dim * heads * visible_pairs(segments, causal=True, window=None)
            yield {
                "kernel": name,
                "kind": kind,
                "rows": rows,
                "heads": heads,
                "forward_s": forward,
                "backward_s": backward,
                "forward_rate": flops / forward,
                "backward_rate": 2.5 * flops / backward,
            }


def equality(device: str, sizes: dict[str, Any]) -> Iterator[Row]:
    """Root mean square errors against float64, beside those of dense attention in bf16, on this device."""
    scale, head_dim = sizes["scale"], sizes["head_dim"]
    documents = (9 * scale, scale, 4 * scale, 2 * scale, 1, 3, 130)
    ends = Segments(query_lengths=(scale, 3 * scale, 1), key_lengths=(7 * scale, 3 * scale, 5 * scale))
    across = Segments(query_lengths=(5 * scale, scale), key_lengths=(scale, 3 * scale))
    cases: dict[str, tuple[Segments, tuple[int, int], bool, int | None]] = {
        "documents": (whole(documents), (4, 4), True, None),
        "GQA 8:2": (whole(documents), (8, 2), True, None),
        "MQA 8:1": (whole(documents), (8, 1), True, None),
        "bottom right": (ends, (8, 2), True, None),
        "window": (whole(documents), (8, 2), True, scale + 1),
        "window, bottom right": (ends, (8, 2), True, 2 * scale - 1),
        "not causal": (across, (8, 2), False, None),
    }
    judged = available_kernels(device) | {"cpu": kernel_for(torch.device("cpu"))}
    for case, (segments, (heads, kv_heads), causal, window) in cases.items():
        rows = rows_of(device, segments.query_starts[-1], segments.key_starts[-1], heads, kv_heads, head_dim)
        masked = partial(masked_attention, segments=segments, causal=causal, window=window)
        mask: dict[str, Any] = {"causal": causal, "window": window, "scale": head_dim**-0.5}
        for name, kernel in judged.items():
            yield {"case": case, "kernel": name} | _compare(masked, rows, name, _by_kernel, kernel, segments, **mask)
    # As a ring does it: a further part of the keys at a time, gradients with the output and log-sum-exp of all.
    queries, keys = 3 * scale, 4 * scale
    rows, segments = rows_of(device, queries, keys, 8, 2, head_dim), _pair(queries, keys)
    masked = partial(masked_attention, segments=segments, causal=False)
    for name, kernel in judged.items():
        yield {"case": "keys in two parts", "kernel": name} | _compare(masked, rows, name, _in_two_parts, kernel)


def _pair(queries: int, keys: int) -> Segments:
    return Segments(query_lengths=(queries,), key_lengths=(keys,))


def _compare(masked: Attention, rows: list[Tensor], name: str, compute: Any, *arguments: Any, **mask: Any) -> Row:
    """What a computation differs from float64 by, as a share of what dense attention in bf16 does."""
    right = with_gradients(masked, [each.double() for each in rows])
    dense = [_error(*pair) for pair in zip(with_gradients(masked, rows), right, strict=True)]
    own = [each.to("cpu") if name == "cpu" else each for each in rows]
    errors = [
        _error(mine.to(exact.device), exact)
        for mine, exact in zip(compute(own, *arguments, **mask), right, strict=True)
    ]
    ratios = [error / other for error, other in zip(errors, dense, strict=True)]
    names = ("out", "dq", "dk", "dv")
    return {
        "errors": dict(zip(names, errors, strict=True)),
        "of_dense": dict(zip(names, ratios, strict=True)),
        "close": max(ratios) <= CLOSE,
    }


def _by_kernel(rows: list[Tensor], kernel: AttentionKernel, segments: Segments, **mask: Any) -> list[Tensor]:
    q, k, v, grad = rows
    out, lse = kernel.forward(q, k, v, segments, **mask)
    return [out, *kernel.backward(grad, q, k, v, out, lse, segments, **mask)]


def _in_two_parts(rows: list[Tensor], kernel: AttentionKernel) -> list[Tensor]:
    q, k, v, grad = rows
    mask: dict[str, Any] = {"causal": False, "scale": q.shape[-1] ** -0.5, "window": None}
    halves = list(zip(k.chunk(2), v.chunk(2), strict=True))
    segments = _pair(len(q), len(k) // 2)
    parts = [kernel.forward(q, *half, segments, **mask) for half in halves]
    (first, first_lse), further_part = parts
    merged, lse = first.float(), first_lse.clone()
    merge_parts(merged, lse, *further_part)
    out = merged.to(q.dtype)
    (dq, dk, dv), (more_dq, *further) = (kernel.backward(grad, q, *half, out, lse, segments, **mask) for half in halves)
    return [out, dq.float() + more_dq.float(), *(torch.cat(pair) for pair in zip((dk, dv), further, strict=True))]


def _error(rows: Tensor, right: Tensor) -> float:
    return (rows.double() - right).square().mean().sqrt().item()


def _pool(sizes: dict[str, Any], workers: int, chunks: int) -> tuple[list[int], PoolPlan]:
    """The packed sequence of most work of eight long-tailed ones, and its plan for so many workers."""
    lengths = max(scaled_step("magiattention", sizes["pool"], 8, 2), key=attention_load)
    heads, kv_heads = sizes["layer"]
    return lengths, plan_pool(
        [lengths],
        context_parallel=workers,
        block_size=min(sizes["pool"] // 32, sizes["pool"] // workers),
        head_shards=2,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=sizes["head_dim"],
        bytes_per_element=2,
        chunks=chunks,
    )


def _steps(device: str, sizes: dict[str, Any], plan: PoolPlan, remember: Remember, repeat: int) -> Row:
    """Forward and backward of a pool with a thread a worker: median seconds of all, bytes held between the two."""
    barrier, workers = threading.Barrier(plan.num_workers), plan.num_workers
    seconds: list[float] = []
    held, peak = [0] * workers, 0

    def work(transport: ThreadTransport) -> None:
        nonlocal peak
        prepared, rank = prepare_plan(plan, transport.rank), transport.rank
        rows = rows_of(device, prepared.work.rows, prepared.work.rows, *sizes["layer"], sizes["head_dim"])
        q, k, v = (each.requires_grad_() for each in rows[:3])
        own = {each.untyped_storage().data_ptr() for each in rows}
        kept: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        for number in range(repeat + 1):
            barrier.wait(60)
            if rank == 0:
                synchronize(device)
                if device == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                    before = torch.cuda.memory_allocated()
                begin = time.perf_counter()
            barrier.wait(60)
            kept.clear()
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                out = libra_attention(q, k, v, prepared, transport=transport, remember=remember)
            held[rank] = sum(kept.values())
            torch.autograd.grad(out, (q, k, v), rows[3])
            del out
            barrier.wait(60)
            if rank == 0:
                synchronize(device)
                if number:  # the first one also prepares
                    seconds.append(time.perf_counter() - begin)
                peak = torch.cuda.max_memory_allocated() - before if device == "cuda" else 0

    run_workers(work, workers, timeout=60)
    return {"seconds": statistics.median(seconds), "held": sum(held), "peak": peak or None}


def executor(device: str, sizes: dict[str, Any]) -> Iterator[Row]:
    """`libra_attention` by numbers of workers and chunks, beside the kernel alone; all on one device, one stream.

    Nothing is hidden here: transfers are copies on the same stream, and the threads share one interpreter. So it is
    the most that the executor can add, not what a cluster would see.
    """
    lengths, _ = _pool(sizes, 1, 1)
    kernel, head_dim, segments = kernel_for(torch.device(device)), sizes["head_dim"], whole(lengths)
    q, k, v, grad = rows_of(device, sizes["pool"], sizes["pool"], *sizes["layer"], head_dim)
    mask: dict[str, Any] = {"causal": True, "scale": head_dim**-0.5, "window": None}

    def bare() -> None:
        out, lse = kernel.forward(q, k, v, segments, **mask)
        kernel.backward(grad, q, k, v, out, lse, segments, **mask)

    alone = timed(bare, device, sizes["batch_s"])
    yield {"workers": None, "chunks": None, "seconds": alone, "of_bare": 1.0}
    for workers in (1, 2, 4, 8):
        for chunks in (1, 4) if workers > 1 else (1,):
            _, plan = _pool(sizes, workers, chunks)
            found = _steps(device, sizes, plan, "keep", 5)
            yield {"workers": workers, "chunks": chunks, "moved": 2 * plan.bytes_moved} | {
                "seconds": found["seconds"],
                "of_bare": found["seconds"] / alone,
            }


def remember(device: str, sizes: dict[str, Any]) -> Iterator[Row]:
    """Time and memory of both ways to have other workers' keys in backward, four workers, all together."""
    _, plan = _pool(sizes, 4, 4)
    for way in get_args(Remember):
        yield {"remember": way} | _steps(device, sizes, plan, way, 5)


SECTIONS: dict[str, Callable[[str, dict[str, Any]], Iterator[Row]]] = {
    "kernels": kernels,
    "equality": equality,
    "executor": executor,
    "remember": remember,
}


def calibration_of(rows: list[Row], kernel: str, where: str) -> Calibration | None:
    """Speed of a kernel as the latency model wants it; links as assumed by default. None: too little was measured.

    Of rows that were measured both as documents and at the end of one, the mean of both times a pair counts.
    """
    cells = {(row["rows"], row["heads"], row["kind"]): row for row in rows if row["kernel"] == kernel and "rows" in row}
    heads = sorted({each[1] for each in cells})
    lengths = [rows for rows in sorted({each[0] for each in cells}) if all((rows, h, "whole") in cells for h in heads)]
    launch = [row["forward_s"] for row in rows if row["kernel"] == kernel and row["kind"] == "launch"]
    if not lengths or not launch:
        return None
    peak = max(cell["forward_rate"] for cell in cells.values())

    def share(length: int, count: int) -> float:
        found = [
            cells[length, count, kind]["forward_rate"] for kind in ("whole", "end") if (length, count, kind) in cells
        ]
        return float(f"{statistics.harmonic_mean(found) / peak:.4g}")

    return dataclasses.replace(
        DEFAULT_CALIBRATION,
        source=f"kernel {kernel} measured on {where}; links assumed, not measured: those of the default",
        peak_flops=peak,
        efficiency_rows=tuple(lengths),
        efficiency_heads=tuple(heads),
        efficiency=tuple(tuple(share(length, count) for count in heads) for length in lengths),
        backward_ratio=statistics.median(cell["backward_s"] / cell["forward_s"] for cell in cells.values()),
        launch_seconds=launch[0],
    )
