"""A worker's plan with its indices on a device, shared by all layers of a model."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from odb_libra_lightning.libra.pool_plan import PoolPlan
from odb_libra_lightning.libra.segments import Segments, to_device
from odb_libra_lightning.libra.worker_plan import Index, WorkerPlan, plan_worker

# Additions to distinct rows, one round after another where a row has several: the same order every time.
Rounds = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True)
class KeyIndex:
    """`KeyChunk` as int64 tensors; a round is (rows to add to, positions of what is added)."""

    sent: Tensor
    home: Tensor
    home_at: Tensor
    remote: Tensor
    remote_at: Tensor
    returned: Tensor
    home_rounds: Rounds
    remote_rounds: Rounds
    added_rounds: Rounds


@dataclass(frozen=True, kw_only=True)
class PlanIndex:
    """`WorkerPlan` as int64 tensors."""

    sent: Tensor
    home: Tensor
    home_at: Tensor
    remote_at: Tensor
    keys: tuple[KeyIndex, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class PreparedPlan:
    """The plan of a pool as one worker carries it out.

    Attributes:
        plan: the pool's plan.
        worker: number of this worker in it.
        work: what this worker does.
    """

    plan: PoolPlan
    worker: int
    work: WorkerPlan
    _indices: dict[torch.device, PlanIndex] = field(default_factory=dict, init=False, repr=False)

    @property
    def chunks(self) -> int:
        """Slices of a tile's heads, `M`."""
        return self.plan.layout.chunks

    @cached_property
    def segments(self) -> Segments:
        """What the kernel is called on."""
        return Segments(query_lengths=self.work.query_lengths, key_lengths=self.work.key_lengths)

    @cached_property
    def documents_at_home(self) -> Segments | None:
        """The rows at home as segments for all heads at once, where nothing of the pool travels; None elsewhere.

        Every worker then computes its own rows, in order, with no keys but their own, and the same for each head shard.
        """
        if self.moves_queries or len(self.plan.keys):
            return None
        lengths = self.work.query_lengths[: len(self.work.query_lengths) // self.plan.layout.head_shards]
        return Segments(query_lengths=lengths, key_lengths=lengths)

    @property
    def moves_queries(self) -> bool:
        """Whether any worker of the pool sends queries."""
        return len(self.plan.queries) > 0

    def sends_keys(self, chunk: int) -> bool:
        """Whether any worker of the pool may send keys with this chunk; the same answer on all of them."""
        return len(self.plan.keys) > 0 and any(c[0] == chunk for c in self.plan.layout.kv_head_chunks)

    def returns_keys(self, chunk: int) -> bool:
        """Whether gradients of keys may go home with this chunk; the same answer on all workers."""
        return len(self.plan.keys) > 0 and any(c[-1] == chunk for c in self.plan.layout.kv_head_chunks)

    @cached_property
    def key_offset(self) -> list[int]:
        """Where the keys received with each chunk begin among all received ones, and the end."""
        return list(accumulate((sum(keys.received_splits) for keys in self.work.keys), initial=0))

    def index(self, device: torch.device) -> PlanIndex:
        """The indices on a device; copied there once, on the stream that is current then."""
        if device not in self._indices:
            self._indices[device] = _on_device(self.work, device)
        return self._indices[device]

    @property
    def slice_heads(self) -> int:
        """Query heads that the kernel computes at a time, `h_q / S`."""
        return self.plan.layout.shard_heads // self.chunks

    def slabs(self, q: Tensor) -> Tensor:
        """`[T, h_q, D]` as `[T * S, h_q / S * D]`."""
        return q.reshape(q.shape[0] * (q.shape[1] // self.slice_heads), self.slice_heads * q.shape[2])

    def pairs(self, k: Tensor, v: Tensor) -> Tensor:
        """Keys and values side by side, `[T * h_kv, 2 * D]`."""
        return torch.stack((k, v), dim=2).view(k.shape[0] * k.shape[1], 2 * k.shape[2])

    def kernel_queries(self, slabs: Tensor, received: Tensor | None, chunk: int) -> Tensor:
        """Queries as the kernel is called with them, `[Tq, h_q / S, D]`; `received` are slabs of other workers."""
        index = self.index(slabs.device)
        queries = slabs.new_empty(len(index.home_at) + len(index.remote_at), slabs.shape[1])
        queries.index_copy_(0, index.home_at, slabs[chunk:].index_select(0, index.home))
        if received is not None:
            queries.index_copy_(0, index.remote_at, received)
        return queries.view(len(queries), self.slice_heads, self.plan.layout.head_dim)


def prepare_plan(plan: PoolPlan, worker: int) -> PreparedPlan:
    """The part of one worker; made once, since every layer asks.

    Raises:
        ValueError: no such worker.
    """
    key = PreparedPlan, worker
    if key not in plan.derived:
        plan.derived[key] = PreparedPlan(plan=plan, worker=worker, work=plan_worker(plan, worker))
    prepared: PreparedPlan = plan.derived[key]
    return prepared


def _on_device(work: WorkerPlan, device: torch.device) -> PlanIndex:
    def tensor(index: Index) -> Tensor:
        return to_device(torch.from_numpy(np.ascontiguousarray(index)), device)

    def rounds(rows: Index, at: Index, row_tensor: Tensor, at_tensor: Tensor) -> Rounds:
        """Split additions so that within a round no row comes twice."""
        if np.bincount(rows, minlength=1).max() <= 1:
            return [(row_tensor, at_tensor)]
        order = np.argsort(rows, kind="stable")
        ranked = rows[order]
        first = np.searchsorted(ranked, ranked)
        turn = np.empty_like(order)
        turn[order] = np.arange(len(order)) - first
        return [(tensor(rows[turn == each]), tensor(at[turn == each])) for each in range(int(turn.max(initial=-1)) + 1)]

    indices: list[KeyIndex] = []
    for chunk in work.keys:
        sent, returned, added = map(tensor, (chunk.sent, chunk.returned, chunk.added))
        at = np.arange(len(chunk.added))
        added_rounds = rounds(chunk.added, at, added, tensor(at))
        if chunk.same_as_before:
            indices.append(replace(indices[-1], sent=sent, returned=returned, added_rounds=added_rounds))
            continue
        home, home_at, remote, remote_at = map(tensor, (chunk.home, chunk.home_at, chunk.remote, chunk.remote_at))
        indices.append(
            KeyIndex(
                sent=sent,
                home=home,
                home_at=home_at,
                remote=remote,
                remote_at=remote_at,
                returned=returned,
                home_rounds=rounds(chunk.home, chunk.home_at, home, home_at),
                remote_rounds=rounds(chunk.remote, chunk.remote_at, remote, remote_at),
                added_rounds=added_rounds,
            )
        )
    return PlanIndex(
        sent=tensor(work.sent),
        home=tensor(work.home),
        home_at=tensor(work.home_at),
        remote_at=tensor(work.remote_at),
        keys=tuple(indices),
    )
