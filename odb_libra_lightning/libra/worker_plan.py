"""One worker's part of a plan as index arrays: what it gathers, sends, receives and computes. Pure NumPy.

Shapes: `T` rows at home, `Tq` query rows and `Tk` key rows that the kernel is called on, `S = H * M` slices of the
query heads. Rows of one slice of the queries are *slabs*: the queries `[T, h_q, D]` are `[T * S, h_q / S * D]`. Keys
and values travel side by side: `[T * h_kv, 2 * D]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from odb_libra_lightning.libra.exchange_plan import Transfers
from odb_libra_lightning.libra.kernel_segments import KernelSegments
from odb_libra_lightning.libra.pool_plan import PoolPlan

Index = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class KeyChunk:
    """Keys and values of one slice of the heads. Entries are (row, KV head) pairs.

    Attributes:
        sent: entries `row * h_kv + head` at home that other workers read from this chunk on, in their order.
        sent_splits: how many of them go to each worker, `[W]`.
        received_splits: how many come from each worker.
        heads: KV heads that the kernel is called with.
        home: entries at home that the kernel reads: positions in `[T * h_kv]`.
        home_at: where they stand in the kernel's keys, `[Tk * heads]`.
        remote: the same of entries from other workers: positions among all that this worker receives.
        remote_at: where those stand in the kernel's keys.
        same_as_before: whether the kernel's keys are those of the chunk before.
        returned: positions among all received entries whose gradient is complete with this chunk, in the order in
            which their homes expect them.
        returned_splits: how many of them go to each worker.
        added: entries at home whose gradients come back with this chunk.
        added_splits: how many come from each worker.
    """

    sent: Index
    sent_splits: list[int]
    received_splits: list[int]
    heads: int
    home: Index
    home_at: Index
    remote: Index
    remote_at: Index
    same_as_before: bool
    returned: Index
    returned_splits: list[int]
    added: Index
    added_splits: list[int]


@dataclass(frozen=True, kw_only=True, eq=False)
class WorkerPlan:
    """What one worker does in one pool.

    Attributes:
        rows: rows at home, `T`.
        query_lengths: queries of each segment that the kernel is called on.
        key_lengths: keys of each.
        sent: slabs `row * S + shard * M` at home that other workers compute, in their order; chunk `m` adds `m`.
        sent_splits: how many of them go to each worker, `[W]`.
        received_splits: how many slabs come from each worker.
        home: slabs at home that are computed here.
        home_at: where they stand in the kernel's queries, `[Tq]`.
        remote_at: where received slabs stand there, in the order in which they come.
        keys: keys and values, chunk by chunk.
        received_keys: entries of keys that come from other workers, over all chunks.
    """

    rows: int
    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    sent: Index
    sent_splits: list[int]
    received_splits: list[int]
    home: Index
    home_at: Index
    remote_at: Index
    keys: tuple[KeyChunk, ...]
    received_keys: int


def plan_worker(plan: PoolPlan, worker: int) -> WorkerPlan:
    """The part of a plan that one worker carries out.

    Raises:
        ValueError: no such worker.

    Complexity: linear in the rows that it sends, receives and computes.
    """
    if not 0 <= worker < plan.num_workers:
        raise ValueError(f"worker={worker}: the pool has {plan.num_workers}, numbered from 0")
    layout, tiles = plan.layout, plan.tiles
    start, stop = tiles.home_start[worker : worker + 2].tolist()
    slices = layout.head_shards * layout.chunks
    segments = plan.kernel_segments.of(worker)

    outgoing, incoming = plan.queries.source == worker, plan.queries.destination == worker
    row, head = _entries(plan, plan.queries, outgoing, shards=True)
    sent = (row - start) * slices + head * layout.chunks
    row, head = _entries(plan, plan.queries, incoming, shards=True)
    remote_at = _place(segments, row, head)

    rows = segments.stop - segments.start
    segment, within = _runs(rows)
    row, shard = segments.start[segment] + within, segments.shard[segment]
    home_at = np.flatnonzero((row >= start) & (row < stop))
    return WorkerPlan(
        rows=stop - start,
        query_lengths=tuple(rows.tolist()),
        key_lengths=tuple((segments.stop - segments.key_start).tolist()),
        sent=sent,
        sent_splits=_splits(plan, plan.queries, outgoing, plan.queries.destination, plan.queries.rows),
        received_splits=_splits(plan, plan.queries, incoming, plan.queries.source, plan.queries.rows),
        home=(row[home_at] - start) * slices + shard[home_at] * layout.chunks,
        home_at=home_at,
        remote_at=remote_at,
        keys=_key_chunks(plan, worker, segments),
        received_keys=int((plan.keys.rows * plan.keys.heads)[plan.keys.destination == worker].sum()),
    )


def _place(segments: KernelSegments, row: Index, shard: Index) -> Index:
    """Where query rows of head shards stand in the kernel's queries."""
    span = int(segments.stop.max()) + 1 if len(segments.stop) else 1
    at = np.searchsorted(segments.shard * span + segments.start, shard * span + row, side="right") - 1
    rows = segments.stop - segments.start
    return (np.cumsum(rows) - rows)[at] + row - segments.start[at] if len(row) else row


def _key_chunks(plan: PoolPlan, worker: int, segments: KernelSegments) -> tuple[KeyChunk, ...]:
    layout, tiles, keys = plan.layout, plan.tiles, plan.keys
    start, stop = tiles.home_start[worker : worker + 2].tolist()
    outgoing, incoming = keys.source == worker, keys.destination == worker
    first = np.array([chunks[0] for chunks in layout.kv_head_chunks])
    last = np.array([chunks[-1] for chunks in layout.kv_head_chunks])

    home_row, home_head = _entries(plan, keys, outgoing)
    home_entry, home_peer = (
        (home_row - start) * layout.num_kv_heads + home_head,
        _peers(keys, outgoing, keys.destination),
    )
    row, head = _entries(plan, keys, incoming)
    peer = _peers(keys, incoming, keys.source)
    # Entries come chunk by chunk, in each by their source: number them in that order.
    order = np.lexsort((np.arange(len(row)), first[head]))
    arrival = np.empty_like(order)
    arrival[order] = np.arange(len(order))
    number_at = _Lookup(row * layout.num_kv_heads + head, arrival)

    segment, within = _runs(segments.stop - segments.key_start)
    key_row, key_shard = segments.key_start[segment] + within, segments.shard[segment]
    chunks: list[KeyChunk] = []
    read_before: list[list[int]] = []
    for chunk in range(layout.chunks):
        read = _heads_read(plan, chunk)
        if read != read_before:
            width = len(read[0])
            entry_row = np.repeat(key_row, width)
            entry_head = np.array(read)[key_shard].ravel()
            at_home = (entry_row >= start) & (entry_row < stop)
            away, here = np.flatnonzero(~at_home), np.flatnonzero(at_home)
            home = (entry_row[here] - start) * layout.num_kv_heads + entry_head[here]
            remote = number_at(entry_row[away] * layout.num_kv_heads + entry_head[away])
        sent, received = first[home_head] == chunk, first[head] == chunk
        added, returned = last[home_head] == chunk, last[head] == chunk
        chunks.append(
            KeyChunk(
                sent=home_entry[sent],
                sent_splits=_count(home_peer[sent], plan.num_workers),
                received_splits=_count(peer[received], plan.num_workers),
                heads=width,
                home=home,
                home_at=here,
                remote=remote,
                remote_at=away,
                same_as_before=read == read_before,
                returned=arrival[returned],
                returned_splits=_count(peer[returned], plan.num_workers),
                added=home_entry[added],
                added_splits=_count(home_peer[added], plan.num_workers),
            )
        )
        read_before = read
    return tuple(chunks)


def _heads_read(plan: PoolPlan, chunk: int) -> list[list[int]]:
    """KV heads that the kernel reads for a chunk of each head shard: as many for every shard.

    Where the query heads of a chunk do not fall into equal groups, each query head has a KV head of its own.
    """
    layout = plan.layout
    width = layout.shard_heads // layout.chunks
    group = layout.num_heads // layout.num_kv_heads
    read = []
    for shard in range(layout.head_shards):
        first = shard * layout.shard_heads + chunk * width
        read.append([head // group for head in range(first, first + width)])
    if width % group == 0 or group % width == 0:
        return [heads[::group] if width % group == 0 else heads[:1] for heads in read]
    return read


class _Lookup:
    """Numbers by key, as arrays."""

    def __init__(self, keys: Index, numbers: Index) -> None:
        order = np.argsort(keys, kind="stable")
        self._keys, self._numbers = keys[order], numbers[order]

    def __call__(self, keys: Index) -> Index:
        return self._numbers[np.searchsorted(self._keys, keys)] if len(keys) else keys


def _runs(lengths: Index) -> tuple[Index, Index]:
    """For runs of these lengths one after another: of each element its run and its place in it."""
    run = np.repeat(np.arange(len(lengths)), lengths)
    return run, np.arange(len(run)) - np.repeat(np.cumsum(lengths) - lengths, lengths)


def _entries(
    plan: PoolPlan, transfers: Transfers, chosen: NDArray[np.bool_], *, shards: bool = False
) -> tuple[Index, Index]:
    """Rows of the pool and heads of the chosen ranges, heads innermost; with `shards`, head shards for heads."""
    first_row = plan.tiles.sequence_start[transfers.sequence[chosen]] + transfers.start[chosen]
    first_head = transfers.head_start[chosen].astype(np.int64)
    heads = transfers.heads[chosen]
    if shards:
        first_head, heads = first_head // plan.layout.shard_heads, np.ones_like(heads)
    run, within = _runs(transfers.rows[chosen] * heads)
    return first_row[run] + within // heads[run], first_head[run] + within % heads[run]


def _peers(transfers: Transfers, chosen: NDArray[np.bool_], peer: NDArray[np.int32]) -> Index:
    """The other worker of every entry of the chosen ranges."""
    return np.repeat(peer[chosen].astype(np.int64), (transfers.rows * transfers.heads)[chosen])


def _splits(
    plan: PoolPlan, transfers: Transfers, chosen: NDArray[np.bool_], peer: NDArray[np.int32], counts: Index
) -> list[int]:
    return [int(n) for n in np.bincount(peer[chosen], counts[chosen], plan.num_workers)]


def _count(peers: Sequence[int] | Index, workers: int) -> list[int]:
    return [int(n) for n in np.bincount(peers, minlength=workers)]
