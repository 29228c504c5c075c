"""What the benchmarks of attention share: documents, a kernel that keeps account, and attention by an explicit mask."""

from __future__ import annotations

import contextlib
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from odb_libra_lightning.data.length_mixes import LENGTH_MIXES, length_mix
from odb_libra_lightning.libra.kernel_interface import AttentionKernel
from odb_libra_lightning.libra.kernels import KERNELS, kernel_for
from odb_libra_lightning.libra.load import causal_pairs
from odb_libra_lightning.libra.packing import pack_sequential
from odb_libra_lightning.libra.segments import Segments

Step = list[list[int]]  # document lengths of each packed sequence
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def scaled_step(mix: str, sequence_length: int, sequences: int, seed: int) -> Step:
    """Packed sequences of a mix whose documents are shortened as much as the sequences are.

    The shape of the work stays: a document keeps its share of a packed sequence. A stream cut every `sequence_length`.
    """
    scale = sequence_length / LENGTH_MIXES[mix].l_max
    documents = 1024
    while True:
        lengths = np.maximum(np.rint(length_mix(mix, documents, seed=seed) * scale), 1).astype(np.int64)
        packed = pack_sequential(lengths, sequence_length, drop_last=True)
        if len(packed) >= sequences:
            return packed.all_document_lengths()[:sequences]
        documents *= 2


class CountedKernel:
    """A kernel whose calls are timed, and their work counted.

    Attributes:
        seconds: by the clock, of forward and backward calls together.
        pairs: visible query-key pairs times query heads, of forward calls.
        calls: forward calls with anything to compute.
    """

    def __init__(self, inner: AttentionKernel, clock: Callable[[], float]) -> None:
        self._inner, self._clock = inner, clock
        self.clear()

    def clear(self) -> None:
        """Begin anew."""
        self.seconds, self.pairs, self.calls = 0.0, 0, 0

    def forward(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, **mask: Any) -> tuple[Tensor, Tensor]:
        """See `AttentionKernel.forward`."""
        self.pairs += q.shape[1] * visible_pairs(segments, causal=mask["causal"], window=mask["window"])
        self.calls += len(segments) > 0
        begin = self._clock()
        result = self._inner.forward(q, k, v, segments, **mask)
        self.seconds += self._clock() - begin
        return result

    def backward(self, *arguments: Any, **mask: Any) -> tuple[Tensor, Tensor, Tensor]:
        """See `AttentionKernel.backward`."""
        begin = self._clock()
        result = self._inner.backward(*arguments, **mask)
        self.seconds += self._clock() - begin
        return result


@lru_cache(maxsize=256)
def visible_pairs(segments: Segments, *, causal: bool, window: int | None) -> int:
    """Query-key pairs of one head that a kernel call on these segments has to compute."""
    queries, keys = np.array(segments.query_lengths, np.int64), np.array(segments.key_lengths, np.int64)
    return int(causal_pairs(keys - queries, keys, window=window).sum() if causal else queries @ keys)


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, *, causal: bool = True, window: int | None = None
) -> Tensor:
    """Attention by an explicit mask, segment by segment, in the dtype of the tensors; differentiable.

    Args:
        q: queries, `[Tq, query heads, D]`.
        k: keys, `[Tk, KV heads, D]`.
        v: values, like `k`.
        segments: runs of them.
        causal: aligned to the bottom right.
        window: keys that a query sees at the most.
    """
    group = q.shape[1] // k.shape[1]
    parts = []
    runs = (torch.split(rows, lengths) for rows, lengths in _with_lengths(q, k, v, segments))
    for queries, keys, values in zip(*runs, strict=True):
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        scores = torch.einsum("ihd,jhd->hij", queries, keys) * q.shape[-1] ** -0.5
        if causal:
            own = torch.arange(len(keys) - len(queries), len(keys), device=q.device)[:, None]
            distance = own - torch.arange(len(keys), device=q.device)
            hidden = (distance < 0) | (distance >= (window or len(keys)))
            scores = scores.masked_fill(hidden, -torch.inf)
        parts.append(torch.einsum("hij,jhd->ihd", scores.softmax(-1), values))
    return torch.cat(parts)


def _with_lengths(q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> list[tuple[Tensor, list[int]]]:
    queries, keys = list(segments.query_lengths), list(segments.key_lengths)
    return [(q, queries), (k, keys), (v, keys)]


def available_kernels(device: str) -> dict[str, AttentionKernel]:
    """Kernels that compute something here."""
    found = {}
    for name in KERNELS:
        with contextlib.suppress(ValueError):
            kernel = kernel_for(torch.device(device), name)
            rows = torch.zeros(8, 1, 16, dtype=torch.bfloat16, device=device)
            kernel.forward(rows, rows, rows, whole([8]), causal=True, scale=1.0, window=None)
            found[name] = kernel
    return found


def timed(call: Callable[[], object], device: str, batch_s: float) -> float:
    """Seconds of a call, the median of three batches of calls that follow one another at once."""
    call()
    synchronize(device)
    begin = time.perf_counter()
    call()
    synchronize(device)
    count = 1 + int(batch_s / (time.perf_counter() - begin))
    batches = []
    for _ in range(3):
        begin = time.perf_counter()
        for _ in range(count):
            call()
        synchronize(device)
        batches.append((time.perf_counter() - begin) / count)
    return statistics.median(batches)


def synchronize(device: str) -> None:
    """Wait for what has been queued on a device."""
    if device == "cuda":
        torch.cuda.synchronize()


def with_gradients(attend: Attention, rows: Sequence[Tensor]) -> list[Tensor]:
    """Output and gradients of Q, K and V, of which with the output's gradient `rows` are."""
    q, k, v = (each.detach().clone().requires_grad_() for each in rows[:3])
    out = attend(q, k, v)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), rows[3])]


def whole(lengths: Sequence[int]) -> Segments:
    """Documents one after another, each with its own keys."""
    return Segments(query_lengths=tuple(lengths), key_lengths=tuple(lengths))


def machine(device: str = "cpu") -> str:
    """This machine in words."""
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    if device == "cuda":
        return f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}, {versions}"
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
        model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), model)
    return f"{model}, {os.cpu_count()} cores, {versions}"
