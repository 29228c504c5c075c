"""Plans of a pool's coming training micro-batches, from the moment that a loader draws them to their step."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist

from odb_libra_lightning.libra.layout import PoolLayout
from odb_libra_lightning.libra.packs import Pack
from odb_libra_lightning.libra.planner import PlannedBatch, Planner
from odb_libra_lightning.libra.process_groups import RankLayout
from odb_libra_lightning.strategies.pool_lengths import PoolLengthExchange

# A loader and the trainer's fetcher each draw a batch ahead; plans for more would wait for nothing.
_DEPTH = 4


class PlansAhead:
    """One rank's plans. All ranks of a pool announce and take the same micro-batches, in the same order.

    Args:
        layout: pools and replicas.
        rank: global rank of this process.
        group: Gloo group of the pool's processes, which nothing else uses; None where the pool is one process.
        device: where the indices of the plans are copied to; None: on first use.
    """

    def __init__(
        self, layout: RankLayout, rank: int, group: dist.ProcessGroup | None, *, device: torch.device | None
    ) -> None:
        self._layout, self._rank, self._group, self._device = layout, rank, group, device
        self._pool_layouts: list[PoolLayout] = []
        self._announced: deque[Pack] = deque()
        self._lengths: PoolLengthExchange | None = None
        self._planner: Planner | None = None
        self._closed = False

    def begin_pass(self) -> None:
        """A loader begins anew: what it gave out before and nobody trained on is forgotten, on all ranks alike."""
        while self._announced:
            self._announced.popleft()
            self._running().next_plan()

    def announce(self, pack: Pack) -> None:
        """A pack is drawn, and will be taken after those announced before."""
        self._running()
        assert self._lengths is not None
        self._announced.append(pack)
        self._lengths.put(pack.documents)

    def take(self, pack: Pack) -> PlannedBatch:
        """The plans of the next micro-batch; one that was not announced is planned now.

        Raises:
            RuntimeError: another pack was announced, no plan, or a process of the pool that does not answer.
        """
        if not self._announced:
            self.announce(pack)
        if (announced := self._announced[0]) != pack:
            raise RuntimeError(
                f"rank {self._rank}: the batch is {_described(pack)}, and the loader gave out {_described(announced)} "
                "for this step: leave position_ids, cu_seqlens and padding alone in on_before_batch_transfer"
            )
        planned = self._running().next_plan()
        self._announced.popleft()
        return planned

    def expect(self, pool_layouts: Sequence[PoolLayout]) -> None:
        """Make plans of these settings for what is announced from now on."""
        for layout in pool_layouts:
            self._pool_layouts.append(layout)
            if self._planner is not None:
                self._planner.expect(layout)

    def close(self) -> None:
        """End the thread; again does nothing."""
        self._closed = True
        if self._lengths is not None and self._planner is not None:
            self._lengths.close()
            self._planner.close()
        self._lengths = self._planner = None

    def _running(self) -> Planner:
        if self._closed:
            raise RuntimeError(f"rank {self._rank}: the run whose pools these were is over")
        if self._planner is None:
            self._lengths = PoolLengthExchange(self._layout, self._rank, self._group)
            self._planner = Planner(
                self._pool_layouts,
                self._layout.worker_of(self._rank),
                lengths=self._lengths,
                depth=_DEPTH,
                device=self._device,
            )
        return self._planner


def _described(pack: Pack) -> str:
    return f"{len(pack.documents)} documents of {pack.tokens} tokens in {pack.rows} rows"
