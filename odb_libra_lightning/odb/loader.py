"""Token-budgeted batches, formed online, for a training loop."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import default_collate
from typing_extensions import override

from odb_libra_lightning.odb.collate_process import CollateProcess
from odb_libra_lightning.odb.config import LoaderConfig, takes_settings
from odb_libra_lightning.odb.feeds import Feed, FollowerFeed, LeaderFeed, LocalFeed, decoder
from odb_libra_lightning.odb.position import Position
from odb_libra_lightning.odb.rank_data import RankData, RankJob
from odb_libra_lightning.odb.sharding import check_shard, samples_drawn
from odb_libra_lightning.odb.training_loader import TrainingLoader


class ODBLoader(TrainingLoader):
    """Token-budgeted batches formed from realized lengths, in equal number on every rank.

    Guarantee: in each epoch every sample of the dataset is in exactly one batch of one rank (and
    `world_size * ceil(N / world_size) - N` of them in one more), in an order that is new in each epoch and the
    same on every rank; all ranks get the same number of batches; an error on one rank is raised on all of them at
    the same step. Price: the number of batches is unknown in advance, so the loader has no length; the first
    batch comes once `buffer_size` samples are read; a rank without data gets a stand-in batch whose
    `info.loss_weight` is 0.

    The loss of a batch must be multiplied by `info.loss_weight` for gradients that data parallelism averages.

    Example:
        >>> loader = ODBLoader(dataset, collate_fn=collate, l_max=16_384, num_workers=4)  # doctest: +SKIP
        >>> for batch in loader:  # doctest: +SKIP
        ...     (model(**batch).loss * loader.info.loss_weight).backward()

    Args:
        dataset: map-style dataset, of the same length on every rank, or an iterable one.
        collate_fn: makes a batch of a list of samples; None stacks them.
        l_max: token budget of a batch on one rank, tokens.
        rank: this data-parallel rank; None asks the process group when the first batch is drawn.
        world_size: number of data-parallel ranks; None likewise.
        replica_size: processes that share each data-parallel rank, as those of a context-parallel group do: the first
            of them loads, and all get the same batches.
        accumulation: micro-batches of an accumulation window.
        **settings: the other fields of `LoaderConfig`.

    Raises:
        ValueError: if a setting, or the size of the dataset, cannot work.
    """

    @takes_settings
    def __init__(
        self,
        dataset: Any,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        l_max: int = 8192,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        replica_size: int = 1,
        accumulation: int = 1,
        **settings: Any,
    ) -> None:
        if not (collate_fn is None or callable(collate_fn)):
            raise ValueError(f"collate_fn must be a function or None, got {collate_fn!r}")
        self.dataset = dataset
        self.collate_fn = collate_fn or default_collate
        self.config = LoaderConfig.from_keywords(l_max=l_max, **settings)
        self.loss_scaling = self.config.loss_scaling
        self._num_samples = _count_samples(dataset, self.config)
        order: dict[str, Any] = {"seed": self.config.seed, "max_samples": self.config.max_samples}
        if self._num_samples is not None:
            order |= {"dataset": len(dataset), "shuffle": self.config.shuffle}
        else:
            order["stream_sharding"] = self.config.stream_sharding
            if self.config.stream_sharding == "dataset":
                order["num_workers"] = max(self.config.num_workers, 1)
        super().__init__(
            Position(self._num_samples, self.config.mode, order),
            rank=rank,
            world_size=world_size,
            replica_size=replica_size,
            accumulation=accumulation,
            keep_feed=self.config.persistent_workers,
        )

    @override
    def _warn_of_no_batch(self, epoch: int) -> None:
        why = f"(l_max={self.config.l_max}, oversize={self.config.oversize!r}, empty={self.config.empty!r})"
        if self._num_samples is None:
            why += ", or the iterable dataset gave none; a generator can be iterated only once"
        warnings.warn(f"epoch {epoch} has no batch: every sample was dropped {why}", stacklevel=3)

    @override
    def _open_feed(self, rank: int, world_size: int) -> Feed:
        decode = decoder(pinned=self.config.pin_memory)
        channel = control = None
        if world_size * self._replica_size > 1:
            store = self._joined_control(rank, world_size, timeout=self.config.timeout, transport=self.config.transport)
            channel = store.replica_channel()
            if channel is not None and not store.leads:
                return FollowerFeed(channel, decode)
            control = store.next_group()
        job = RankJob(
            dataset=self.dataset,
            num_samples=self._num_samples,
            collate_fn=self.collate_fn,
            config=self.config,
            rank=rank,
            world_size=world_size,
            control=control,
        )
        if channel is not None:
            in_process = self.config.num_workers == 0
            return LeaderFeed(
                lambda: LocalFeed(RankData(job), bytes) if in_process else CollateProcess(job), channel, decode
            )
        return CollateProcess(job, decode) if self.config.num_workers else LocalFeed(RankData(job), decode)

    @override
    def _check_shard(self, rank: int, world_size: int) -> None:
        # Of a stream nobody knows whether it has a sample for each rank.
        check_shard(world_size if self._num_samples is None else self._num_samples, rank=rank, world_size=world_size)


def _count_samples(dataset: Any, config: LoaderConfig) -> int | None:
    """Samples that an epoch draws; None for an iterable dataset.

    Raises:
        ValueError: for a dataset of neither kind, or a setting that an iterable one cannot have.
    """
    # An IterableDataset has a __getitem__ that raises, and may have a length, which is then a guess.
    if not isinstance(dataset, torch.utils.data.IterableDataset) and hasattr(dataset, "__getitem__"):
        if hasattr(dataset, "__len__"):
            return samples_drawn(len(dataset), config.max_samples)
    elif hasattr(dataset, "__iter__"):
        if config.mode == "non_join":
            raise ValueError(
                "mode='non_join' needs a map-style dataset: what a rank has left of a stream cannot be dealt"
            )
        return None
    raise ValueError(
        f"ODBLoader needs a map-style dataset, with __getitem__ and __len__, or an iterable one, with __iter__; got a "
        f"{type(dataset).__name__}"
    )
