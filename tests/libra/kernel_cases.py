"""Segments with tensors: attention over them by a kernel, and by an explicit mask in float64."""

from __future__ import annotations

import math
from typing import Any

import torch

from odb_libra_lightning.libra.kernel_interface import AttentionKernel
from odb_libra_lightning.libra.segments import Segments

HEAD_DIM = 16
RESULTS = ("out", "lse", "dq", "dk", "dv")


def segments_of(*lengths: tuple[int, int]) -> Segments:
    return Segments(query_lengths=tuple(q for q, _ in lengths), key_lengths=tuple(k for _, k in lengths))


def documents_of(*lengths: int) -> Segments:
    return Segments(query_lengths=lengths, key_lengths=lengths)


def inputs_of(
    segments: Segments,
    heads: tuple[int, int],
    dtype: torch.dtype = torch.float64,
    *,
    head_dim: int = HEAD_DIM,
    seed: int = 0,
) -> list[torch.Tensor]:
    """Queries, keys, values and the gradient of the output."""
    generator = torch.Generator().manual_seed(seed)
    queries, keys = sum(segments.query_lengths), sum(segments.key_lengths)
    shapes = [(queries, heads[0]), (keys, heads[1]), (keys, heads[1]), (queries, heads[0])]
    return [torch.randn(*shape, head_dim, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def visible_pairs(segments: Segments, causal: bool, window: int | None) -> torch.Tensor:
    """The mask, [queries, keys], pair by pair."""
    blocks = []
    for queries, keys in zip(segments.query_lengths, segments.key_lengths, strict=True):
        block = torch.ones(queries, keys, dtype=torch.bool)
        for row in range(queries):
            own = keys - queries + row
            if causal:
                block[row, own + 1 :] = False
                if window is not None:
                    block[row, : max(0, own + 1 - window)] = False
        blocks.append(block)
    return torch.block_diag(*blocks).bool() if blocks else torch.ones(0, 0, dtype=torch.bool)


def dense_results(
    inputs: list[torch.Tensor], segments: Segments, causal: bool, scale: float, window: int | None
) -> tuple[torch.Tensor, ...]:
    q, k, v, grad_out = (each.double() for each in inputs)
    q, k, v = (each.requires_grad_() for each in (q.clone(), k.clone(), v.clone()))
    group = q.shape[1] // k.shape[1]
    scores = scale * torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1))
    scores = scores.masked_fill(~visible_pairs(segments, causal, window), -math.inf)
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.repeat_interleave(group, 1))
    grads = torch.autograd.grad(out, (q, k, v), grad_out)
    return (out.detach(), scores.logsumexp(-1).detach(), *grads)


def results_of(
    kernel: AttentionKernel,
    inputs: list[torch.Tensor],
    segments: Segments,
    causal: bool = True,
    scale: float = 0.25,
    window: int | None = None,
) -> tuple[torch.Tensor, ...]:
    q, k, v, grad_out = inputs
    options: Any = {"causal": causal, "scale": scale, "window": window}
    out, lse = kernel.forward(q, k, v, segments, **options)
    return (out, lse, *kernel.backward(grad_out, q, k, v, out, lse, segments, **options))


def assert_close(results: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...], tolerance: float) -> None:
    for name, result, right in zip(RESULTS, results, expected, strict=True):
        assert result.shape == right.shape, name
        if right.numel():
            error = (result.double() - right).abs().max() / right.abs().max().clamp(min=1)
            assert error < tolerance, f"{name}: {error}"
