"""What each worker's kernel is called on: the segments of its tiles, neighbours joined. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from odb_libra_lightning.libra.tiles import PoolTiles, Rows, run_bounds


@dataclass(frozen=True, kw_only=True, eq=False)
class KernelSegments:
    """Segments of all workers, in order of worker, head shard and row: int64 arrays of one length.

    Attributes:
        worker: worker that computes the segment.
        shard: head shard.
        start: first query, row of the pool.
        stop: row after the last query; the keys end here too.
        key_start: first key that the queries see.
    """

    worker: Rows
    shard: Rows
    start: Rows
    stop: Rows
    key_start: Rows

    def of(self, worker: int) -> KernelSegments:
        """Those of one worker."""
        here = slice(*np.searchsorted(self.worker, [worker, worker + 1]))
        return KernelSegments(
            worker=self.worker[here],
            shard=self.shard[here],
            start=self.start[here],
            stop=self.stop[here],
            key_start=self.key_start[here],
        )


def kernel_segments(tiles: PoolTiles, tile_worker: NDArray[np.int32]) -> KernelSegments:
    """Segments of every worker's tiles; those that go on with one document in one head shard are one.

    A kernel is the more efficient the longer its segments are, so blocks that were cut to be placed are joined again
    where they meet at one worker.
    """
    shards = len(tile_worker) // len(tiles.block_start)
    segment, shard = np.divmod(np.arange(len(tiles.segment_block) * shards), shards)
    worker = tile_worker[tiles.segment_block[segment] * shards + shard].astype(np.int64)
    columns = (tiles.segment_start, tiles.segment_stop, tiles.segment_key_start, tiles.segment_document)
    start, stop, key_start, document = (rows[segment] for rows in columns)
    order = np.lexsort((start, shard, worker))
    worker, shard, start, stop = (rows[order] for rows in (worker, shard, start, stop))
    key_start, document = key_start[order], document[order]
    begins = np.ones(len(start), dtype=bool)
    begins[1:] = (
        (worker[1:] != worker[:-1])
        | (shard[1:] != shard[:-1])
        | (start[1:] != stop[:-1])
        | (document[1:] != document[:-1])
    )
    first, last = run_bounds(begins)
    return KernelSegments(
        worker=worker[first], shard=shard[first], start=start[first], stop=stop[last], key_start=key_start[first]
    )
