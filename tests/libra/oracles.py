"""What a pool plan must say, found out slowly: masks are written out and counted, groups are sets, nothing is closed.

Written from the paper (arXiv:2607.23250, section 5) and never from the planner's formulas.
"""

from __future__ import annotations

import dataclasses
import random
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Tile(NamedTuple):
    """A block of rows of one packed sequence by one head shard."""

    sequence: int
    start: int
    stop: int
    shard: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pool:
    """The arguments of `plan_pool`, with everything that can be written out row by row."""

    documents: tuple[tuple[int, ...], ...]
    context_parallel: int = 2
    block_size: int = 2
    head_shards: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 3
    bytes_per_element: int = 2
    chunks: int = 1
    tau: float = 0.03
    placement: Literal["home_first", "paper"] = "home_first"
    fetch: Literal["prefix", "document"] = "prefix"
    share_kv_heads: bool = True
    skip_home_rows: bool = True
    split_oversize: bool = True
    window: int | None = None
    sequence_length: int | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of `plan_pool`."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "documents"}

    @property
    def num_workers(self) -> int:
        return len(self.documents) * self.context_parallel

    @property
    def shard_heads(self) -> int:
        """Query heads of a tile."""
        return self.num_heads // self.head_shards

    @property
    def chunk_heads(self) -> int:
        """Query heads of a tile in one chunk."""
        return self.shard_heads // self.chunks

    def rows(self, sequence: int) -> int:
        return sum(self.documents[sequence]) if self.sequence_length is None else self.sequence_length

    def kv_head(self, head: int) -> int:
        return head // (self.num_heads // self.num_kv_heads)

    def chunk(self, head: int) -> int:
        """In which chunk a query head is computed."""
        return head % self.shard_heads // self.chunk_heads

    def kv_chunks(self, kv_head: int) -> list[int]:
        """Chunks in which some shard reads a KV head."""
        return sorted({self.chunk(head) for head in range(self.num_heads) if self.kv_head(head) == kv_head})

    @cached_property
    def document_of(self) -> list[NDArray[np.int64]]:
        """For every sequence, the document of each row, -1 where the row is padding."""
        found = []
        for sequence, lengths in enumerate(self.documents):
            row_document = [j for j, length in enumerate(lengths) for _ in range(length)]
            found.append(np.array(row_document + [-1] * (self.rows(sequence) - len(row_document)), np.int64))
        return found

    @cached_property
    def home_of(self) -> list[NDArray[np.int64]]:
        """For every sequence, the worker that holds each row."""
        found = []
        for sequence in range(len(self.documents)):
            rows, parts = self.rows(sequence), self.context_parallel
            home = np.full(rows, -1, np.int64)
            for part in range(parts):
                home[part * rows // parts : (part + 1) * rows // parts] = sequence * parts + part
            assert (home >= 0).all()
            found.append(home)
        return found

    @cached_property
    def masks(self) -> list[NDArray[np.bool_]]:
        """For every sequence, which query (first axis) sees which key; shape [rows, rows]."""
        found = []
        for document in self.document_of:
            query, key = np.indices((len(document), len(document)))
            mask = (document[query] == document[key]) & (document[query] >= 0) & (key <= query)
            if self.window is not None:
                mask &= query - key < self.window
            found.append(mask)
        return found

    def pairs(self, sequence: int, start: int, stop: int) -> int:
        """How many (query, key) pairs the queries in rows [start, stop) make, counted."""
        return int(self.masks[sequence][start:stop].sum())

    def work(self, tile: Tile) -> int:
        return self.pairs(tile.sequence, tile.start, tile.stop) * self.shard_heads

    def query_heads(self, tile: Tile) -> range:
        return range(tile.shard * self.shard_heads, (tile.shard + 1) * self.shard_heads)

    def query_rows(self, tile: Tile) -> list[int]:
        """Rows of a tile that belong to a document."""
        return [row for row in range(tile.start, tile.stop) if self.document_of[tile.sequence][row] >= 0]

    def key_rows(self, tile: Tile) -> NDArray[np.bool_]:
        """Rows of the tile's sequence of which it fetches K and V; shape [rows]."""
        if self.fetch == "prefix":  # just what some query of the tile sees
            return np.asarray(self.masks[tile.sequence][tile.start : tile.stop].any(axis=0))
        document = self.document_of[tile.sequence]
        return np.isin(document, [j for j in set(document[tile.start : tile.stop].tolist()) if j >= 0])

    def needs(self, tile: Tile) -> NDArray[np.bool_]:
        """K and V that a tile needs; shape [rows, num_kv_heads]."""
        needed = np.zeros((self.rows(tile.sequence), self.num_kv_heads), bool)
        for head in self.query_heads(tile):
            needed[:, self.kv_head(head)] |= self.key_rows(tile)
        return needed

    @property
    def total(self) -> int:
        return sum(self.pairs(s, 0, self.rows(s)) for s in range(len(self.documents))) * self.num_heads

    @property
    def capacity(self) -> float:
        """Algorithm 2, line 1."""
        return (1 + self.tau) * self.total / self.num_workers


def blocks(pool: Pool) -> list[tuple[int, int, int]]:
    """Every (sequence, start, stop): cut at multiples of B and where the home changes, then halved if asked for."""
    found = []
    for sequence in range(len(pool.documents)):
        home, start = pool.home_of[sequence], 0
        for row in range(1, len(home) + 1):
            if row == len(home) or row % pool.block_size == 0 or home[row] != home[row - 1]:
                found += _halved(pool, sequence, start, row)
                start = row
    return found


def _halved(pool: Pool, sequence: int, start: int, stop: int) -> list[tuple[int, int, int]]:
    heavy = pool.work(Tile(sequence, start, stop, 0)) > pool.capacity
    if not (pool.split_oversize and heavy and stop - start > 1):
        return [(sequence, start, stop)]
    middle = (start + stop) // 2
    return _halved(pool, sequence, start, middle) + _halved(pool, sequence, middle, stop)


def tiles_of(pool: Pool, cut: list[tuple[int, int, int]] | None = None) -> list[Tile]:
    """All tiles in order of their ids."""
    return [
        Tile(*block, shard) for block in (blocks(pool) if cut is None else cut) for shard in range(pool.head_shards)
    ]


def algorithm_2(pool: Pool, tiles: list[Tile]) -> list[int]:
    """The paper's placement to the letter; what counts as one KV group, and as held, as the pool's options say."""
    work = [pool.work(tile) for tile in tiles]
    return _place(pool, tiles, sorted(range(len(tiles)), key=lambda t: (-work[t], t)), kept={})


def home_first(pool: Pool, tiles: list[Tile]) -> list[int]:
    """All tiles at home; workers above the target give some away, and Algorithm 2 places those.

    A worker gives head shard after head shard, in each the heaviest first. They are placed by documents, those of the
    longest keys first, in each head shard after head shard, from the last block to the first.
    """
    work = [pool.work(tile) for tile in tiles]
    kept = {t: int(pool.home_of[tile.sequence][tile.start]) for t, tile in enumerate(tiles)}
    load = loads(pool, tiles, list(kept.values()))
    given = []
    for t in sorted(kept, key=lambda t: (tiles[t].shard, -work[t], t)):
        if load[kept[t]] > pool.capacity and work[t] > 0:
            load[kept.pop(t)] -= work[t]
            given.append(t)
    document = {t: (tiles[t].sequence, int(pool.document_of[tiles[t].sequence][tiles[t].start])) for t in given}
    keys = {t: int(pool.key_rows(tiles[t]).sum()) for t in given}
    longest = {j: max(keys[t] for t in given if document[t] == j) for j in document.values()}
    given.sort(key=lambda t: (-longest[document[t]], document[t], tiles[t].shard, -t))
    return _place(pool, tiles, given, kept=kept)


def _place(pool: Pool, tiles: list[Tile], order: list[int], kept: dict[int, int]) -> list[int]:
    """Place tiles one after the other, beside those that have a worker already."""
    work = [pool.work(tile) for tile in tiles]
    load = [0] * pool.num_workers
    vector = pool.head_dim * pool.bytes_per_element
    groups = [kv_groups(pool, tile) for tile in tiles]
    held: list[set[tuple[int, ...]]] = [set() for _ in load]
    if pool.skip_home_rows:
        for group in groups:
            for key in group:
                held[pool.home_of[key[0]][key[1]]].add(key)
    placed = [-1] * len(tiles)

    def put(t: int, r: int) -> None:
        placed[t] = r
        load[r] += work[t]
        held[r].update(groups[t])

    def delta(t: int, r: int) -> int:
        tile = tiles[t]
        missing = len(groups[t] - held[r])
        travel = len(pool.query_rows(tile)) * pool.shard_heads
        return 2 * vector * (missing + (travel if r != pool.home_of[tile.sequence][tile.start] else 0))

    for t, r in kept.items():
        put(t, r)
    for t in order:
        deltas = [delta(t, r) for r in range(pool.num_workers)]
        fits = [r for r in range(pool.num_workers) if load[r] + work[t] <= pool.capacity]
        if fits:
            put(t, min((deltas[r], load[r], r) for r in fits)[-1])
        else:
            put(t, min((load[r], deltas[r], r) for r in range(pool.num_workers))[-1])
    return placed


def kv_groups(pool: Pool, tile: Tile) -> set[tuple[int, ...]]:
    """K and V that a tile needs, as (sequence, row, KV head), or (sequence, row, head shard, KV head) if not shared."""
    shard = () if pool.share_kv_heads else (tile.shard,)
    return {(tile.sequence, row, *shard, kv_head) for row, kv_head in np.argwhere(pool.needs(tile)).tolist()}


def loads(pool: Pool, tiles: list[Tile], tile_worker: list[int]) -> list[int]:
    """Load of every worker, counted on the masks."""
    load = [0] * pool.num_workers
    for tile, worker in zip(tiles, tile_worker, strict=True):
        load[worker] += pool.work(tile)
    return load


def traffic(pool: Pool, tiles: list[Tile], tile_worker: list[int]) -> dict[tuple[str, int], NDArray[np.int64]]:
    """Elements from worker i (first axis) to worker j in each (phase, chunk), counted vector by vector.

    A KV head goes with the first chunk that reads it, in whichever shard, and its gradient comes back with the last.
    """
    shape = (pool.num_workers, pool.num_workers)
    phases = ("queries", "keys", "outputs", "key_gradients")
    counted = {(phase, m): np.zeros(shape, np.int64) for phase in phases for m in range(pool.chunks)}
    for tile, worker in zip(tiles, tile_worker, strict=True):
        home = int(pool.home_of[tile.sequence][tile.start])
        if home == worker:
            continue
        for head in pool.query_heads(tile):
            elements = len(pool.query_rows(tile)) * pool.head_dim
            counted["queries", pool.chunk(head)][home, worker] += elements
            counted["outputs", pool.chunk(head)][worker, home] += elements
    for worker in range(pool.num_workers):
        for sequence, row, *_, kv_head in fetched(pool, tiles, tile_worker, worker):
            home, chunks = int(pool.home_of[sequence][row]), pool.kv_chunks(kv_head)
            counted["keys", chunks[0]][home, worker] += 2 * pool.head_dim
            counted["key_gradients", chunks[-1]][worker, home] += 2 * pool.head_dim
    return counted


def fetched(pool: Pool, tiles: list[Tile], tile_worker: list[int], worker: int) -> set[tuple[int, ...]]:
    """What `kv_groups` names that tiles at a worker need and that is not at home there."""
    here = [kv_groups(pool, tile) for tile, at in zip(tiles, tile_worker, strict=True) if at == worker]
    return {key for keys in here for key in keys if pool.home_of[key[0]][key[1]] != worker}


# (query heads, KV heads, head shards, chunks)
HEADS = [
    (1, 1, 1, 1),
    (4, 4, 2, 1),
    (4, 4, 2, 2),
    (4, 2, 1, 4),
    (4, 2, 4, 1),
    (4, 1, 2, 2),
    (6, 2, 2, 3),
    (6, 3, 2, 3),
    (6, 2, 3, 2),
    (8, 1, 4, 2),
    (8, 2, 4, 2),
    (8, 8, 2, 4),
    (12, 4, 3, 2),
    (12, 3, 4, 3),  # shards of 3 heads, KV heads of 4
    (12, 3, 2, 2),  # shards of 6 heads, KV heads of 4
]


def random_pool(rng: random.Random, **fixed: Any) -> Pool:
    """A small pool with everything drawn, apart from what is fixed."""
    parts, shape = rng.choice([1, 2, 2, 3, 4]), rng.choice(HEADS)
    longest = rng.choice([1, 3, 9, 20, 40])
    documents = fixed.get("documents") or tuple(
        tuple(rng.randint(1, longest) for _ in range(rng.randint(1, 5))) for _ in range(rng.choice([1, 2, 2, 3, 4]))
    )
    drawn: dict[str, Any] = {
        "documents": documents,
        "context_parallel": parts,
        "num_heads": shape[0],
        "num_kv_heads": shape[1],
        "head_shards": shape[2],
        "chunks": shape[3],
        "head_dim": rng.randint(1, 3),
        "bytes_per_element": rng.choice([1, 2, 4]),
        "tau": rng.choice([0.0, 0.03, 0.03, 0.25, 1.0]),
        "placement": rng.choice(["home_first", "paper"]),
        "fetch": rng.choice(["prefix", "document"]),
        "share_kv_heads": rng.random() < 0.5,
        "skip_home_rows": rng.random() < 0.5,
        "split_oversize": rng.random() < 0.5,
        "window": rng.choice([None, None, 1, 2, 5, 50]),
        "sequence_length": rng.choice([None, max(map(sum, documents)) + rng.choice([0, 1, 7])]),
        **fixed,
    }
    if "block_size" not in drawn:
        pool = Pool(**drawn)
        drawn["block_size"] = rng.randint(1, _largest_home(pool))
    return Pool(**drawn)


def _largest_home(pool: Pool) -> int:
    return max(int(np.bincount(home).max()) for home in pool.home_of)
