"""Optimizer steps and layers that the benchmarks of Libra's planning measure on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from odb_libra_lightning.data.length_mixes import length_mix
from odb_libra_lightning.libra.attention_costs import AttentionShape
from odb_libra_lightning.libra.layout import PoolLayout
from odb_libra_lightning.libra.load import attention_load
from odb_libra_lightning.libra.packing import pack_sequential
from odb_libra_lightning.libra.sequence_placement import place_sequences

Step = list[list[int]]  # document lengths of each packed sequence

PLAIN: Mapping[str, Any] = MappingProxyType(
    {
        "placement": "paper",
        "fetch": "document",
        "share_kv_heads": False,
        "skip_home_rows": False,
        "split_oversize": False,
    }
)
"""Options under which a plan is the paper's Algorithm 2 to the letter."""


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Where sequences come from, and how they are shared out.

    Attributes:
        mix: named mix of document lengths.
        sequence_length: tokens of a packed sequence, `L`.
        context_parallel: workers of a replica, `CP`.
        block_size: rows of a block at the most, `B`.
    """

    mix: str
    sequence_length: int
    context_parallel: int
    block_size: int = 8192

    def __str__(self) -> str:
        unit = 1024 if self.sequence_length < 2**20 else 2**20
        return f"{self.mix}, {self.sequence_length // unit}{'K' if unit == 1024 else 'M'}, CP={self.context_parallel}"

    @property
    def shape(self) -> AttentionShape:
        """The layer: 32 query and 4 KV heads of 128 elements in bf16."""
        return AttentionShape(
            context_parallel=self.context_parallel, num_heads=32, num_kv_heads=4, head_dim=128, bytes_per_element=2
        )

    def layout(
        self, *, block_size: int | None = None, head_shards: int = 4, chunks: int = 4, **options: Any
    ) -> PoolLayout:
        """Settings of a plan of that layer, others than the defaults by name."""
        shape = self.shape
        return PoolLayout(
            context_parallel=self.context_parallel,
            block_size=block_size or self.block_size,
            head_shards=head_shards,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            bytes_per_element=shape.bytes_per_element,
            chunks=math.gcd(chunks, shape.num_heads // head_shards),
            sequence_length=self.sequence_length,
            **options,
        )

    def step(self, global_batch: int, seed: int) -> Step:
        """Packed sequences of an optimizer step: the stream of documents, cut every `L` tokens."""
        return _step(self.mix, self.sequence_length, global_batch, seed)

    def pools(self, pool_size: int, global_batch: int, seed: int) -> list[Step]:
        """The pools of an optimizer step, placed by VRSP and its refinement."""
        step = self.step(global_batch, seed)
        placed = place_sequences([attention_load(lengths) for lengths in step], pool_size, refine=True)
        return [[step[at] for at in pool] for pool in placed]


@lru_cache(maxsize=64)
def _step(mix: str, sequence_length: int, global_batch: int, seed: int) -> Step:
    documents = 1024
    while True:
        packed = pack_sequential(length_mix(mix, documents, seed=seed), sequence_length, drop_last=True)
        if len(packed) >= global_batch:
            return packed.all_document_lengths()[:global_batch]
        documents *= 2


@dataclass(frozen=True, kw_only=True)
class Extent:
    """How much is measured.

    Attributes:
        corpora: what VRSP places sequences of; the exchange is measured on them, and on `more_corpora` too.
        more_corpora: see there.
        batches: packed sequences of an optimizer step.
        seeds: steps that VRSP places, drawn independently of one another.
        plan_seeds: of them, those whose pools are planned; the first batch size counts.
        growth: of each corpus whose planning is timed, the sizes of its pools.
    """

    corpora: tuple[Corpus, ...]
    more_corpora: tuple[Corpus, ...]
    batches: tuple[int, ...]
    seeds: int
    plan_seeds: int
    growth: tuple[tuple[Corpus, tuple[int, ...]], ...]


MAGIATTENTION, LIBRA_256K, LIBRA_1M = (
    Corpus(mix="magiattention", sequence_length=2**18, context_parallel=8),
    Corpus(mix="libra-256k", sequence_length=2**18, context_parallel=8),
    Corpus(mix="libra-1m", sequence_length=2**20, context_parallel=16),
)
FULL = Extent(
    corpora=(MAGIATTENTION, LIBRA_256K, LIBRA_1M),
    more_corpora=(
        Corpus(mix="magiattention", sequence_length=2**18, context_parallel=4),
        Corpus(mix="magiattention", sequence_length=2**20, context_parallel=16),
    ),
    batches=(128, 1024),
    seeds=10,
    plan_seeds=3,
    growth=((MAGIATTENTION, (8, 16, 32, 64, 128)), (LIBRA_1M, (8, 16, 32, 64))),
)
SMALL = Corpus(mix="magiattention", sequence_length=2**14, context_parallel=2, block_size=2048)
DRY_RUN = Extent(corpora=(SMALL,), more_corpora=(), batches=(16,), seeds=2, plan_seeds=1, growth=((SMALL, (2, 8)),))
