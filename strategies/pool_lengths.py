"""Document lengths of a pool's coming micro-batches: each process knows its own pack, and the plan needs them all."""

from __future__ import annotations

import queue
from collections.abc import Iterator

import torch.distributed as dist

from odb_libra_lightning.libra.planner import PoolLengths
from odb_libra_lightning.libra.process_groups import RankLayout


class PoolLengthExchange:
    """Lengths of micro-batches, one pool after another: iterated by a planner's thread, fed by the training process.

    The exchange runs in that thread, over a Gloo group that nothing else uses, while the step before still computes.

    Args:
        layout: pools and replicas.
        rank: global rank of this process.
        group: Gloo group of the pool's processes, in order of their ranks; None where the pool is one process.
    """

    def __init__(self, layout: RankLayout, rank: int, group: dist.ProcessGroup | None) -> None:
        self._layout, self._rank, self._group = layout, rank, group
        self._mine: queue.SimpleQueue[tuple[int, ...] | None] = queue.SimpleQueue()

    def put(self, documents: tuple[int, ...]) -> None:
        """Name the document lengths of this process's next pack."""
        self._mine.put(documents)

    def close(self) -> None:
        """End the iteration once what was put is read."""
        self._mine.put(None)

    def __iter__(self) -> Iterator[PoolLengths]:
        """Lengths of every replica of the pool, micro-batch by micro-batch.

        Raises:
            RuntimeError: a process of the pool that does not answer, or processes of one replica with different packs.
        """
        micro_batch = 0
        while (mine := self._mine.get()) is not None:
            yield self._of_the_pool(mine, micro_batch)
            micro_batch += 1

    def _of_the_pool(self, mine: tuple[int, ...], micro_batch: int) -> PoolLengths:
        if self._group is None:
            return [mine]
        everyone: list[tuple[int, tuple[int, ...]]] = [(0, ())] * self._layout.num_workers
        dist.all_gather_object(everyone, (micro_batch, mine), group=self._group)
        width = self._layout.context_parallel
        first = self._layout.pool_of(self._rank) * self._layout.num_workers
        for worker, (number, documents) in enumerate(everyone):
            if number != micro_batch:
                raise RuntimeError(
                    f"rank {self._rank} is at micro-batch {micro_batch} and rank {first + worker} of its pool at "
                    f"{number}: all ranks must train on as many batches in the same order"
                )
            if documents != everyone[worker // width * width][1]:
                raise RuntimeError(
                    f"micro-batch {micro_batch}: ranks {first + worker // width * width} and {first + worker} share a "
                    "replica and hold different packs; the loader must give all of them the same batch"
                )
        return [documents for _, documents in everyone[::width]]
