"""What goes into a simulation and what comes out of it: values only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from odb_libra_lightning.libra.attention_costs import AttentionShape
from odb_libra_lightning.libra.whole_numbers import checked_count

Method = Literal["ulysses", "ulysses_sorted", "ring", "wlb", "distca", "tap", "tap_vrsp", "libra"]
METHODS: tuple[Method, ...] = get_args(Method)


@dataclass(frozen=True, kw_only=True)
class SimulatedRun:
    """The run that is simulated.

    Attributes:
        sequence_length: rows of a packed sequence, `L`.
        global_batch: packed sequences of an optimizer step, `GBS`.
        data_parallel: replicas, `DP`.
        shape: the attention layer and `CP`.

    Raises:
        ValueError: a number that is no whole number of at least 1, or far too large for a run.
    """

    sequence_length: int
    global_batch: int
    data_parallel: int
    shape: AttentionShape

    def __post_init__(self) -> None:
        for name in ("sequence_length", "global_batch", "data_parallel"):
            object.__setattr__(self, name, checked_count(name, getattr(self, name)))

    @property
    def accumulation(self) -> int:
        """Micro-steps of an optimizer step, `GA`."""
        return self.global_batch // self.data_parallel

    @property
    def num_workers(self) -> int:
        """Workers of the cluster, `DP * CP`."""
        return self.data_parallel * self.shape.context_parallel


@dataclass(frozen=True, kw_only=True)
class GridPoint:
    """One configuration of Libra.

    Attributes:
        pool_size: replicas of a pool, `P`.
        head_shards: shards of the query heads, `H`.
        block_size: rows of a block at the most, `B`.
        chunks: slices of a tile's heads, `M`; 1 where nothing is overlapped.
    """

    pool_size: int
    head_shards: int
    block_size: int
    chunks: int


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Every combination of these is simulated: the fields of `GridPoint`, several values each."""

    pool_sizes: Sequence[int]
    head_shards: Sequence[int]
    block_sizes: Sequence[int]
    chunks: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class MethodFigures:
    """What one method gives at one grid point, over all optimizer steps, of one attention layer.

    Attributes:
        method: its name in `METHODS`.
        point: its configuration; None where the grid does not matter.
        inter_pool_imbalance: heaviest pool of an optimizer step over the mean pool, minus 1: mean over the steps.
            Without pools, the same of the replicas' micro-batches.
        intra_pool_imbalance: heaviest worker of a pool over the mean worker, minus 1: mean over pools.
        worst_intra_pool_imbalance: the largest of them.
        bytes_moved: bytes that all workers together send in forward, mean over micro-steps.
        busiest_bytes: the larger of what a worker sends and receives in forward, at the worst worker of all.
        mean_latency: seconds of the slowest pool, or replica, in forward and backward: mean over micro-steps.
        worst_latency: the largest of them.
    """

    method: Method
    point: GridPoint | None
    inter_pool_imbalance: float
    intra_pool_imbalance: float
    worst_intra_pool_imbalance: float
    bytes_moved: float
    busiest_bytes: int
    mean_latency: float
    worst_latency: float


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The grid point to take.

    Attributes:
        point: of those where the mean latency of `libra` is within 2 % of the least, the one where the worst is least;
            of several, the one that moves least, and then the smallest pool.
        reason: why, in a sentence or two.
    """

    point: GridPoint
    reason: str


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """Results of `simulate`.

    Attributes:
        run: what was simulated.
        steps: optimizer steps that were replayed.
        documents: documents, and pieces of documents, in those steps.
        figures: one entry for each method and grid point.
        notes: what was left out, in sentences.
    """

    run: SimulatedRun
    steps: int
    documents: int
    figures: tuple[MethodFigures, ...]
    notes: tuple[str, ...]
