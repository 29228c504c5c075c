"""Ulysses: an all-to-all from rows to heads, attention over whole documents, an all-to-all back.

Source: DeepSpeed Ulysses (Jacobs et al., arXiv:2309.14509). With fewer KV heads than ranks a KV head goes to every rank
whose query heads read it, and to no other.

Names of tensors end in their shape. T: rows of the rank's home. L: rows of the packed sequence. N: those of them that
belong to documents. h: query heads, g: KV heads of the model. a, b: those of a rank. c: a + 2 b. D: elements of a head.
"""

# ruff: noqa: N803, N806

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from odb_libra_lightning.baselines.replica_shards import (
    ReplicaSequence,
    accumulation_dtype,
    check_shards,
    exchange,
    replica_sequence,
)
from odb_libra_lightning.libra.kernel_interface import AttentionKernel, score_scale
from odb_libra_lightning.libra.kernels import kernel_for
from odb_libra_lightning.libra.layout import PoolLayout
from odb_libra_lightning.libra.pool_plan import PoolPlan
from odb_libra_lightning.libra.segments import Segments
from odb_libra_lightning.libra.transport import Transport, agree


def ulysses_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: PoolPlan,
    *,
    transport: Transport,
    kernel: str | AttentionKernel | None = None,
    scale: float | None = None,
    replica: int | None = None,
) -> torch.Tensor:
    """Causal attention inside the documents of a replica's packed sequence, over local shards.

    Exact and differentiable; every rank of the group calls it, and makes one all-to-all for the heads and one for the
    output, in backward the same the other way round.

    Args:
        q: queries of the rank's home, `[T, h, D]`.
        k: keys, `[T, g, D]`.
        v: values, `[T, g, D]`.
        plan: of the replica's pool; its documents, heads and window are used, not its placement.
        transport: the replica's context-parallel group.
        kernel: name of a kernel in `libra.kernels`, or a kernel; None: the best one of the device.
        scale: factor of the scores, above 0; None: `D ** -0.5`.
        replica: which of the plan's replicas this is; None where there is only one.

    Returns:
        Output of the rank's home, `[T, h, D]`; 0 in rows of no document.

    Raises:
        ValueError: query heads that cannot be dealt to the ranks, inputs that do not fit the plan, a `scale` that is
            no finite number above 0, or another rank that comes with another plan or dtype.
        TypeError: a `kernel` that is neither a name nor a kernel.
    """
    replica = check_shards(q, k, v, plan, transport, replica)
    if plan.layout.num_heads % transport.size:
        heads = plan.layout.num_heads
        fits = ", ".join(str(ranks) for ranks in range(1, heads + 1) if heads % ranks == 0)
        raise ValueError(
            f"context_parallel={transport.size} does not divide num_heads={heads}, which Ulysses deals to the ranks; "
            f"degrees of {fits} would fit"
        )
    run = _Run(
        deal=_deal(plan, replica),
        transport=transport,
        kernel=kernel_for(q.device, kernel),
        scale=score_scale(scale, q.shape[-1]),
        window=plan.layout.window,
    )
    agree(transport, "ulysses", plan.hash, replica, q.dtype, run.scale)
    out: torch.Tensor = _Ulysses.apply(q, k, v, run)  # type: ignore[no-untyped-call]
    return out


@dataclass(frozen=True, kw_only=True)
class _Deal:
    """Which heads go to which rank, and the segments there. All ranks compute the same rows.

    Attributes:
        sequence: of the replica.
        layout: of the plan.
        width: query heads of a rank.
        kv_heads: KV heads that each rank reads.
        segments: all documents of the sequence.
    """

    sequence: ReplicaSequence
    layout: PoolLayout
    width: int
    kv_heads: tuple[range, ...]
    segments: Segments

    def query_heads(self, rank: int) -> range:
        return range(rank * self.width, (rank + 1) * self.width)

    def readers(self, rank: int) -> list[range]:
        """For each KV head of a rank those of its query heads, counted from its first, that read it."""
        group = self.layout.num_heads // self.layout.num_kv_heads
        first = rank * self.width
        return [
            range(max(head * group - first, 0), min((head + 1) * group - first, self.width))
            for head in self.kv_heads[rank]
        ]

    def elements(self, rank: int) -> int:
        """Elements of a row of Q, K and V that a rank gets."""
        return self.heads(rank) * self.layout.head_dim

    def heads(self, rank: int) -> int:
        """Heads of Q, K and V that a rank gets."""
        return self.width + 2 * len(self.kv_heads[rank])


@lru_cache(maxsize=16)
def _deal(plan: PoolPlan, replica: int) -> _Deal:
    """Computed once for all layers of a model."""
    layout = plan.layout
    sequence = replica_sequence(plan, replica)
    width, group = layout.num_heads // layout.context_parallel, layout.num_heads // layout.num_kv_heads
    firsts = range(0, layout.num_heads, width)
    lengths = sequence.document_lengths
    return _Deal(
        sequence=sequence,
        layout=layout,
        width=width,
        kv_heads=tuple(range(first // group, -(-(first + width) // group)) for first in firsts),
        segments=Segments(query_lengths=lengths, key_lengths=lengths),
    )


@dataclass(frozen=True, kw_only=True)
class _Run:
    """What a call has beside its tensors."""

    deal: _Deal
    transport: Transport
    kernel: AttentionKernel
    scale: float
    window: int | None

    def heads_in(self, q_ThD: torch.Tensor, k_TgD: torch.Tensor, v_TgD: torch.Tensor) -> torch.Tensor:
        """From home to heads: Q, K and V of the rank's heads, `[L, a + 2 b, D]`."""
        deal, rank, ranks = self.deal, self.transport.rank, range(self.transport.size)
        rows = deal.sequence.home_rows
        parts = []
        for other in ranks:
            heads, kv = deal.query_heads(other), deal.kv_heads[other]
            queries, pair = q_ThD[:, heads.start : heads.stop], (k_TgD, v_TgD)
            parts.append(torch.cat([queries, *(each[:, kv.start : kv.stop] for each in pair)], 1).flatten())
        received = exchange(
            self.transport,
            torch.cat(parts),
            [count * deal.elements(rank) for count in rows],
            [rows[rank] * deal.elements(other) for other in ranks],
        )
        return received.view(deal.sequence.rows, deal.heads(rank), deal.layout.head_dim)

    def heads_out(self, rows_LcD: torch.Tensor) -> list[torch.Tensor]:
        """From heads home: of each rank the gradients of its heads' Q, K and V there, `[T, a + 2 b, D]`."""
        deal, rank, ranks = self.deal, self.transport.rank, range(self.transport.size)
        rows = deal.sequence.home_rows
        splits = [rows[rank] * deal.elements(other) for other in ranks]
        sent = [count * deal.elements(rank) for count in rows]
        received = exchange(self.transport, rows_LcD.flatten(), splits, sent)
        shapes = [(rows[rank], deal.heads(other), deal.layout.head_dim) for other in ranks]
        return [part.view(shape) for part, shape in zip(torch.split(received, splits), shapes, strict=True)]

    def output_home(self, out_LaD: torch.Tensor) -> torch.Tensor:
        """Of every rank its heads of the home's rows: `[T, h, D]`."""
        rows, ranks = self.deal.sequence.home_rows, self.transport.size
        mine = rows[self.transport.rank]
        received = exchange(self.transport, out_LaD, [mine] * ranks, rows)
        return received.view(ranks, mine, *out_LaD.shape[1:]).transpose(0, 1).flatten(1, 2)

    def gradient_in(self, grad_ThD: torch.Tensor) -> torch.Tensor:
        """Of the whole sequence the rank's heads: `[L, a, D]`."""
        rows, ranks = self.deal.sequence.home_rows, self.transport.size
        mine = rows[self.transport.rank]
        sent = torch.cat(grad_ThD.chunk(ranks, 1))
        return exchange(self.transport, sent, rows, [mine] * ranks)


class _Ulysses(torch.autograd.Function):
    """Saves on every rank the Q, K and V of its heads: a checkpoint's recomputation then makes all exchanges."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, run: _Run) -> torch.Tensor:
        rows_LcD = run.heads_in(q, k, v)
        q_NaD, k_NaD, v_NaD = _split(rows_LcD, run)
        out_NaD, lse_aN = run.kernel.forward(
            q_NaD, k_NaD, v_NaD, run.deal.segments, causal=True, scale=run.scale, window=run.window
        )
        out_LaD = out_NaD.new_zeros(len(rows_LcD), *out_NaD.shape[1:])
        out_LaD[: len(out_NaD)] = out_NaD
        ctx.run = run
        ctx.exchanges_gradients = True
        ctx.save_for_backward(rows_LcD, out_NaD, lse_aN)
        return run.output_home(out_LaD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        run: _Run = ctx.run
        rows_LcD, out_NaD, lse_aN = ctx.saved_tensors
        grad_NaD = run.gradient_in(grad_out)[: len(out_NaD)]
        gradients = run.kernel.backward(
            grad_NaD,
            *_split(rows_LcD, run),
            out_NaD,
            lse_aN,
            run.deal.segments,
            causal=True,
            scale=run.scale,
            window=run.window,
        )
        parts = run.heads_out(_join(*gradients, rows_LcD, run))
        return *_add_up(parts, run), None


def _split(rows_LcD: torch.Tensor, run: _Run) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Q, K and V of the rows of documents; a copy for each reader where KV heads have unequal numbers of them."""
    deal, rank = run.deal, run.transport.rank
    count = len(deal.kv_heads[rank])
    q, k, v = torch.split(rows_LcD[: deal.sequence.tokens], [deal.width, count, count], 1)
    if _even(deal.readers(rank)):
        return q, k, v
    read = [at for at, readers in enumerate(deal.readers(rank)) for _ in readers]
    return q, k[:, read], v[:, read]


def _join(
    dq_NaD: torch.Tensor,
    dk_NaD: torch.Tensor,
    dv_NaD: torch.Tensor,
    rows_LcD: torch.Tensor,
    run: _Run,
) -> torch.Tensor:
    """The reverse of `_split`: gradients of all rows, 0 in padding."""
    deal, rank = run.deal, run.transport.rank
    gradient_LcD = torch.zeros_like(rows_LcD)
    dq, dk, dv = torch.split(gradient_LcD[: len(dq_NaD)], [deal.width] + [len(deal.kv_heads[rank])] * 2, 1)
    dq.copy_(dq_NaD)
    for total, part in ((dk, dk_NaD), (dv, dv_NaD)):
        if _even(deal.readers(rank)):
            total.copy_(part)
            continue
        for at, readers in enumerate(deal.readers(rank)):
            read = part[:, readers.start : readers.stop]
            total[:, at] = read.sum(1, dtype=accumulation_dtype(part.dtype))
    return gradient_LcD


def _even(readers: list[range]) -> bool:
    return len({len(each) for each in readers}) == 1


def _add_up(parts: list[torch.Tensor], run: _Run) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients at home: of Q side by side, of K and V added in order of the ranks."""
    deal = run.deal
    first = parts[0]
    dq = torch.cat([part[:, : deal.width] for part in parts], 1)
    shape = (len(first), deal.layout.num_kv_heads, first.shape[-1])
    dk, dv = (first.new_zeros(shape, dtype=accumulation_dtype(first.dtype)) for _ in range(2))
    for part, heads in zip(parts, deal.kv_heads, strict=True):
        part_k, part_v = part[:, deal.width :].chunk(2, 1)
        dk[:, heads.start : heads.stop] += part_k
        dv[:, heads.start : heads.stop] += part_v
    return dq, dk.to(first.dtype), dv.to(first.dtype)
