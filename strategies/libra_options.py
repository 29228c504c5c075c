"""The settings of a run with Libra, checked against each other, the world size and the model's heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from odb_libra_lightning.baselines.attentions import ATTENTIONS
from odb_libra_lightning.libra.attention import Remember
from odb_libra_lightning.libra.kernel_interface import AttentionKernel
from odb_libra_lightning.libra.kernels import KERNELS
from odb_libra_lightning.libra.layout import Placement, PoolLayout, divisors_near
from odb_libra_lightning.libra.process_groups import RankLayout
from odb_libra_lightning.libra.sequence_placement import PLACEMENTS
from odb_libra_lightning.libra.whole_numbers import LARGEST_SETTING, checked_count

AttentionName = Literal["libra", "ulysses", "ring", "distca"]

# Where nothing is said: replicas of a pool, rows of a block, and pieces that heads are cut into, at the most.
_POOL_SIZE, _BLOCK_SIZE, _HEAD_SHARDS, _CHUNKS = 8, 2048, 4, 4


@dataclass(frozen=True, kw_only=True)
class LibraOptions:
    """What a run with Libra is set to. None stands for what suits the run.

    Attributes:
        context_parallel: processes that share a packed sequence, `CP`.
        pool_size: replicas among which attention work is evened out, `P`. None: the largest number up to 8 that
            divides the replicas; for `distca` all of them.
        block_size: rows of a tile at the most, `B`. None: 2048. A pack whose homes are shorter has shorter blocks.
        head_shards: shards of the query heads, `H`. None: the largest number up to 4 that divides the KV heads.
        chunks: slices of a tile's heads that are transferred and computed in turn, `M`. None: the largest number up to
            4 that fits.
        attention: `libra`; or one that it is compared with: `ulysses`, `ring`, or `distca`, a single pool of all
            replicas.
        placement: which worker computes a tile, see `PoolLayout`.
        sequence_placement: which pool a packed sequence goes to, a name in `PLACEMENTS`: read by `PackedDataModule`.
        refine: even out the pools further by swaps.
        tau: share of the mean load by which a worker may exceed it.
        kernel: name of an attention kernel, or a kernel. None: the best of the device.
        remember: what backward does for rows of other workers, see `libra_attention`.
        causal_shift: whether the module's loss shifts `labels` by one, as language models do.
        ignore_index: label that bears no loss.
        pool_timeout: seconds that processes of a pool wait for one another, at set-up and in each transfer. On NCCL the
            watchdog ends the process after it.

    Raises:
        ValueError: a value that cannot work.
    """

    context_parallel: int = 1
    pool_size: int | None = None
    block_size: int | None = None
    head_shards: int | None = None
    chunks: int | None = None
    attention: AttentionName = "libra"
    placement: Placement = "home_first"
    sequence_placement: str = "vrsp"
    refine: bool = True
    tau: float = 0.03
    kernel: str | AttentionKernel | None = None
    remember: Remember = "keep"
    causal_shift: bool = True
    ignore_index: int = -100
    pool_timeout: float = 1800.0

    def __post_init__(self) -> None:
        for name in ("context_parallel", "pool_size", "block_size", "head_shards", "chunks"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, checked_count(name, value))
        for name, choices in (
            ("attention", ATTENTIONS),
            ("placement", get_args(Placement)),
            ("sequence_placement", PLACEMENTS),
            ("remember", get_args(Remember)),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)!r}: choose one of {', '.join(sorted(choices))}")
        for name in ("refine", "causal_shift"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r}: expected True or False")
        if isinstance(self.tau, bool | str) or not 0 <= self.tau < float("inf"):
            raise ValueError(f"tau={self.tau!r}: the share above the mean load is a finite number of at least 0")
        if isinstance(self.kernel, str) and self.kernel not in KERNELS:
            raise ValueError(f"kernel={self.kernel!r}: choose one of {', '.join(sorted(KERNELS))}, or None")
        if isinstance(self.ignore_index, bool) or not isinstance(self.ignore_index, int):
            raise ValueError(f"ignore_index={self.ignore_index!r}: expected a whole number")
        seconds = self.pool_timeout if isinstance(self.pool_timeout, int | float) else 0
        if isinstance(seconds, bool) or not 0 < seconds < float("inf"):
            raise ValueError(f"pool_timeout={self.pool_timeout!r}: expected seconds, more than 0")
        if self.remember != "keep" and not self.follows_plan:
            raise ValueError(f"remember={self.remember!r} is for attention='libra' or 'distca', not {self.attention!r}")

    @property
    def follows_plan(self) -> bool:
        """Whether tiles are computed where a plan says; else attention stays in a replica and needs documents alone."""
        return self.attention in ("libra", "distca")

    def rank_layout(self, world_size: int) -> RankLayout:
        """Pools and replicas of a run of so many processes.

        Raises:
            ValueError: degrees that do not divide the world size; the sentence says which would fit.
        """
        alone = RankLayout(world_size=world_size, context_parallel=self.context_parallel, pool_size=1)
        replicas = alone.num_replicas
        pool_size = self.pool_size
        if pool_size is None:
            pool_size = replicas if self.attention == "distca" else _largest_divisor(replicas, _POOL_SIZE)
        layout = RankLayout(world_size=world_size, context_parallel=self.context_parallel, pool_size=pool_size)
        if self.attention == "distca" and layout.num_pools != 1:
            raise ValueError(
                f"attention='distca' has one pool of all {replicas} replicas, and pool_size={pool_size} makes "
                f"{layout.num_pools} of them; pool_size={replicas} or None would fit"
            )
        return layout

    def pool_layout(
        self, *, num_heads: int, num_kv_heads: int, head_dim: int, bytes_per_element: int, window: int | None
    ) -> PoolLayout:
        """The settings of plans for layers of so many heads.

        Args:
            num_heads: query heads.
            num_kv_heads: KV heads.
            head_dim: elements of a head.
            bytes_per_element: 2 for bf16 and fp16.
            window: keys that a query sees at the most; None: all before it.

        Raises:
            ValueError: options that do not fit the heads; the sentence says which would fit.
        """
        if self.attention == "ulysses" and num_heads % self.context_parallel:
            raise ValueError(
                f"attention='ulysses' gives each process of a replica its own heads: context_parallel="
                f"{self.context_parallel} does not divide num_heads={num_heads}; "
                f"{divisors_near(num_heads, self.context_parallel)} would fit"
            )
        if not self.follows_plan:  # the fewest tiles that hold the documents and the heads
            return PoolLayout(
                context_parallel=self.context_parallel,
                block_size=LARGEST_SETTING,
                head_shards=1,
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                bytes_per_element=bytes_per_element,
                chunks=1,
                split_oversize=False,
                window=window,
            )
        # A KV head is read by one shard alone, so that shards fetch nothing twice.
        head_shards = self.head_shards or _largest_divisor(num_kv_heads, _HEAD_SHARDS)
        chunks = self.chunks
        if chunks is None:
            chunks = 1 if num_heads % head_shards else _largest_divisor(num_heads // head_shards, _CHUNKS)
        return PoolLayout(
            context_parallel=self.context_parallel,
            block_size=self.block_size or _BLOCK_SIZE,
            head_shards=head_shards,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            bytes_per_element=bytes_per_element,
            chunks=chunks,
            tau=self.tau,
            placement=self.placement,
            window=window,
        )


def _largest_divisor(number: int, most: int) -> int:
    return max(divisor for divisor in range(1, min(number, most) + 1) if number % divisor == 0)
