"""Which worker computes which tile: even load first, few bytes second. Pure and deterministic.

Source: Libra (arXiv:2607.23250), section 5.4 and Algorithm 2. Complexity: O(placed tiles * (W + keys of a tile)),
where `placement="paper"` places every tile and `home_first` only those that a worker has too many of.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from odb_libra_lightning.libra.layout import PoolLayout
from odb_libra_lightning.libra.tiles import PoolTiles, load_ceiling, sum_by


@dataclass(frozen=True, kw_only=True, eq=False)
class TilePlacement:
    """Where tiles went.

    Attributes:
        tile_worker: worker of tile `b * H + h`, head shard `h` of block `b`: int32 `[blocks * H]`.
        heaviest: load of the heaviest worker, query-key pairs times heads.
        crowded: whether some tile found every worker too full for it.
    """

    tile_worker: NDArray[np.int32]
    heaviest: int
    crowded: bool


def place_tiles(tiles: PoolTiles, layout: PoolLayout) -> TilePlacement:
    """Place every tile by the rule of Algorithm 2.

    Among the workers that stay under the ceiling the one to which the fewest bytes must travel, then the least loaded;
    where no worker stays under it, the least loaded. `paper` places all tiles so, the heaviest first. `home_first`
    leaves a tile at home unless the worker there is above the ceiling, and places only what those give away.
    """
    placer = _Placer(tiles, layout)
    if layout.placement == "paper":
        order = np.argsort(-np.repeat(tiles.block_pairs, layout.head_shards), kind="stable")
    else:
        order = _in_columns(tiles, layout, _surplus(tiles, layout, placer))
    for tile in order.tolist():
        placer.place(tile)
    return TilePlacement(tile_worker=placer.worker, heaviest=int(placer.load.max()), crowded=placer.crowded)


def _surplus(tiles: PoolTiles, layout: PoolLayout, placer: _Placer) -> NDArray[np.int64]:
    """Start with every tile at home; take from each worker above the ceiling tiles until it is not.

    They are taken head shard by head shard, in each the heaviest first: tiles of one head shard read the same keys, so
    what leaves together needs one copy of them where it goes, and what stays needs none of that shard.
    """
    shards = layout.head_shards
    placer.worker[:] = np.repeat(tiles.block_home, shards)
    load = sum_by(tiles.block_home, tiles.block_pairs, placer.workers) * layout.num_heads
    flops = tiles.block_pairs * layout.shard_heads
    taken = []
    for worker in np.flatnonzero(load > placer.ceiling):
        blocks = np.flatnonzero((tiles.block_home == worker) & (flops > 0))
        blocks = blocks[np.argsort(-flops[blocks], kind="stable")]
        left = load[worker] - np.cumsum(np.tile(flops[blocks], shards))
        number = int(np.argmax(left <= placer.ceiling)) + 1
        taken.append((blocks * shards + np.arange(shards)[:, None]).ravel()[:number])
        load[worker] = left[number - 1]
    placer.load[:] = load
    tile = np.concatenate(taken) if taken else np.empty(0, dtype=np.int64)
    placer.worker[tile] = -1
    return tile


def _in_columns(tiles: PoolTiles, layout: PoolLayout, moved: NDArray[np.int64]) -> NDArray[np.int64]:
    """Order in which surplus is placed: documents of the longest keys first, in each a head shard at a time.

    A worker then fills up with neighbouring blocks of one head shard, which share its copy of their keys, and long
    documents meet workers that are still empty: their keys go to as few workers as can hold their work.
    """
    block, shard = np.divmod(moved, layout.head_shards)
    start = tiles.document_start[block]
    _, document = np.unique(start, return_inverse=True)
    reach = np.zeros(len(moved), dtype=np.int64)
    np.maximum.at(reach, document, (tiles.key_stop - tiles.key_start)[block])
    return moved[np.lexsort((-block, shard, start, -reach[document]))]


class _Placer:
    """Loads and fetched keys of the workers while tiles are placed.

    The keys of a sequence are cut where the keys of any tile begin or end and where homes do, into *strips*: a tile
    needs whole strips. For each sequence and KV group that is asked for there is a table `[strips, W]` of the bytes
    of keys and values that a worker would still have to fetch.
    """

    def __init__(self, tiles: PoolTiles, layout: PoolLayout) -> None:
        self.workers = tiles.num_workers
        self.load = np.zeros(self.workers, dtype=np.int64)
        self.worker = np.full(len(tiles.block_start) * layout.head_shards, -1, dtype=np.int32)
        self.crowded = False
        self.ceiling = load_ceiling(tiles, layout)
        self._layout = layout
        self._groups = [layout.shard_kv_groups(shard) for shard in range(layout.head_shards)]
        cuts = np.unique(np.concatenate([tiles.key_start, tiles.key_stop, tiles.home_start]))
        self._strip_rows = np.diff(cuts)
        self._strip_home = np.searchsorted(tiles.home_start, cuts[:-1], side="right") - 1
        self._sequence_strips = np.searchsorted(cuts, tiles.sequence_start)
        self._block_sequence = np.searchsorted(tiles.sequence_start, tiles.block_start, side="right") - 1
        base = self._sequence_strips[self._block_sequence]
        strips = zip(*(np.searchsorted(cuts, rows) - base for rows in (tiles.key_start, tiles.key_stop)), strict=True)
        self._strips = [slice(first, last) for first, last in strips]
        self._flops = (tiles.block_pairs * layout.shard_heads).tolist()
        self._home = tiles.block_home.tolist()
        query_rows = tiles.query_stop - tiles.block_start
        self._query_bytes = (2 * query_rows * layout.shard_heads * layout.row_bytes).tolist()  # Q, and the output
        self._tables: dict[tuple[int, int], NDArray[np.int64]] = {}

    def place(self, tile: int) -> None:
        """Give a tile to the worker that Algorithm 2 names."""
        block, shard = divmod(tile, self._layout.head_shards)
        flops, strips = self._flops[block], self._strips[block]
        tables = [self._table(self._block_sequence[block], group) for group in self._groups[shard]]
        cost = sum(table[strips].sum(axis=0) for table in tables) + self._query_bytes[block]
        cost[self._home[block]] -= self._query_bytes[block]
        room = np.flatnonzero(self.load + flops <= self.ceiling)
        if len(room):
            chosen = _least(room, cost, self.load)
        else:
            self.crowded = True
            chosen = _least(np.arange(self.workers), self.load, cost)
        self.worker[tile] = chosen
        self.load[chosen] += flops
        for table in tables:
            table[strips, chosen] = 0

    def _table(self, sequence: int, group: int) -> NDArray[np.int64]:
        key = sequence, group
        if key not in self._tables:
            strips = slice(*self._sequence_strips[sequence : sequence + 2])
            bytes_per_row = 2 * len(self._layout.kv_groups[group]) * self._layout.row_bytes
            table = np.repeat(self._strip_rows[strips, None] * bytes_per_row, self.workers, axis=1)
            if self._layout.skip_home_rows:
                table[np.arange(len(table)), self._strip_home[strips]] = 0
            self._enter_placed(sequence, group, table)
            self._tables[key] = table
        return self._tables[key]

    def _enter_placed(self, sequence: int, group: int, table: NDArray[np.int64]) -> None:
        """Enter what tiles that have a worker already bring there: those that stay at home."""
        shards = self._layout.head_shards
        for shard in (shard for shard in range(shards) if group in self._groups[shard]):
            for block in np.flatnonzero(self._block_sequence == sequence).tolist():
                worker = self.worker[block * shards + shard]
                if worker >= 0:
                    table[self._strips[block], worker] = 0


def _least(workers: NDArray[np.int64], first: NDArray[np.int64], second: NDArray[np.int64]) -> int:
    """Of some workers, in ascending order, the least by `(first, second, worker)`."""
    least = first[workers]
    workers = workers[least == least.min()]
    return int(workers[second[workers].argmin()])
