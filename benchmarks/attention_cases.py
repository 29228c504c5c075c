"""The attentions that `libra_attention.py` compares: how each deals out packed sequences, and with which settings."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from attention_measures import Step

from odb_libra_lightning.libra.layout import PoolLayout
from odb_libra_lightning.libra.load import attention_load
from odb_libra_lightning.libra.sequence_placement import place_sequences
from odb_libra_lightning.libra.wlb import wlb_step

WORKERS, HEADS, KV_HEADS, HEAD_DIM, HEAD_SHARDS, CHUNKS = 4, 8, 2, 64, 2, 4
WLB_ROOM = 2  # packed lengths that a micro-batch of wlb may hold, as in the simulator


@dataclass(frozen=True, kw_only=True)
class Case:
    """One attention in one set-up.

    Attributes:
        name: `ulysses`, `ring`, `wlb`, `distca`, `tap`, `tap_vrsp` or `full`.
        context_parallel: workers of a replica, `CP`.
        pool_size: replicas of a pool, `P`; 1 where there are no pools.
    """

    name: str
    context_parallel: int
    pool_size: int = 1

    @property
    def replicas(self) -> int:
        """Packed sequences of a micro-step, `DP`."""
        return WORKERS // self.context_parallel

    @property
    def pooled(self) -> bool:
        """Whether a pool computes by a plan."""
        return self.name in ("distca", "tap", "tap_vrsp", "full")

    def micro_steps(self, step: Step) -> list[Step]:
        """The packed sequences of each micro-step, one a replica."""
        if self.name == "wlb":
            lengths = list(itertools.chain.from_iterable(step))
            room = WLB_ROOM * max(map(sum, step))
            step = wlb_step(lengths, micro_batches=len(step), max_tokens=room).document_lengths()
        elif self.name in ("tap_vrsp", "full"):
            pools = place_sequences([attention_load(one) for one in step], self.pool_size, refine=True)
            step = [step[at] for pool in pools for at in pool]
        return [step[at : at + self.replicas] for at in range(0, len(step), self.replicas)]

    def layout(self, block_size: int) -> PoolLayout:
        """Settings of its plans."""
        return PoolLayout(
            context_parallel=self.context_parallel,
            block_size=block_size // self.context_parallel,
            head_shards=HEAD_SHARDS,
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            bytes_per_element=4,
            chunks=CHUNKS if self.name in ("distca", "full") else 1,
        )


# A ring of one worker, as Ulysses of one, is the kernel alone; `tap` in one pool of all replicas is `distca` without
# overlap.
CASES = (
    Case(name="ulysses", context_parallel=1),
    Case(name="wlb", context_parallel=1),
    Case(name="distca", context_parallel=1, pool_size=4),
    *(Case(name=name, context_parallel=1, pool_size=2) for name in ("tap", "tap_vrsp", "full")),
    *(Case(name=name, context_parallel=1, pool_size=4) for name in ("tap_vrsp", "full")),
    Case(name="ulysses", context_parallel=2),
    Case(name="ring", context_parallel=2),
    Case(name="wlb", context_parallel=2),
    Case(name="distca", context_parallel=2, pool_size=2),
    *(Case(name=name, context_parallel=2, pool_size=1) for name in ("tap", "tap_vrsp", "full")),
    *(Case(name=name, context_parallel=2, pool_size=2) for name in ("tap_vrsp", "full")),
)
