"""All ranks of an epoch in one process: real grouping, exchange, weights and release; no workers, no model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from odb_libra_lightning.odb.config import LoaderConfig
from odb_libra_lightning.odb.epoch import RankEpoch, Step
from odb_libra_lightning.odb.errors import SampleError
from odb_libra_lightning.odb.reader import Failure, Sample, SampleReader
from odb_libra_lightning.odb.sharding import rank_views
from odb_libra_lightning.odb.transport import play


class ListSource:
    """A rank's samples, read from the dataset when they are asked for."""

    in_workers = 0

    def __init__(self, dataset: Sequence[Any], identities: Sequence[int], config: LoaderConfig) -> None:
        self._reader = SampleReader(dataset, config)
        self._identities = list(identities)

    @property
    def in_sampler(self) -> int:
        return len(self._identities)

    def take(self, count: int) -> list[Sample]:
        drawn, self._identities = self._identities[:count], self._identities[count:]
        samples = []
        for identity in drawn:
            sample = self._reader[identity]
            if isinstance(sample, Failure):
                raise SampleError(*sample)
            samples.append(sample)
        return samples


def simulate(
    dataset: Sequence[Any],
    *,
    world_size: int,
    collate_fn: Callable[[list[Any]], Any] = list,
    shares: Sequence[Sequence[int]] | None = None,
    epoch: int = 0,
    accumulation: int = 1,
    has_room: Callable[[int], bool] = lambda rank: True,
    **settings: Any,
) -> list[list[Step]]:
    """Steps of every rank over a list of samples; `shares` replaces the shuffled share of each rank."""
    config = LoaderConfig(**{"loss_tokens": lambda batch: 1, **settings})
    if shares is None:
        shares = [
            rank_views(len(dataset), rank=r, world_size=world_size, epoch=epoch, seed=config.seed).tolist()
            for r in range(world_size)
        ]
    ranks = (
        RankEpoch(
            rank=rank,
            world_size=world_size,
            epoch=epoch,
            accumulation=accumulation,
            num_samples=len(dataset),
            config=config,
            source=ListSource(dataset, shares[rank], config),
            collate_fn=collate_fn,
        ).run()
        for rank in range(world_size)
    )
    return play(ranks, has_room=has_room)
