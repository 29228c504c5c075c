"""What workers send one another, from the placement: row and head ranges, each once. Pure.

Rows travel along two sets of ranges. *Query ranges* lead from the home of a tile's queries to the worker that computes
it: Q goes along them and the output comes back; in backward the output's gradient goes and Q's comes back. *Key
ranges* lead from the home of keys to every worker whose tiles read them: K and V go along them, and in backward their
gradients come back, which their home adds up. Source: Libra (arXiv:2607.23250), section 6.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from odb_libra_lightning.libra.layout import PoolLayout
from odb_libra_lightning.libra.tiles import PoolTiles, Rows, expand, run_bounds, sum_by


@dataclass(frozen=True, kw_only=True, eq=False)
class Transfers:
    """Ranges of rows and heads that go from one worker to another: int32 arrays of one length.

    They stand in order of source, destination, head shard or KV group, and row: the order in which both ends lay them
    into their buffers.

    Attributes:
        source: worker at home.
        destination: worker that computes; never the source.
        sequence: packed sequence of the pool.
        head_start: first head.
        head_stop: head after the last.
        start: first row, within the sequence.
        stop: row after the last.
    """

    source: NDArray[np.int32]
    destination: NDArray[np.int32]
    sequence: NDArray[np.int32]
    head_start: NDArray[np.int32]
    head_stop: NDArray[np.int32]
    start: NDArray[np.int32]
    stop: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.source)

    @property
    def rows(self) -> Rows:
        """Rows of each range, int64."""
        return (self.stop - self.start).astype(np.int64)

    @property
    def heads(self) -> Rows:
        """Heads of each range, int64."""
        return (self.head_stop - self.head_start).astype(np.int64)

    def volume(self, workers: int, heads: Rows | None = None) -> NDArray[np.int64]:
        """Rows times heads from each worker to each: int64 `[source, destination]`.

        Args:
            workers: number of workers, `W`.
            heads: heads to count in each range, instead of all.
        """
        pair = self.source.astype(np.int64) * workers + self.destination
        counted = self.rows * (self.heads if heads is None else heads)
        return sum_by(pair, counted, workers * workers).reshape(workers, workers)


def query_transfers(tiles: PoolTiles, tile_worker: NDArray[np.int32], layout: PoolLayout) -> Transfers:
    """Query ranges: the document rows of every tile that is not computed at home."""
    shards = layout.head_shards
    block, shard = np.divmod(np.arange(len(tile_worker)), shards)
    moved = (tile_worker != tiles.block_home[block]) & (tiles.query_stop > tiles.block_start)[block]
    block, shard = block[moved], shard[moved]
    return _in_order(
        tiles,
        source=tiles.block_home[block],
        destination=tile_worker[moved].astype(np.int64),
        group=shard,
        heads=[range(shard * layout.shard_heads, (shard + 1) * layout.shard_heads) for shard in range(shards)],
        start=tiles.block_start[block],
        stop=tiles.query_stop[block],
    )


def key_transfers(tiles: PoolTiles, tile_worker: NDArray[np.int32], layout: PoolLayout) -> Transfers:
    """Key ranges: the keys that a worker's tiles bring with them and that are not at home there, each once."""
    block, shard = np.divmod(np.arange(len(tile_worker)), layout.head_shards)
    start, stop = tiles.key_start[block], tiles.key_stop[block]
    at_home = (start >= tiles.home_start[tile_worker]) & (stop <= tiles.home_start[tile_worker + 1])
    away = ~at_home & (start < stop)  # a block of padding has no keys
    shard, start, stop = shard[away], start[away], stop[away]
    worker = tile_worker[away].astype(np.int64)

    # One entry for each KV group that a tile reads.
    groups = [layout.shard_kv_groups(shard) for shard in range(layout.head_shards)]
    entry, within = expand(np.array([len(read) for read in groups])[shard])
    group = np.array([read.start for read in groups])[shard[entry]] + within
    worker, start, stop = worker[entry], start[entry], stop[entry]

    # Union of the row ranges of one worker and group: those that overlap or touch, in order of their start.
    order = np.lexsort((start, group, worker))
    worker, group, start, stop = (column[order] for column in (worker, group, start, stop))
    span = int(tiles.sequence_start[-1]) + 1  # sets the ranges of different workers and groups apart
    apart = (worker * len(layout.kv_groups) + group) * span
    reach = np.maximum.accumulate(stop + apart) if len(stop) else stop
    begins = np.ones(len(start), dtype=bool)
    begins[1:] = (start + apart)[1:] > reach[:-1]
    first, last = run_bounds(begins)
    worker, group, start, stop = worker[first], group[first], start[first], (reach - apart)[last]

    # Cut at homes; what is at home already stays.
    first_home = np.searchsorted(tiles.home_start, start, side="right") - 1
    last_home = np.searchsorted(tiles.home_start, stop, side="left") - 1
    entry, within = expand(last_home - first_home + 1)
    source = first_home[entry] + within
    start = np.maximum(start[entry], tiles.home_start[source])
    stop = np.minimum(stop[entry], tiles.home_start[source + 1])
    worker, group = worker[entry], group[entry]
    travels = (source != worker) & (start < stop)
    return _in_order(
        tiles,
        source=source[travels],
        destination=worker[travels],
        group=group[travels],
        heads=layout.kv_groups,
        start=start[travels],
        stop=stop[travels],
    )


def _in_order(
    tiles: PoolTiles,
    *,
    source: Rows,
    destination: Rows,
    group: Rows,
    heads: Sequence[range],
    start: Rows,
    stop: Rows,
) -> Transfers:
    """Ranges in the order of `Transfers`, adjacent rows of one group as one; `heads` are those of each group."""
    order = np.lexsort((start, group, destination, source))  # a source is home to rows of one sequence
    source, destination, group, start, stop = (column[order] for column in (source, destination, group, start, stop))
    begins = np.ones(len(start), dtype=bool)
    begins[1:] = (
        (source[1:] != source[:-1])
        | (destination[1:] != destination[:-1])
        | (group[1:] != group[:-1])
        | (start[1:] != stop[:-1])
    )
    first, last = run_bounds(begins)
    source, destination, group, start = (column[first] for column in (source, destination, group, start))
    stop = stop[last]
    sequence = np.searchsorted(tiles.sequence_start, start, side="right") - 1
    base = tiles.sequence_start[sequence]
    bounds = np.array([(run.start, run.stop) for run in heads])[group]
    columns = (source, destination, sequence, bounds[:, 0], bounds[:, 1], start - base, stop - base)
    names = (field.name for field in fields(Transfers))
    return Transfers(**{name: column.astype(np.int32) for name, column in zip(names, columns, strict=True)})
