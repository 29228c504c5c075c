"""All ranks of an epoch in one process: real grouping, exchange, weights and release; no workers, no model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Any

import numpy as np

from odb_libra_lightning.odb.config import LoaderConfig
from odb_libra_lightning.odb.epoch import EpochStart, RankEpoch, Source
from odb_libra_lightning.odb.errors import SampleError
from odb_libra_lightning.odb.ledger import EpochLedger, open_ledger
from odb_libra_lightning.odb.protocol import GroupingRound
from odb_libra_lightning.odb.reader import Draw, Failure, Sample, SampleReader
from odb_libra_lightning.odb.sharding import epoch_order, samples_drawn
from odb_libra_lightning.odb.steps import Step
from odb_libra_lightning.odb.transport import play, tapped
from odb_libra_lightning.odb.wire import to_bytes


class ListSource:
    """A rank's samples, read from the dataset when they are asked for."""

    in_workers = 0

    def __init__(self, dataset: Sequence[Any], rank: int, config: LoaderConfig) -> None:
        self._reader = SampleReader(dataset, config)
        self._rank = rank
        self._config = config
        self._draws: list[Draw] = []

    def start(self, ledger: EpochLedger) -> None:
        config = self._config
        order = epoch_order(
            len(self._reader.dataset),
            epoch=ledger.epoch,
            seed=config.seed,
            shuffle=config.shuffle,
            max_samples=config.max_samples,
        )
        views = ledger.share(self._rank)
        identities = order[ledger.positions(views)]
        self._draws = [(v, i, ledger.epoch) for v, i in zip(views.tolist(), identities.tolist(), strict=True)]

    @property
    def in_sampler(self) -> int:
        return len(self._draws)

    def take(self, count: int) -> list[Sample]:
        drawn, self._draws = self._draws[:count], self._draws[count:]
        return [self._read(draw) for draw in drawn]

    def _read(self, draw: Draw) -> Sample:
        sample = self._reader[draw]
        if isinstance(sample, Failure):
            raise SampleError(*sample)
        return sample


class LateSource(ListSource):
    """Workers that read ahead, and have less at hand than they are asked for; `SampleSource` would wait instead.

    Nothing has arrived in the first `latency` rounds; from then on at least one more view arrives in each round.
    """

    def __init__(
        self, dataset: Sequence[Any], rank: int, config: LoaderConfig, *, latency: int, random: Random
    ) -> None:
        super().__init__(dataset, rank, config)
        self._latency = latency
        self._random = random
        self._workers: list[Draw] = []
        self._rounds = self._arrived = 0

    def start(self, ledger: EpochLedger) -> None:
        super().start(ledger)
        self._workers = []
        self._rounds = self._arrived = 0

    @property
    def in_workers(self) -> int:  # type: ignore[override]
        return len(self._workers)

    def next_round(self) -> None:
        """A round is over."""
        self._rounds += 1
        if self._rounds >= self._latency:
            self._arrived += self._random.randint(1, 9)

    def take(self, count: int) -> list[Sample]:
        ready = min(count, self._arrived, self.in_sampler + self.in_workers)
        ahead = max(ready, self._random.randint(0, 20)) - self.in_workers
        if ahead > 0:
            self._workers += self._draws[:ahead]
            del self._draws[:ahead]
        taken, self._workers = self._workers[:ready], self._workers[ready:]
        self._arrived -= ready
        return [self._read(draw) for draw in taken]


class LengthSource(ListSource):
    """For large epochs: a dataset of lengths that are samples themselves, without the reader and its policies."""

    def _read(self, draw: Draw) -> Sample:
        view, identity, _ = draw
        return Sample(view, identity, self._reader.dataset[identity], _NOTHING)


_NOTHING = to_bytes(None)


class UnevenLedger(EpochLedger):
    """Shares of any size and order, as `rank -> dataset indices`, for an epoch without shuffle."""

    def __init__(self, num_samples: int, shares: Sequence[Sequence[int]]) -> None:
        super().__init__(num_samples, len(shares), equal=False)
        self._shares = [np.array(share, np.int64) for share in shares]
        self.views = np.concatenate(self._shares)

    def share(self, rank: int) -> Any:
        return self._shares[rank]

    def share_sizes(self) -> Any:
        return np.array([len(share) for share in self._shares])


def simulate(
    dataset: Sequence[Any],
    *,
    world_size: int,
    collate_fn: Callable[[list[Any]], Any] = list,
    shares: Sequence[Sequence[int]] | None = None,
    epoch: int = 0,
    accumulation: int = 1,
    limit: int | None = None,
    state: dict[str, Any] | None = None,
    has_room: Callable[[int], bool] = lambda rank: True,
    watch: Callable[[int, RankEpoch, GroupingRound], None] = lambda rank, epoch, result: None,
    observed: Callable[[int], bool] = lambda rank: True,
    source: Callable[[Sequence[Any], int, LoaderConfig], Source] = ListSource,
    tap: Callable[[int, Any], bool] = lambda rank, event: False,
    **settings: Any,
) -> list[list[Step]]:
    """Steps of every rank over a list of samples.

    Args:
        dataset: the samples.
        world_size: number of ranks.
        collate_fn: makes a batch of a list of samples.
        shares: replaces the shuffled share of each rank, in `join` mode.
        epoch: number of the epoch, from 0.
        accumulation: micro-batches of a window.
        limit: number of the step at which the trainer ends the epoch.
        state: state of a ledger to go on from.
        has_room: whether a rank has room for more steps.
        watch: called after each round of each rank.
        observed: whether a rank learns which views the others emit.
        source: a rank's samples.
        tap: called with each event of each rank.
        settings: of `LoaderConfig`.
    """
    if shares is not None:
        settings["shuffle"] = False
    config = LoaderConfig(**{"loss_tokens": lambda batch: 1, **settings})
    start = EpochStart(
        epoch=epoch, accumulation=accumulation, first_step=state["steps"] if state else 0, limit=limit, state=state
    )
    ranks: list[RankEpoch] = []
    for rank in range(world_size):
        ledger = (
            UnevenLedger(len(dataset), shares)
            if shares is not None
            else open_ledger(
                samples_drawn(len(dataset), config.max_samples),
                world_size=world_size,
                mode=config.mode,
                epoch=epoch,
                state=state,
            )
        )
        ranks.append(
            RankEpoch(
                rank=rank,
                start=start,
                ledger=ledger,
                config=config,
                source=source(dataset, rank, config),
                collate_fn=collate_fn,
                observed=observed(rank),
                watch=lambda result, rank=rank: watch(rank, ranks[rank], result),
            )
        )
    return play((tapped(rank.run(), partial(tap, number)) for number, rank in enumerate(ranks)), has_room=has_room)
