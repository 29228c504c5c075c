"""How a pool cuts attention into tiles: the settings every rule of the plan is given, validated in one place.

Terms: a *pool* is `P` data-parallel replicas with their context-parallel groups, `W = P * CP` workers. Source: Libra
(arXiv:2607.23250), sections 5.1 and 5.4; `fetch`, `share_kv_heads`, `skip_home_rows`, `split_oversize`, `window` and
the placement `home_first` go further than the paper, and `docs/libra.md` says what each is worth.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal, get_args

import numpy as np

from odb_libra_lightning.libra.whole_numbers import checked_count

Placement = Literal["home_first", "paper"]
Fetch = Literal["prefix", "document"]

_COUNTS = (
    "context_parallel",
    "block_size",
    "head_shards",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "bytes_per_element",
    "chunks",
)


@dataclass(frozen=True, kw_only=True)
class PoolLayout:
    """The settings of a plan that do not depend on the documents.

    Attributes:
        context_parallel: workers of a replica, `CP`; each is home to an equal run of the rows of its packed sequence.
        block_size: rows of a sequence block at the most, `B`.
        head_shards: shards of the query heads, `H`; divides `num_heads`.
        num_heads: query heads, `h_q`.
        num_kv_heads: KV heads, `h_kv`; divides `num_heads`.
        head_dim: elements of a head.
        bytes_per_element: 2 for bf16 and fp16.
        chunks: equal slices of a tile's query heads that are transferred and computed in turn, `M`; divides
            `num_heads / head_shards`.
        tau: share of the mean load by which a worker may exceed it.
        placement: `home_first` starts with every tile at home and moves what is too much; `paper` is Algorithm 2.
        fetch: keys that a tile brings with it: the `prefix` of each document that its queries attend to, or the
            whole `document`.
        share_kv_heads: head shards that read one KV head fetch it once for a worker; otherwise each for itself.
        skip_home_rows: the placement rule charges nothing for keys whose home is the worker. They are never sent
            either way.
        split_oversize: a block of which one tile is heavier than a worker may hold is halved until it fits. With
            `home_first`, where some tile finds no room all large blocks are cut finer, and all is placed again.
        window: keys that a query sees at the most, its own included (sliding-window attention); None: all before it.
        sequence_length: rows of every packed sequence; those after its documents are padding, without work and
            without transfers. None: as many as its documents have.

    Raises:
        ValueError: a number that does not fit the others; the sentence says which would.
    """

    context_parallel: int
    block_size: int
    head_shards: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    bytes_per_element: int
    chunks: int = 4
    tau: float = 0.03
    placement: Placement = "home_first"
    fetch: Fetch = "prefix"
    share_kv_heads: bool = True
    skip_home_rows: bool = True
    split_oversize: bool = True
    window: int | None = None
    sequence_length: int | None = None

    def __post_init__(self) -> None:
        for name in (*_COUNTS, "window", "sequence_length"):
            value = getattr(self, name)
            if value is not None or name in _COUNTS:
                object.__setattr__(self, name, checked_count(name, value))
        try:
            tau = math.nan if isinstance(self.tau, str | bool) else float(self.tau)
        except (TypeError, ValueError):
            tau = math.nan
        if not (math.isfinite(tau) and tau >= 0):
            raise ValueError(f"tau={self.tau!r}: the share above the mean load is a finite number of at least 0")
        object.__setattr__(self, "tau", tau)  # 0 and 0.0 are one plan
        for name, values in (("placement", get_args(Placement)), ("fetch", get_args(Fetch))):
            if getattr(self, name) not in values:
                raise ValueError(f"{name}={getattr(self, name)!r}: choose one of {', '.join(values)}")
            object.__setattr__(self, name, str(getattr(self, name)))
        for name in ("share_kv_heads", "skip_home_rows", "split_oversize"):
            if not isinstance(getattr(self, name), bool | np.bool_):
                raise ValueError(f"{name}={getattr(self, name)!r}: expected True or False")
            object.__setattr__(self, name, bool(getattr(self, name)))
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is no multiple of num_kv_heads={self.num_kv_heads}; KV heads: "
                f"{divisors_near(self.num_heads, self.num_kv_heads)} would fit"
            )
        if self.num_heads % self.head_shards:
            raise ValueError(
                f"head_shards={self.head_shards} does not divide num_heads={self.num_heads}; "
                f"{divisors_near(self.num_heads, self.head_shards)} would fit"
            )
        if self.shard_heads % self.chunks:
            raise ValueError(
                f"chunks={self.chunks} does not divide the {self.shard_heads} query heads of a shard "
                f"(num_heads={self.num_heads}, head_shards={self.head_shards}); "
                f"{divisors_near(self.shard_heads, self.chunks)} would fit"
            )

    @property
    def shard_heads(self) -> int:
        """Query heads of a tile, `h_q / H`."""
        return self.num_heads // self.head_shards

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of one head."""
        return self.head_dim * self.bytes_per_element

    def shard_kv_heads(self, shard: int) -> range:
        """KV heads that a head shard reads."""
        return self._kv_heads(shard * self.shard_heads, (shard + 1) * self.shard_heads)

    @cached_property
    def kv_groups(self) -> tuple[range, ...]:
        """KV heads that travel together: the runs of KV heads that the same shards read, in order.

        With `share_kv_heads` off, one run a shard, and runs of several shards may name the same KV heads.
        """
        read = [self.shard_kv_heads(shard) for shard in range(self.head_shards)]
        if not self.share_kv_heads:
            return tuple(read)
        cuts = sorted({cut for heads in read for cut in (heads.start, heads.stop)})
        return tuple(range(start, stop) for start, stop in pairwise(cuts))

    def shard_kv_groups(self, shard: int) -> range:
        """Positions in `kv_groups` of what a head shard reads."""
        if not self.share_kv_heads:
            return range(shard, shard + 1)
        heads = self.shard_kv_heads(shard)
        inside = [at for at, group in enumerate(self.kv_groups) if group.start in heads]
        return range(inside[0], inside[-1] + 1)

    @cached_property
    def kv_head_chunks(self) -> tuple[range, ...]:
        """For each KV head the chunks that read it, from the first to the last over all shards."""
        width = self.shard_heads // self.chunks
        readers: list[list[int]] = [[] for _ in range(self.num_kv_heads)]
        for part in range(self.head_shards * self.chunks):
            for head in self._kv_heads(part * width, (part + 1) * width):
                readers[head].append(part % self.chunks)
        return tuple(range(min(chunks), max(chunks) + 1) for chunks in readers)

    def _kv_heads(self, start: int, stop: int) -> range:
        group = self.num_heads // self.num_kv_heads
        return range(start // group, -(-stop // group))


def check_degrees(
    *,
    sequence_length: int,
    global_batch: int,
    data_parallel: int,
    pool_size: int,
    context_parallel: int,
    block_size: int,
) -> None:
    """Check the degrees of a run against each other, before any data is read.

    Args:
        sequence_length: rows of a packed sequence, `L`.
        global_batch: packed sequences of an optimizer step, `GBS`.
        data_parallel: replicas, `DP`.
        pool_size: replicas of a pool, `P`.
        context_parallel: workers of a replica, `CP`.
        block_size: rows of a block at the most, `B`.

    Raises:
        ValueError: a degree that does not fit the others; the sentence says which would.
    """
    check_replicas(global_batch=global_batch, data_parallel=data_parallel, pool_size=pool_size)
    check_homes(sequence_length=sequence_length, context_parallel=context_parallel, block_size=block_size)


def check_replicas(*, global_batch: int, data_parallel: int, pool_size: int) -> None:
    """Check that replicas make whole pools, and that a step's packed sequences can be dealt evenly to them.

    Args:
        global_batch: packed sequences of an optimizer step, `GBS`.
        data_parallel: replicas, `DP`.
        pool_size: replicas of a pool, `P`.

    Raises:
        ValueError: a number that does not fit the others; the sentence says which would.
    """
    for name, value in (("global_batch", global_batch), ("data_parallel", data_parallel), ("pool_size", pool_size)):
        checked_count(name, value)
    if data_parallel % pool_size:
        raise ValueError(
            f"pool_size={pool_size} does not divide data_parallel={data_parallel}; "
            f"{divisors_near(data_parallel, pool_size)} would fit"
        )
    if global_batch % data_parallel:
        below = global_batch // data_parallel * data_parallel
        fits = [below, below + data_parallel] if below else [data_parallel]
        raise ValueError(
            f"global_batch={global_batch} packed sequences a step cannot be dealt evenly to data_parallel="
            f"{data_parallel} replicas; {_words(fits)} would fit"
        )


def check_homes(*, sequence_length: int, context_parallel: int, block_size: int) -> None:
    """Check that the workers of a replica are home to equally many rows each, and these to whole blocks.

    Args:
        sequence_length: rows of a packed sequence, `L`.
        context_parallel: workers of a replica, `CP`.
        block_size: rows of a block at the most, `B`.

    Raises:
        ValueError: a number that does not fit the others; the sentence says which would.
    """
    for name, value in (
        ("sequence_length", sequence_length),
        ("context_parallel", context_parallel),
        ("block_size", block_size),
    ):
        checked_count(name, value)
    if sequence_length % context_parallel:
        raise ValueError(
            f"context_parallel={context_parallel} does not divide sequence_length={sequence_length}; "
            f"{divisors_near(sequence_length, context_parallel)} would fit"
        )
    home = sequence_length // context_parallel
    if home % block_size:
        raise ValueError(
            f"block_size={block_size} does not divide the {home} rows that a worker is home to "
            f"(sequence_length={sequence_length}, context_parallel={context_parallel}); "
            f"{divisors_near(home, block_size)} would fit"
        )


def divisors_near(number: int, wanted: int) -> str:
    """The divisors of a number in words, for errors; of many, those nearest to what was wanted."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    found = sorted({*small, *(number // d for d in small)})
    at = bisect(found, wanted)
    return _words(found if len(found) <= 8 else found[max(at - 4, 0) : at + 4])


def _words(numbers: Sequence[int]) -> str:
    *others, last = map(str, numbers)
    return f"{', '.join(others)} or {last}" if others else last
