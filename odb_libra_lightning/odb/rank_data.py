"""One rank's samples, transport and collation together, for whichever process runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from odb_libra_lightning.odb.config import LoaderConfig
from odb_libra_lightning.odb.epoch import EpochStart, RankEpoch
from odb_libra_lightning.odb.ledger import open_ledger
from odb_libra_lightning.odb.rendezvous import ControlGroup
from odb_libra_lightning.odb.source import SampleSource
from odb_libra_lightning.odb.steps import Step
from odb_libra_lightning.odb.transport import LocalTransport, MeteredTransport, Transport, drive


@dataclass(frozen=True, kw_only=True)
class RankJob:
    """What a process needs to produce one rank's batches; it pickles if dataset and `collate_fn` do.

    Attributes:
        dataset: the user's dataset.
        num_samples: samples that an epoch draws; None for an iterable dataset.
        collate_fn: makes a batch of a list of samples.
        config: settings.
        rank: this rank.
        world_size: number of data-parallel ranks.
        control: the control group to join; None for one rank alone.
    """

    dataset: Any
    num_samples: int | None
    collate_fn: Callable[[list[Any]], Any]
    config: LoaderConfig
    rank: int
    world_size: int
    control: ControlGroup | None


class RankData:
    """Runs a job, epoch by epoch, in this process (and its data workers)."""

    def __init__(self, job: RankJob) -> None:
        self._job = job
        self._transport: Transport = job.control.join() if job.control else LocalTransport()
        self._source = SampleSource(job.dataset, job.config, rank=job.rank)

    def steps(self, start: EpochStart, *, has_room: Callable[[], bool] = lambda: True) -> Iterator[Step]:
        """Steps of one epoch.

        Args:
            start: how the pass begins.
            has_room: whether there is room for more steps; may wait a while for it.

        Raises:
            ODBError: the same on every rank, when any rank cannot go on.
        """
        job = self._job
        rank_epoch = RankEpoch(
            rank=job.rank,
            start=start,
            ledger=open_ledger(
                job.num_samples, world_size=job.world_size, mode=job.config.mode, epoch=start.epoch, state=start.state
            ),
            config=job.config,
            source=self._source,
            collate_fn=job.collate_fn,
        )
        metered = MeteredTransport(self._transport)
        for step in drive(rank_epoch.run(), metered, has_room=has_room):
            info = replace(step.info, exchange_s=metered.seconds, exchange_bytes=metered.bytes)
            yield replace(step, info=info)

    def close(self) -> None:
        """End the data workers."""
        self._source.close()
