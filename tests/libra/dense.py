"""Attention over the packed sequences of a pool by an explicit mask, in one process, with autograd: what is right.

It knows document lengths, not plans. Rows count over the whole pool, sequence after sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from odb_libra_lightning.libra.segments import Segments

Lengths = Sequence[Sequence[int]]


def documents_of_rows(lengths: Lengths, sequence_length: int | None = None) -> Tensor:
    """Number of the document of every row of a pool; -1 in padding."""
    rows: list[int] = []
    document = 0
    for sequence in lengths:
        begin = len(rows)
        for length in sequence:
            rows += [document] * length
            document += 1
        if sequence_length is not None:
            rows += [-1] * (sequence_length - (len(rows) - begin))
    return torch.tensor(rows)


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor, *, window: int | None = None, scale: float | None = None
) -> Tensor:
    """Output of all rows, `[rows, heads, D]`: each query sees its document up to itself, or its last `window` keys.

    Args:
        q: queries, `[rows, heads, D]`.
        k: keys, `[rows, KV heads, D]`.
        v: values, `[rows, KV heads, D]`.
        documents: number of the document of each row, -1 in padding, where the output is 0.
        window: keys that a query sees at the most, its own included.
        scale: factor of the scores.
    """
    inside = (documents >= 0).nonzero().flatten()
    at = documents[inside]
    distance = inside[:, None] - inside[None, :]
    seen = (at[:, None] == at[None, :]) & (distance >= 0)
    if window is not None:
        seen &= distance < window
    group = q.shape[1] // k.shape[1]
    keys, values = (each[inside].repeat_interleave(group, 1) for each in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q[inside], keys) * (q.shape[-1] ** -0.5 if scale is None else scale)
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.zeros_like(q).index_copy(0, inside, torch.einsum("hij,jhd->ihd", weights, values))


def home_starts(lengths: Lengths, context_parallel: int, sequence_length: int | None = None) -> list[int]:
    """First row of each worker's home, and the end of the last: `[workers + 1]`."""
    starts, begin = [], 0
    for sequence in lengths:
        rows = sum(sequence) if sequence_length is None else sequence_length
        starts += [begin + rank * rows // context_parallel for rank in range(context_parallel)]
        begin += rows
    return [*starts, begin]


def split(rows: Tensor, starts: Sequence[int]) -> list[Tensor]:
    """The shard of each worker, a leaf of its own."""
    shards = [rows[start:stop] for start, stop in pairwise(starts)]
    return [shard.detach().clone().requires_grad_(rows.requires_grad) for shard in shards]


def gather(shards: Sequence[Tensor]) -> Tensor:
    """All rows from the shards."""
    return torch.cat(list(shards))


class DenseKernel:
    """An `AttentionKernel` by explicit masks and autograd, in float32, or float64 for float64 tensors."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, *, causal: bool, scale: float, window: int | None
    ) -> tuple[Tensor, Tensor]:
        """See `AttentionKernel.forward`."""
        scores = self._scores(q, k, segments, causal=causal, scale=scale, window=window)
        lse = scores.logsumexp(-1)
        weights = (scores - lse[..., None]).exp()
        return torch.einsum("hij,jhd->ihd", weights, _wide(v, q.shape[1])).to(q.dtype), lse

    def backward(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        segments: Segments,
        *,
        causal: bool,
        scale: float,
        window: int | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `AttentionKernel.backward`."""
        scores = self._scores(q, k, segments, causal=causal, scale=scale, window=window)
        heads = q.shape[1]
        wide_grad, wide_out = _wide(grad_out, heads), _wide(out, heads)
        weights = (scores - lse[..., None]).exp()
        dv = torch.einsum("hij,ihd->jhd", weights, wide_grad)
        inner = torch.einsum("ihd,jhd->hij", wide_grad, _wide(v, heads)) - (wide_grad * wide_out).sum(-1).t()[..., None]
        slope = weights * inner * scale
        dq = torch.einsum("hij,jhd->ihd", slope, _wide(k, heads))
        dk = torch.einsum("hij,ihd->jhd", slope, _wide(q, heads))
        dk, dv = (each.unflatten(1, (k.shape[1], -1)).sum(2) for each in (dk, dv))
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)

    @staticmethod
    def _scores(q: Tensor, k: Tensor, segments: Segments, *, causal: bool, scale: float, window: int | None) -> Tensor:
        assert (len(q), len(k)) == (segments.query_starts[-1], segments.key_starts[-1])
        assert causal or window is None
        seen = torch.zeros(len(q), len(k), dtype=torch.bool)
        for number, (queries, keys) in enumerate(zip(segments.query_lengths, segments.key_lengths, strict=True)):
            assert keys >= (queries if causal else 1)
            # How far before its own key a key is, for queries aligned to the bottom right.
            distance = torch.arange(queries)[:, None] + (keys - queries) - torch.arange(keys)
            block = torch.ones_like(distance, dtype=torch.bool)
            if causal:
                block &= distance >= 0
            if window is not None:
                block &= distance < window
            start, key = segments.query_starts[number], segments.key_starts[number]
            seen[start : start + queries, key : key + keys] = block
        scores = torch.einsum("ihd,jhd->hij", _wide(q, q.shape[1]), _wide(k, q.shape[1])) * scale
        return scores.masked_fill(~seen, -torch.inf)


def _wide(rows: Tensor, heads: int) -> Tensor:
    """Rows in the dtype that is computed in, a KV head repeated for each query head that reads it."""
    rows = rows.double() if rows.dtype == torch.float64 else rows.float()
    return rows.repeat_interleave(heads // rows.shape[1], 1)
