"""The exchange of a plan played with real vectors: buffers, splits, attention, and everything home again.

The sizes and ranges are the plan's; what must have arrived is read off masks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tests.libra.oracles import Pool, Tile

Array = NDArray[np.float64]


class Vector(NamedTuple):
    """The name of one row of one head of one tensor."""

    tensor: str
    sequence: int
    row: int
    head: int
    copy: int = 0  # above 0 where head shards do not share what they both read


Held = dict[Vector, Array]


class Step(NamedTuple):
    """A phase of a plan, and the tensors that it carries."""

    phase: str
    tensors: tuple[str, ...]


PHASES = ("queries", "keys", "outputs", "key_gradients")
FORWARD = (Step("queries", ("q",)), Step("keys", ("k", "v")), Step("outputs", ("o",)))
BACKWARD = (Step("queries", ("do",)), Step("outputs", ("dq",)), Step("key_gradients", ("dk", "dv")))


class Exchange:
    """All workers of a pool in one process: each holds vectors by name and gets others only through buffers."""

    def __init__(self, pool: Pool, plan: Any, tiles: list[Tile], seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        self.pool, self.plan, self.tiles = pool, plan, tiles
        self.tile_worker = plan.tile_worker.tolist()
        self.truth: dict[str, list[Array]] = {
            name: [random.standard_normal((pool.rows(s), heads, pool.head_dim)) for s in range(len(pool.documents))]
            for name, heads in (
                ("q", pool.num_heads),
                ("k", pool.num_kv_heads),
                ("v", pool.num_kv_heads),
                ("do", pool.num_heads),
            )
        }
        self.held: list[Held] = [{} for _ in range(pool.num_workers)]
        # What came from others, gradients apart: of those, several workers send one for the same row.
        self.arrived: list[Held] = [{} for _ in range(pool.num_workers)]
        self.gradients: list[list[tuple[Vector, Array]]] = [[] for _ in range(pool.num_workers)]
        for name, of_sequences in self.truth.items():
            for sequence, values in enumerate(of_sequences):
                for row, head in np.ndindex(values.shape[:2]):
                    if pool.document_of[sequence][row] >= 0:
                        home = pool.home_of[sequence][row]
                        self.held[home][Vector(name, sequence, row, head)] = values[row, head]
        self.sent = {step: np.zeros(pool.num_workers, np.int64) for step in FORWARD + BACKWARD}
        self.received = {step: np.zeros(pool.num_workers, np.int64) for step in FORWARD + BACKWARD}

    def all_to_all(self, step: Step, chunk: int) -> None:
        """One chunk of one phase: pack by destination, cut by the splits, hand over, unpack by source."""
        phase = step.phase
        workers, dim = range(self.pool.num_workers), self.pool.head_dim
        splits = [self.plan.split_sizes(worker, phase, chunk) for worker in workers]
        pieces: list[list[Array]] = []
        for i in workers:
            send = np.asarray(splits[i][0])
            packed = [self.value(i, name) for j in workers for name in self.parcel(step, chunk, i, j)]
            buffer = np.concatenate(packed) if packed else np.zeros(0)
            assert send.shape == (len(workers),), (phase, chunk, i)
            assert buffer.size == send.sum(), (phase, chunk, i)
            assert send[i] == 0, f"worker {i} sends to itself"
            pieces.append(np.split(buffer, np.cumsum(send)[:-1]))
            self.sent[step][i] += buffer.size
        for j in workers:
            receive = np.asarray(splits[j][1])
            for i in workers:
                piece, names = pieces[i][j], self.parcel(step, chunk, i, j)
                assert piece.size == receive[i] == len(names) * dim, (phase, chunk, i, j)
                self.received[step][j] += piece.size
                for name, value in zip(names, piece.reshape(-1, dim), strict=True):
                    self.take(step, j, name, value)

    def take(self, step: Step, worker: int, name: Vector, value: Array) -> None:
        """Keep what arrived; nothing may arrive twice."""
        if step in BACKWARD[1:]:
            self.gradients[worker].append((name, value))
            return
        assert name.copy == 0 or not self.pool.share_kv_heads, f"{name} reached worker {worker} twice"
        assert name not in self.arrived[worker], f"{name} reached worker {worker} twice"
        assert name not in self.held[worker], f"{name} was sent to worker {worker}, which has it"
        self.arrived[worker][name] = self.held[worker][name] = value

    def parcel(self, step: Step, chunk: int, source: int, destination: int) -> list[Vector]:
        """What one worker sends another, as the plan's ranges say."""
        outwards = step.phase in ("queries", "keys")
        home, worker = (source, destination) if outwards else (destination, source)
        if step.phase in ("queries", "outputs"):
            return [
                Vector(step.tensors[0], sequence, row, head)
                for sequence, row, head in entries(self.plan.queries, home, worker)
                if self.pool.chunk(head) == chunk
            ]
        names: list[Vector] = []
        times = Counter[tuple[int, int, int]]()
        for entry in entries(self.plan.keys, home, worker):
            chunks = self.pool.kv_chunks(entry[-1])
            if chunks[0 if outwards else -1] == chunk:
                names += [Vector(tensor, *entry, times[entry]) for tensor in step.tensors]
                times[entry] += 1
        return names

    def value(self, worker: int, name: Vector) -> Array:
        """What a worker puts into a buffer."""
        if name.tensor in ("dk", "dv"):  # zero where no query saw the key, or where a copy has brought it already
            return self.held[worker].get(name, np.zeros(self.pool.head_dim))
        return self.held[worker][name._replace(copy=0)]

    def forward(self) -> None:
        """Dispatch a chunk, compute it from what is there by then, return it."""
        for chunk in range(self.pool.chunks):
            self.all_to_all(FORWARD[0], chunk)
            self.all_to_all(FORWARD[1], chunk)
            for tile, worker, row, head in self.queries(chunk):
                q, k, v, _ = self.gather(tile.sequence, row, head, worker)
                weight = np.exp(k @ q)
                self.held[worker][Vector("o", tile.sequence, row, head)] = weight / weight.sum() @ v
            self.all_to_all(FORWARD[2], chunk)

    def backward(self) -> None:
        """The same with gradients; those of keys and values are summed where they arise, then at home."""
        for chunk in range(self.pool.chunks):
            self.all_to_all(BACKWARD[0], chunk)
            for tile, worker, row, head in self.queries(chunk):
                q, k, v, rows = self.gather(tile.sequence, row, head, worker)
                d_out = self.held[worker][Vector("do", tile.sequence, row, head)]
                d_q, d_k, d_v = attention_gradient(q, k, v, d_out)
                self.held[worker][Vector("dq", tile.sequence, row, head)] = d_q
                for at, gradient_k, gradient_v in zip(rows, d_k, d_v, strict=True):
                    for tensor, gradient in (("dk", gradient_k), ("dv", gradient_v)):
                        name = Vector(tensor, tile.sequence, at, self.pool.kv_head(head))
                        self.held[worker][name] = self.held[worker].get(name, 0) + gradient
            self.all_to_all(BACKWARD[1], chunk)
            self.all_to_all(BACKWARD[2], chunk)

    def queries(self, chunk: int) -> Iterator[tuple[Tile, int, int, int]]:
        """All (tile, worker, row, query head) of a chunk."""
        for tile, worker in zip(self.tiles, self.tile_worker, strict=True):
            for row in self.pool.query_rows(tile):
                for head in self.pool.query_heads(tile):
                    if self.pool.chunk(head) == chunk:
                        yield tile, worker, row, head

    def gather(self, sequence: int, row: int, head: int, worker: int) -> tuple[Array, Array, Array, list[int]]:
        """A query and all it sees, from what the worker holds; a KeyError is a row that never arrived."""
        rows = np.flatnonzero(self.pool.masks[sequence][row]).tolist()
        held, kv_head = self.held[worker], self.pool.kv_head(head)
        keys = np.stack([held[Vector("k", sequence, at, kv_head)] for at in rows])
        values = np.stack([held[Vector("v", sequence, at, kv_head)] for at in rows])
        return held[Vector("q", sequence, row, head)], keys, values, rows

    def needless(self) -> list[tuple[int, Vector]]:
        """Keys and values that reached a worker at which no tile's mask has them."""
        seen: list[set[tuple[int, int, int]]] = [set() for _ in range(self.pool.num_workers)]
        for tile, worker in zip(self.tiles, self.tile_worker, strict=True):
            rows = np.flatnonzero(self.pool.masks[tile.sequence][tile.start : tile.stop].any(axis=0)).tolist()
            seen[worker] |= {
                (tile.sequence, row, self.pool.kv_head(head)) for row in rows for head in self.pool.query_heads(tile)
            }
        return [
            (worker, name)
            for worker, names in enumerate(self.arrived)
            for name in names
            if name.tensor in ("k", "v") and name[1:4] not in seen[worker]
        ]

    def at_home(self, tensor: str) -> list[Array]:
        """A result as its home has it after the exchange; rows of no document are zero."""
        heads = self.pool.num_kv_heads if tensor in ("dk", "dv") else self.pool.num_heads
        found = [np.zeros((self.pool.rows(s), heads, self.pool.head_dim)) for s in range(len(self.pool.documents))]
        for worker, held in enumerate(self.held):
            for name, value in held.items():
                if name.tensor == tensor and self.pool.home_of[name.sequence][name.row] == worker:
                    found[name.sequence][name.row, name.head] += value
            for name, value in self.gradients[worker] if tensor in ("dq", "dk", "dv") else []:
                assert self.pool.home_of[name.sequence][name.row] == worker, f"{name} came to worker {worker}"
                if name.tensor == tensor:
                    found[name.sequence][name.row, name.head] += value
        return found


def entries(ranges: Any, source: int, destination: int) -> Iterator[tuple[int, int, int]]:
    """Every (sequence, row, head) that a plan's ranges send from one worker to another."""
    for i in np.flatnonzero((ranges.source == source) & (ranges.destination == destination)):
        for row in range(ranges.start[i], ranges.stop[i]):
            for head in range(ranges.head_start[i], ranges.head_stop[i]):
                yield int(ranges.sequence[i]), row, head


def attention_gradient(q: Array, k: Array, v: Array, d_out: Array) -> tuple[Array, Array, Array]:
    """Gradients of one query's attention over all of k and v, [dim], [keys, dim], [keys, dim]."""
    weight = np.exp(k @ q)
    weight /= weight.sum()
    d_weight = v @ d_out
    d_score = weight * (d_weight - weight @ d_weight)
    return d_score @ k, np.outer(d_score, q), np.outer(weight, d_out)


def dense_attention(pool: Pool, truth: dict[str, list[Array]]) -> dict[str, list[Array]]:
    """Output and gradients of every sequence in one piece, under the whole mask."""
    results: dict[str, list[Array]] = {"o": [], "dq": [], "dk": [], "dv": []}
    group = pool.num_heads // pool.num_kv_heads
    for sequence, mask in enumerate(pool.masks):
        q, k, v, d_out = (truth[name][sequence] for name in ("q", "k", "v", "do"))
        k, v = (np.repeat(tensor, group, axis=1) for tensor in (k, v))
        weight = np.where(mask, np.exp(np.einsum("qhd,khd->hqk", q, k)), 0)
        weight /= np.maximum(weight.sum(axis=-1, keepdims=True), np.finfo(np.float64).tiny)
        d_weight = np.einsum("qhd,khd->hqk", d_out, v)
        d_score = weight * (d_weight - (weight * d_weight).sum(axis=-1, keepdims=True))
        results["o"].append(np.einsum("hqk,khd->qhd", weight, v))
        results["dq"].append(np.einsum("hqk,khd->qhd", d_score, k))
        for name, gradient in (
            ("dk", np.einsum("hqk,qhd->khd", d_score, q)),
            ("dv", np.einsum("hqk,qhd->khd", weight, d_out)),
        ):
            results[name].append(gradient.reshape(len(mask), pool.num_kv_heads, group, -1).sum(axis=2))
    return results
