"""The plan of one pool: which worker computes what, and what travels. Every worker computes the same one.

A plan depends on document lengths and settings alone. All layers of a model share it, a checkpoint holds nothing of
it, and it is made on a CPU ahead of the step it is for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from numbers import Integral
from typing import Any, Literal, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from odb_libra_lightning.libra.exchange_plan import Transfers, key_transfers, query_transfers
from odb_libra_lightning.libra.kernel_segments import KernelSegments, kernel_segments
from odb_libra_lightning.libra.layout import Fetch, Placement, PoolLayout
from odb_libra_lightning.libra.tile_placement import place_tiles
from odb_libra_lightning.libra.tiles import (
    PoolDocuments,
    PoolTiles,
    cut_tiles,
    halve_heavy,
    lay_out,
    load_ceiling,
    sum_by,
)

# Where some tile finds no room, all are cut to a quarter of the largest size and placed again, so often at the most.
# Long-tailed documents need it once or twice for loads to stay within tau of the mean, and many not at all.
_MOST_QUARTERINGS = 3

Array = TypeVar("Array", bound=NDArray[Any])
Phase = Literal["queries", "keys", "outputs", "key_gradients"]


@dataclass(frozen=True, kw_only=True, eq=False)
class PoolPlan:
    """Where the attention of one pool is computed, for one micro-batch. Worker `s * CP + c` is rank `c` of replica `s`.

    Attributes:
        layout: the settings it was made with.
        tiles: blocks and their segments, in rows of the pool.
        tile_worker: worker of tile `b * H + h`, head shard `h` of block `b`: int32 `[blocks * H]`.
        queries: ranges along which Q goes and the output comes back.
        keys: ranges along which K and V go.
    """

    layout: PoolLayout
    tiles: PoolTiles
    tile_worker: NDArray[np.int32]
    queries: Transfers
    keys: Transfers

    def __post_init__(self) -> None:
        # What is computed from these is computed once.
        for part in (self.tiles, self.queries, self.keys):
            for field in fields(part):
                _frozen(getattr(part, field.name))
        _frozen(self.tile_worker)

    @property
    def num_workers(self) -> int:
        """Workers of the pool, `W`."""
        return self.tiles.num_workers

    @property
    def num_replicas(self) -> int:
        """Replicas of the pool, `P`, one packed sequence each."""
        return len(self.tiles.sequence_start) - 1

    @cached_property
    def tile_flops(self) -> NDArray[np.int64]:
        """Exact work of every tile, query-key pairs times heads (`4 * head_dim` FLOPs each): int64 `[tiles]`."""
        return _frozen(np.repeat(self.tiles.block_pairs * self.layout.shard_heads, self.layout.head_shards))

    @cached_property
    def worker_load(self) -> NDArray[np.int64]:
        """Work of every worker in the unit of `tile_flops`: int64 `[W]`."""
        return _frozen(sum_by(self.tile_worker, self.tile_flops, self.num_workers))

    @cached_property
    def derived(self) -> dict[object, Any]:
        """What others have made of this plan and want to find again, by a key of theirs; it ends with the plan."""
        return {}

    @property
    def imbalance(self) -> float:
        """Largest load over mean load, minus 1."""
        return float(self.worker_load.max() / self.worker_load.mean() - 1)

    @cached_property
    def kernel_segments(self) -> KernelSegments:
        """What the kernel of every worker is called on."""
        segments = kernel_segments(self.tiles, self.tile_worker)
        for field in fields(segments):
            _frozen(getattr(segments, field.name))
        return segments

    @cached_property
    def sent_bytes(self) -> NDArray[np.int64]:
        """Bytes that each worker sends in forward: Q, K and V from home, and the output to it. int64 `[W]`."""
        dispatched, returned = self._forward_volume
        rows: NDArray[np.int64] = dispatched.sum(axis=1) + returned.sum(axis=0)
        return _frozen(rows * self.layout.row_bytes)

    @cached_property
    def received_bytes(self) -> NDArray[np.int64]:
        """Bytes that each worker receives in forward: int64 `[W]`."""
        dispatched, returned = self._forward_volume
        rows: NDArray[np.int64] = dispatched.sum(axis=0) + returned.sum(axis=1)
        return _frozen(rows * self.layout.row_bytes)

    @property
    def bytes_moved(self) -> int:
        """Bytes of a forward pass over all workers.

        Backward moves as many again, in the other direction: the output's gradient and Q's, those of K and V.
        """
        return int(self.sent_bytes.sum())

    @property
    def busiest_bytes(self) -> int:
        """The larger of what a worker sends and what it receives in forward, at the worker where that is most."""
        return int(max(self.sent_bytes.max(), self.received_bytes.max()))

    def split_sizes(self, worker: int, phase: Phase, chunk: int) -> tuple[list[int], list[int]]:
        """Input and output splits of `all_to_all_single` for one worker, in elements: two lists `[W]`.

        Args:
            worker: number of the worker in its pool.
            phase: `queries`: Q from home to the worker that computes, in backward the output's gradient. `keys`: K and
                V likewise. `outputs`: the output home, in backward Q's gradient. `key_gradients`: K's and V's home.
            chunk: which of the `M` slices of the heads. A KV head goes with the first chunk that reads it, and its
                gradient comes back with the last.

        Raises:
            ValueError: a worker, phase or chunk that the plan does not have.
        """
        _check_number("worker", worker, self.num_workers)
        elements = self.elements(phase, chunk)
        return elements[worker].tolist(), elements[:, worker].tolist()

    def elements(self, phase: Phase, chunk: int) -> NDArray[np.int64]:
        """Elements that each worker sends each other one in a phase: `[sender, receiver]`. As in `split_sizes`."""
        if phase not in get_args(Phase):
            raise ValueError(f"phase={phase!r}: choose one of {', '.join(get_args(Phase))}")
        _check_number("chunk", chunk, self.layout.chunks)
        elements = self._query_elements if phase in ("queries", "outputs") else self._key_elements(phase, chunk)
        return elements.T if phase in ("outputs", "key_gradients") else elements

    def with_chunks(self, chunks: int) -> PoolPlan:
        """The same plan with its heads in so many slices; what does not depend on them is not computed again.

        Raises:
            ValueError: `chunks` does not divide the query heads of a tile.
        """
        plan = replace(self, layout=replace(self.layout, chunks=chunks))
        kept = ("worker_load", "kernel_segments", "sent_bytes", "received_bytes", "_forward_volume")
        vars(plan).update({name: getattr(self, name) for name in kept})
        return plan

    @cached_property
    def _forward_volume(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Rows times heads from home to worker, both `[W, W]`: of Q, K and V; and of Q alone, as the output returns."""
        queries = self.queries.volume(self.num_workers)
        return queries + 2 * self.keys.volume(self.num_workers), queries

    @cached_property
    def _query_elements(self) -> NDArray[np.int64]:
        """Elements of the queries of any chunk from home to worker."""
        return _frozen(self._forward_volume[1] // self.layout.chunks * self.layout.head_dim)

    def _key_elements(self, phase: Phase, chunk: int) -> NDArray[np.int64]:
        """Elements of the keys and values of a chunk between home and worker, `[home, worker]`."""
        key = phase, chunk
        if key not in self._key_tables:
            at = 0 if phase == "keys" else -1
            travels = np.array([chunks[at] == chunk for chunks in self.layout.kv_head_chunks])
            before = np.concatenate([[0], np.cumsum(travels)])
            heads = before[self.keys.head_stop] - before[self.keys.head_start]
            self._key_tables[key] = _frozen(2 * self.keys.volume(self.num_workers, heads) * self.layout.head_dim)
        return self._key_tables[key]

    @cached_property
    def _key_tables(self) -> dict[tuple[Phase, int], NDArray[np.int64]]:
        return {}

    def __getstate__(self) -> dict[str, object]:
        """The fields alone: what is computed from them is computed again."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __setstate__(self, state: dict[str, object]) -> None:
        """As after construction: an array that comes out of a pickle can be written to."""
        for name, value in state.items():
            object.__setattr__(self, name, value)
        self.__post_init__()

    @cached_property
    def hash(self) -> str:
        """32 hexadecimal digits that differ where anything of the plan does; the same on every worker."""
        digest = hashlib.blake2b(repr(self.layout).encode(), digest_size=16)
        parts = [self.tile_worker]
        for part in (self.tiles, self.queries, self.keys):
            parts += [getattr(part, field.name) for field in fields(part)]
        for array in parts:
            digest.update(f"{array.dtype.str}{array.shape}".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()


def _check_number(name: str, value: object, count: int) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or not 0 <= int(value) < count:
        raise ValueError(f"{name}={value!r}: this plan has {count}, numbered from 0")


def _frozen(array: Array) -> Array:
    array.setflags(write=False)
    return array


def plan_pool(
    document_lengths_per_sequence: Sequence[Sequence[int]],
    *,
    context_parallel: int,
    block_size: int,
    head_shards: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    bytes_per_element: int,
    chunks: int = 4,
    tau: float = 0.03,
    placement: Placement = "home_first",
    fetch: Fetch = "prefix",
    share_kv_heads: bool = True,
    skip_home_rows: bool = True,
    split_oversize: bool = True,
    window: int | None = None,
    sequence_length: int | None = None,
) -> PoolPlan:
    """Plan the attention of one pool for one micro-batch.

    Example:
        >>> plan = plan_pool([[700, 324], [64] * 16], context_parallel=2, block_size=128, head_shards=2, num_heads=8,
        ...                  num_kv_heads=2, head_dim=64, bytes_per_element=2)
        >>> plan.num_workers, round(plan.imbalance, 3) <= 0.1
        (4, True)

    Args:
        document_lengths_per_sequence: of each packed sequence of the pool, in order of its replicas, the lengths of
            its documents in order of their rows, tokens.
        context_parallel: see `PoolLayout`, as for all that follow.
        block_size: rows of a block at the most.
        head_shards: shards of the query heads.
        num_heads: query heads.
        num_kv_heads: KV heads.
        head_dim: elements of a head.
        bytes_per_element: 2 for bf16.
        chunks: slices of a tile's heads that are transferred in turn.
        tau: share of the mean load by which a worker may exceed it.
        placement: `home_first` or `paper`.
        fetch: `prefix` or `document`.
        share_kv_heads: whether head shards that read one KV head share its transfer.
        skip_home_rows: whether the placement charges nothing for keys that are at home.
        split_oversize: whether blocks are cut finer where a tile finds no room.
        window: keys that a query sees at the most, its own included.
        sequence_length: rows of every packed sequence, padding included; None: the sum of its documents.

    Raises:
        ValueError: settings that do not fit each other or the documents; the sentence says what would.

    Complexity: O(tiles log tiles + documents + moved tiles * (W + keys of a tile)).
    """
    layout = PoolLayout(
        context_parallel=context_parallel,
        block_size=block_size,
        head_shards=head_shards,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        bytes_per_element=bytes_per_element,
        chunks=chunks,
        tau=tau,
        placement=placement,
        fetch=fetch,
        share_kv_heads=share_kv_heads,
        skip_home_rows=skip_home_rows,
        split_oversize=split_oversize,
        window=window,
        sequence_length=sequence_length,
    )
    return layout_plan(document_lengths_per_sequence, layout)


def layout_plan(document_lengths_per_sequence: Sequence[Sequence[int]], layout: PoolLayout) -> PoolPlan:
    """`plan_pool` for settings that are a `PoolLayout` already."""
    documents = lay_out(document_lengths_per_sequence, layout)
    tiles, tile_worker = _balance(documents, layout)
    return PoolPlan(
        layout=layout,
        tiles=tiles,
        tile_worker=tile_worker,
        queries=query_transfers(tiles, tile_worker, layout),
        keys=key_transfers(tiles, tile_worker, layout),
    )


def _balance(documents: PoolDocuments, layout: PoolLayout) -> tuple[PoolTiles, NDArray[np.int32]]:
    """Cut and place; where some tile finds no room, cut all large ones finer and place again."""
    tiles = cut_tiles(documents, layout)
    placement = place_tiles(tiles, layout)
    best = placement, tiles
    if layout.split_oversize and layout.placement == "home_first":
        ceiling = load_ceiling(tiles, layout)
        for quarterings in range(1, _MOST_QUARTERINGS + 1):
            if not placement.crowded:
                break
            tiles = halve_heavy(tiles, ceiling / 4**quarterings, documents, layout)
            placement = place_tiles(tiles, layout)
            if placement.heaviest < best[0].heaviest:
                best = placement, tiles
    return best[1], best[0].tile_worker
