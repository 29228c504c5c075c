"""Ring attention: queries stay, keys and values go round the ranks of a replica, partial results are merged.

A packed sequence is cut in `2 CP` pieces of equal rows, and rank `r` computes pieces `r` and `2 CP - 1 - r` (zigzag),
so that causal work of long documents is even. Sources: Ring Attention (Liu et al., arXiv:2310.01889); even work under a
causal mask: Striped Attention (Brandon et al., arXiv:2311.09431).

Public varlen implementations of zigzag cut each document in `2 CP` pieces, so that every document is even by itself;
they need lengths that `2 CP` divides, and rows that are dealt out that way beforehand. Here rows come as Libra's homes
have them, and the cut does not ask where documents end. So with packed short documents this ring's straggler ratio is
worse than theirs would be.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from odb_libra_lightning.baselines.replica_shards import accumulation_dtype, check_shards, exchange, replica_sequence
from odb_libra_lightning.baselines.ring_schedule import RingSchedule, Run, ring_schedule
from odb_libra_lightning.libra.kernel_interface import AttentionKernel, merge_parts, score_scale
from odb_libra_lightning.libra.kernels import kernel_for
from odb_libra_lightning.libra.pool_plan import PoolPlan
from odb_libra_lightning.libra.transport import Handle, Transport, agree


def ring_attention(
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

    Exact and differentiable. Every rank of the group calls it, and takes part in `CP + 1` transfers forward and
    `2 CP + 1` backward whatever it has to compute. The next block of keys is under way while one is computed; partial
    results and gradients are added in float32 (float64 of float64 inputs).

    Args:
        q: queries of the rank's home, `[T, query heads, D]`.
        k: keys, `[T, KV heads, D]`.
        v: values, `[T, KV heads, D]`.
        plan: of the replica's pool; its documents, heads and window are used, not its placement.
        transport: the replica's context-parallel group.
        kernel: name of a kernel in `libra.kernels`, or a kernel; None: the best one of the device.
        scale: factor of the scores, above 0; None: `D ** -0.5`.
        replica: which of the plan's replicas this is; None where there is only one.

    Returns:
        Output of the rank's home, `[T, query heads, D]`; 0 in rows of no document.

    Raises:
        ValueError: inputs that do not fit the plan, a `scale` that is no finite number above 0, or another rank that
            comes with another plan or dtype.
        TypeError: a `kernel` that is neither a name nor a kernel.
    """
    replica = check_shards(q, k, v, plan, transport, replica)
    ring = _Ring(
        schedule=_schedule(plan, replica, transport.rank),
        transport=transport,
        kernel=kernel_for(q.device, kernel),
        scale=score_scale(scale, q.shape[-1]),
    )
    agree(transport, "ring", plan.hash, replica, q.dtype, ring.scale)
    out: torch.Tensor = _RingAttention.apply(q, k, v, ring)  # type: ignore[no-untyped-call]
    return out


@lru_cache(maxsize=64)
def _schedule(plan: PoolPlan, replica: int, rank: int) -> RingSchedule:
    """Computed once for all layers of a model."""
    sequence = replica_sequence(plan, replica)
    return ring_schedule(sequence, rank, plan.layout.context_parallel, window=plan.layout.window)


@dataclass(frozen=True, kw_only=True)
class _Ring:
    """What a call has beside its tensors."""

    schedule: RingSchedule
    transport: Transport
    kernel: AttentionKernel
    scale: float

    def to_block(self, home: torch.Tensor) -> torch.Tensor:
        """From the rows of the home to those of the block."""
        schedule = self.schedule
        pieces = torch.split(home, list(schedule.home_pieces))
        sent = torch.cat(pieces[::-1] if schedule.swapped else pieces)
        return exchange(self.transport, sent, schedule.block_splits, schedule.home_splits)

    def to_home(self, block: torch.Tensor) -> torch.Tensor:
        """The reverse of `to_block`; `block` is given up."""
        schedule = self.schedule
        rows = exchange(self.transport, block, schedule.home_splits, schedule.block_splits)
        if not schedule.swapped:
            return rows
        first, second = schedule.home_pieces
        return torch.cat(torch.split(rows, [second, first])[::-1])

    @property
    def last_step(self) -> int:
        """The step after which keys are not passed on."""
        return self.transport.size - 1

    def attend(self, run: Run, q: torch.Tensor, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and log-sum-exp of a run's queries among its keys."""
        k, v = kv.tensor_split(2)
        q, k, v = _turned(run, q[run.queries], k[run.keys], v[run.keys])
        out, lse = self.kernel.forward(q, k, v, run.segments, causal=run.causal, scale=self.scale, window=run.window)
        return _turned(run, out)[0], _turned(run, lse, dim=1)[0]

    def gradients(
        self,
        run: Run,
        grad_out: torch.Tensor,
        q: torch.Tensor,
        kv: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> list[torch.Tensor]:
        """What a run adds to the gradients of its queries, keys and values; `out` and `lse` are those of all keys."""
        k, v = kv.tensor_split(2)
        grad_out, q, out = (each[run.queries] for each in (grad_out, q, out))
        grad_out, q, k, v, out = _turned(run, grad_out, q, k[run.keys], v[run.keys], out)
        (lse,) = _turned(run, lse[:, run.queries], dim=1)
        gradients = self.kernel.backward(
            grad_out, q, k, v, out, lse, run.segments, causal=run.causal, scale=self.scale, window=run.window
        )
        return _turned(run, *gradients)

    def origin(self, step: int) -> int:
        """The rank whose keys are here at a step."""
        return (self.transport.rank - step) % self.transport.size

    def pass_on(self, sent: torch.Tensor, step: int) -> _Passing:
        """Begin to hand to the next rank what belongs to the keys of a step, and to receive the same of the next."""
        rank, size = self.transport.rank, self.transport.size
        received = sent.new_empty(2 * self.schedule.block_rows[self.origin(step + 1)], *sent.shape[1:])
        send, receive = [0] * size, [0] * size
        send[(rank + 1) % size] = len(sent)
        receive[(rank - 1) % size] = len(received)
        return _Passing(self.transport.all_to_all(received, sent, receive, send), received, sent)


@dataclass(frozen=True)
class _Passing:
    """A transfer under way. It keeps what is sent until then."""

    handle: Handle
    received: torch.Tensor
    sent: torch.Tensor

    def wait(self) -> torch.Tensor:
        self.handle.wait()
        return self.received


def _turned(run: Run, *rows: torch.Tensor, dim: int = 0) -> list[torch.Tensor]:
    """Tensors in the direction of a run, or back from it."""
    return [each.flip(dim) for each in rows] if run.backwards else list(rows)


class _RingAttention(torch.autograd.Function):
    """Saves tensors on every rank, empty ones too: a checkpoint's recomputation then makes all transfers.

    Keys and values travel in one buffer `[2 rows, KV heads, D]`, keys first, and so do their gradients.
    """

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ring: _Ring) -> torch.Tensor:
        block = ring.to_block(torch.cat([q, k, v], 1))
        heads = [q.shape[1], k.shape[1], v.shape[1]]
        q, *pair = torch.split(block, heads, 1)
        out = torch.zeros_like(q, dtype=accumulation_dtype(q.dtype))
        lse = out.new_full((q.shape[1], len(q)), -torch.inf)
        kv = torch.cat(pair)
        for step, runs in enumerate(ring.schedule.steps):
            passing = ring.pass_on(kv, step) if step < ring.last_step else None
            for run in runs:
                merge_parts(out[run.queries], lse[:, run.queries], *ring.attend(run, q, kv))
            if passing is not None:
                kv = passing.wait()
        out = out.to(q.dtype)
        ctx.ring, ctx.heads = ring, heads
        ctx.exchanges_gradients = True
        ctx.save_for_backward(block, out, lse)
        return ring.to_home(out.clone())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        ring: _Ring = ctx.ring
        block, out, lse = ctx.saved_tensors
        grad_out = ring.to_block(grad_out)
        q, *pair = torch.split(block, ctx.heads, 1)
        kv = torch.cat(pair)
        dq = torch.zeros_like(q, dtype=accumulation_dtype(q.dtype))
        arriving: _Passing | None = None
        for step, runs in enumerate(ring.schedule.steps):
            passing = ring.pass_on(kv, step) if step < ring.last_step else None
            dkv = torch.zeros_like(kv, dtype=dq.dtype)
            for run in runs:
                dq_part, dk_part, dv_part = ring.gradients(run, grad_out, q, kv, out, lse)
                dk, dv = dkv.tensor_split(2)
                dq[run.queries] += dq_part
                dk[run.keys] += dk_part
                dv[run.keys] += dv_part
            # A block's gradient follows it one step behind, and is added to in the order of the ring.
            if arriving is not None:
                dkv += arriving.wait()
            if ring.transport.size > 1:
                arriving = ring.pass_on(dkv, step)
            if passing is not None:
                kv = passing.wait()
        if arriving is not None:
            dkv = arriving.wait()
        gradient = torch.cat([dq, *dkv.tensor_split(2)], 1).to(q.dtype)
        dq, dk, dv = torch.split(ring.to_home(gradient), ctx.heads, 1)
        return dq, dk, dv, None
