"""What a run with Libra knows of a micro-batch: the one value that its strategies hand to monitors."""

from __future__ import annotations

from dataclasses import dataclass

from odb_libra_lightning.libra.kernel_times import KernelTimes


@dataclass(frozen=True, kw_only=True)
class MicroBatchFacts:
    """Facts about one training micro-batch on one rank, complete once its backward pass is through.

    Attributes:
        micro_batch: its number, counted from 0 at the start of `fit`; the same on every rank.
        pool_load: attention work of all documents of this rank's pool, query-key pairs of one head.
        imbalance: load of the pool's busiest worker over its mean worker's, minus 1, as planned; None where attention
            stays in a replica and follows no plan of tiles.
        bytes_moved: what the pool's plan moves between workers, all of them together, in one forward pass of one
            layer, bytes; None likewise.
        planning_s: seconds that the planning thread took for the plan, the exchange of lengths not included.
        waited_s: seconds that the training process waited for the plan.
        kernel: this rank's time in the attention kernel, all layers, forward, backward and recomputed.
    """

    micro_batch: int
    pool_load: int
    imbalance: float | None
    bytes_moved: int | None
    planning_s: float
    waited_s: float
    kernel: KernelTimes
