"""Which worker computes which tile: even load first, few bytes second. Pure and deterministic.

Source: Libra (arXiv:2607.23250), section 5.4 and Algorithm 2. Complexity: O(placed tiles * (W + keys of a tile)),
where `placement="paper"` places every tile and `home_first` only those that a worker has too many of.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from odb_libra_lightning.libra.layout import PoolLayout
from odb_libra_lightning.libra.tiles import PoolTiles, load_ceiling


def place_tiles(tiles: PoolTiles, layout: PoolLayout) -> NDArray[np.int32]:
    """Worker of every tile: int32 `[blocks * H]`, tile `b * H + h` being head shard `h` of block `b`.

    Each placement is that of Algorithm 2: among the workers that stay under the ceiling the one to which the fewest
    bytes must travel, then the least loaded; where no worker stays under it, the least loaded.
    """
    shards = layout.head_shards
    home = np.repeat(tiles.block_home, shards)
    flops = np.repeat(tiles.block_pairs * layout.shard_heads, shards)
    rule = _Placer(tiles, layout)
    by_weight = np.argsort(-flops, kind="stable")
    if layout.placement == "paper":
        for tile in by_weight.tolist():
            rule.place(tile)
        return rule.worker
    rule.worker[:] = home
    rule.load[:] = np.bincount(tiles.block_home, tiles.block_pairs, rule.workers).astype(np.int64) * layout.num_heads
    moved = []
    for tile in by_weight.tolist():
        if rule.load[home[tile]] > rule.ceiling and flops[tile]:
            rule.load[home[tile]] -= flops[tile]
            rule.worker[tile] = -1
            moved.append(tile)
    for tile in moved:
        rule.place(tile)
    return rule.worker


class _Placer:
    """Loads and fetched keys of the workers while tiles are placed.

    The keys of a sequence are cut where the keys of any tile begin or end and where homes do, into *strips*: a tile
    needs whole strips. For each sequence and KV group that is asked for there is a table `[strips, W]` of the rows
    that a worker would still have to fetch.
    """

    def __init__(self, tiles: PoolTiles, layout: PoolLayout) -> None:
        self.workers = tiles.num_workers
        self.load = np.zeros(self.workers, dtype=np.int64)
        self.worker = np.full(len(tiles.block_start) * layout.head_shards, -1, dtype=np.int32)
        self.ceiling = load_ceiling(tiles, layout)
        self._tiles, self._layout = tiles, layout
        self._tables: dict[tuple[int, int], NDArray[np.int64]] = {}
        cuts = np.unique(np.concatenate([tiles.key_start, tiles.key_stop, tiles.home_start]))
        self._cuts = cuts
        self._first = np.searchsorted(cuts, tiles.key_start)
        self._last = np.searchsorted(cuts, tiles.key_stop)
        self._sequence = np.searchsorted(tiles.sequence_start, tiles.block_start, side="right") - 1
        self._sequence_first = np.searchsorted(cuts, tiles.sequence_start)
        self._home = np.searchsorted(tiles.home_start, cuts[:-1], side="right") - 1
        self._query_bytes = 2 * (tiles.query_stop - tiles.block_start) * layout.shard_heads * layout.row_bytes

    def place(self, tile: int) -> None:
        """Give a tile to the worker that Algorithm 2 names."""
        layout = self._layout
        block, shard = divmod(tile, layout.head_shards)
        flops = int(self._tiles.block_pairs[block]) * layout.shard_heads
        sequence = int(self._sequence[block])
        base = self._sequence_first[sequence]
        strips = slice(self._first[block] - base, self._last[block] - base)
        missing = [
            (self._table(sequence, group), len(layout.kv_groups[group])) for group in layout.shard_kv_groups(shard)
        ]
        cost = np.full(self.workers, self._query_bytes[block])
        cost[self._tiles.block_home[block]] = 0
        for table, heads in missing:
            cost += table[strips].sum(axis=0) * (2 * heads * layout.row_bytes)
        room = self.load + flops <= self.ceiling
        if room.any():
            cheapest = room & (cost == cost[room].min())
            chosen = int(np.where(cheapest, self.load, np.iinfo(np.int64).max).argmin())
        else:
            lightest = self.load == self.load.min()
            chosen = int(np.where(lightest, cost, np.iinfo(np.int64).max).argmin())
        self.worker[tile] = chosen
        self.load[chosen] += flops
        for table, _ in missing:
            table[strips, chosen] = 0

    def _table(self, sequence: int, group: int) -> NDArray[np.int64]:
        key = sequence, group
        if key not in self._tables:
            strips = slice(self._sequence_first[sequence], self._sequence_first[sequence + 1])
            rows = np.diff(self._cuts)[strips]
            table = np.repeat(rows[:, None], self.workers, axis=1)
            if self._layout.skip_home_rows:
                table[np.arange(len(rows)), self._home[strips]] = 0
            self._tables[key] = table
            self._mark_placed(sequence, group, table)
        return self._tables[key]

    def _mark_placed(self, sequence: int, group: int, table: NDArray[np.int64]) -> None:
        """Enter what tiles that stay at home have fetched."""
        base = self._sequence_first[sequence]
        blocks = np.flatnonzero(self._sequence == sequence)
        for shard in range(self._layout.head_shards):
            if group not in self._layout.shard_kv_groups(shard):
                continue
            for block in blocks.tolist():
                worker = self.worker[block * self._layout.head_shards + shard]
                if worker >= 0:
                    table[self._first[block] - base : self._last[block] - base, worker] = 0
