"""One replica's packed sequence as a plan describes it, and the shard of it that a context-parallel rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from odb_libra_lightning.libra.pool_plan import PoolPlan
from odb_libra_lightning.libra.transport import Transport


@dataclass(frozen=True, kw_only=True)
class ReplicaSequence:
    """A packed sequence and how it is shared out. Rows are rows of the sequence.

    Attributes:
        home_start: first row of each rank's home, and the number of all rows, padding included: `[CP + 1]`.
        document_start: first row of each document, and the row after the last of all: `[documents + 1]`. Documents
            stand one after another from row 0; the rows after them are padding.
    """

    home_start: tuple[int, ...]
    document_start: tuple[int, ...]

    @property
    def rows(self) -> int:
        """All rows, padding included."""
        return self.home_start[-1]

    @property
    def tokens(self) -> int:
        """Rows that belong to documents: the first ones."""
        return self.document_start[-1]

    @property
    def home_rows(self) -> list[int]:
        """Rows of each rank's home, `[CP]`."""
        return np.diff(self.home_start).tolist()

    @property
    def document_lengths(self) -> tuple[int, ...]:
        """Rows of each document."""
        return tuple(np.diff(self.document_start).tolist())


def replica_sequence(plan: PoolPlan, replica: int) -> ReplicaSequence:
    """The packed sequence of one replica of a plan's pool.

    Complexity: O(blocks + segments) of the pool.
    """
    tiles, workers = plan.tiles, plan.layout.context_parallel
    begin, end = tiles.sequence_start[replica : replica + 2].tolist()
    # A segment begins a document unless it goes on with the one that the block before ended in.
    goes_on = np.diff(tiles.segment_block, prepend=-1) > 0
    goes_on &= tiles.document_start[tiles.segment_block] < tiles.segment_start
    inside = (begin <= tiles.segment_start) & (tiles.segment_start < end)
    starts = tiles.segment_start[inside & ~goes_on]
    return ReplicaSequence(
        home_start=tuple((tiles.home_start[replica * workers : (replica + 1) * workers + 1] - begin).tolist()),
        document_start=(*(starts - begin).tolist(), int(tiles.segment_stop[inside][-1]) - begin),
    )


def check_shards(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: PoolPlan, transport: Transport, replica: int | None
) -> int:
    """Check a rank's shards against the plan, and say which replica of the plan they belong to.

    Raises:
        ValueError: a transport of another size than the plan's context-parallel degree, a replica that the plan does
            not have or that is not told, or shards whose shape, dtype or device does not fit.
    """
    layout = plan.layout
    if transport.size != layout.context_parallel:
        raise ValueError(
            f"the transport has {transport.size} workers, but the plan is for context_parallel="
            f"{layout.context_parallel}: give the transport of the replica's context-parallel group"
        )
    if replica is None and plan.num_replicas > 1:
        raise ValueError(
            f"the plan is for a pool of {plan.num_replicas} replicas: say which is meant, replica=0, 1, ..."
        )
    replica = replica or 0
    if not 0 <= replica < plan.num_replicas:
        raise ValueError(f"replica={replica}: this plan has {plan.num_replicas}, numbered from 0")
    worker = replica * transport.size + transport.rank
    start, stop = plan.tiles.home_start[worker : worker + 2].tolist()
    for name, tensor, heads in (
        ("q", q, layout.num_heads),
        ("k", k, layout.num_kv_heads),
        ("v", v, layout.num_kv_heads),
    ):
        expected = (stop - start, heads, layout.head_dim)
        if tuple(tensor.shape) != expected:
            raise ValueError(
                f"{name} of rank {transport.rank} has shape {tuple(tensor.shape)}; by the plan it is home to "
                f"{expected[0]} rows of {expected[1]} heads of {expected[2]}: {expected} would fit"
            )
    for name in ("dtype", "device"):
        if len(found := [getattr(tensor, name) for tensor in (q, k, v)]) != found.count(found[0]):
            raise ValueError(f"q, k and v have {name} {', '.join(map(str, found))}; one and the same would fit")
    return replica


def exchange(
    transport: Transport, sent: torch.Tensor, receive_splits: Sequence[int], send_splits: Sequence[int]
) -> torch.Tensor:
    """What an all-to-all brings, cut along dimension 0; `sent` is given up. One worker alone gets `sent` back."""
    if transport.size == 1:
        return sent
    received = sent.new_empty(sum(receive_splits), *sent.shape[1:])
    transport.all_to_all(received, sent, receive_splits, send_splits).wait()
    return received


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """What partial results of a dtype are added in."""
    return torch.float64 if dtype == torch.float64 else torch.float32
