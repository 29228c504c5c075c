"""The loader that a training loop iterates: plain batches out, facts about them beside."""

from __future__ import annotations

import itertools
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import IterableDataset, default_collate
from torch.utils.data._utils.pin_memory import pin_memory

from odb_libra_lightning.odb.batch_info import BatchInfo
from odb_libra_lightning.odb.collate_process import CollateProcess
from odb_libra_lightning.odb.config import LoaderConfig, takes_settings
from odb_libra_lightning.odb.epoch import Step
from odb_libra_lightning.odb.rank_data import RankData, RankJob
from odb_libra_lightning.odb.rendezvous import ControlStore, current_rank
from odb_libra_lightning.odb.sharding import check_shard, views_per_rank
from odb_libra_lightning.odb.wire import from_bytes

# Batches whose facts are kept: a trainer looks a batch or two ahead of the one that it trains on.
_RECENT = 16
_END = object()


class ODBLoader:
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
        dataset: map-style dataset. Its length must be the same on every rank.
        collate_fn: makes a batch of a list of samples; None stacks them.
        l_max: token budget of a batch on one rank, tokens.
        rank: this rank; None asks the process group when the first batch is drawn.
        world_size: number of data-parallel ranks; None likewise.
        accumulation: micro-batches of an accumulation window, or a function that tells when an epoch begins.
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
        accumulation: int | Callable[[], int] = 1,
        **settings: Any,
    ) -> None:
        if isinstance(dataset, IterableDataset) or not (
            hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
        ):
            raise ValueError(
                f"ODBLoader needs a map-style dataset, with __getitem__ and __len__, got a {type(dataset).__name__}"
            )
        if (rank is None) != (world_size is None):
            raise ValueError(f"give both rank and world_size or neither, got {rank} and {world_size}")
        self.dataset = dataset
        self.collate_fn = collate_fn or default_collate
        self.config = LoaderConfig.from_keywords(l_max=l_max, **settings)
        self._given_ranks = None if rank is None or world_size is None else (rank, world_size)
        check_shard(len(dataset), rank=rank or 0, world_size=world_size or 1)
        self._accumulation = accumulation
        if not callable(accumulation):
            self._checked_accumulation()
        self._next = (0, 0)  # epoch of the next pass, and batches of it that a checkpoint says are trained on
        self._last: tuple[int, int, bool] | None = None  # the last pass: epoch, batches given out, whether it ended
        self._marks = False  # whether someone says which batches have been trained on
        self._marked = 0  # how many of the last pass have
        self._offset = 0  # what a trainer's number of a batch exceeds its own by
        self._resumed_settings: dict[str, Any] = {}
        self._recent: deque[BatchInfo] = deque(maxlen=_RECENT)
        self._control: ControlStore | None = None
        self._producer: RankData | CollateProcess | None = None
        self._given_at = 0.0  # when the last batch was given out
        self._busy = False  # whether a pass over the loader has begun and not ended

    @property
    def info(self) -> BatchInfo:
        """Facts about the batch that the loader gave out last.

        Raises:
            LookupError: before the first batch.
        """
        if not self._recent:
            raise LookupError("the loader has not given out a batch yet")
        return self._recent[-1]

    def info_at(self, batch_idx: int) -> BatchInfo:
        """Facts about a recent batch of the current epoch, by its number: trainers draw batches ahead.

        Raises:
            LookupError: if it is not among the last few.
        """
        for info in reversed(self._recent):
            if info.batch_idx == batch_idx - self._offset:
                return info
        raise LookupError(f"batch {batch_idx} is not among the last {_RECENT} of this loader")

    @property
    def sampler(self) -> ODBLoader:
        """Itself: trainers call `loader.sampler.set_epoch`."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Number of the next epoch; without this call each pass over the loader is the one after the last."""
        self._next = (epoch, self._next[1] if epoch == self._next[0] else 0)

    def mark_trained(self, batch_idx: int) -> None:
        """Tell the loader that a batch has been trained on, for `state_dict`.

        A trainer draws batches ahead of the one it trains on, and says -1 before it draws any. In a plain loop nobody
        need call this: a batch given out counts as trained on.
        """
        self._marks = True
        self._marked = batch_idx - self._offset + 1

    def begin_training_on(self, batch_idx: int) -> None:
        """Learn by which number a trainer calls the batch that it begins to train on.

        After a checkpoint of an epoch's last step, Lightning counts on into the next epoch.

        Raises:
            RuntimeError: if the trainer goes on within an epoch and has not told the loader.
        """
        self._offset = batch_idx - self._marked if self._marks else 0
        if self._offset and not self._resumed_settings:
            raise RuntimeError(
                f"training goes on at batch {batch_idx} of an epoch, and the loader was not told to: the trainer drops "
                "its state where trainer.estimated_stepping_batches is read in configure_optimizers, so do not"
            )
        if self._offset % self._checked_accumulation():
            raise RuntimeError(
                f"training goes on from the last step of an epoch of {self._offset} batches and the trainer counts on, "
                "so its accumulation windows do not begin with the loader's: resume from a checkpoint of an epoch's end"
            )

    def state_dict(self) -> dict[str, Any]:
        """Where training stands: the epoch and the number of its batches trained on, and what batches depend on."""
        epoch, batches = self._next
        if self._last is not None:
            epoch, given, ended = self._last
            batches = self._marked if self._marks else given
            if ended and batches == given:
                epoch, batches = epoch + 1, 0
        return {"epoch": epoch, "batches": batches, "settings": self._batch_settings()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Have the next pass go on where a checkpoint was written: same batches, the trained ones left out.

        The rest of the epoch is formed anew from its beginning, so this takes as long as the loader alone takes to get
        there.
        """
        self._next = (state_dict["epoch"], state_dict["batches"])
        self._last = None
        self._resumed_settings = state_dict["settings"]

    @property
    def samples_per_epoch(self) -> int:
        """Samples that an epoch draws over all ranks, the repeats included."""
        _, world_size = self._ranks()
        return views_per_rank(len(self.dataset), world_size) * world_size

    def __iter__(self) -> Iterator[Any]:
        """Batches of one epoch. Nothing starts before the first is asked for."""
        epoch, skip = self._next
        if skip:
            self._check_resumed_settings()
        self._close_unless(idle=True)
        producer = self._producer = self._producer or self._start()
        steps = producer.steps(epoch, self._batch_settings()["accumulation"])
        self._next = (epoch + 1, 0)
        self._marked = skip
        self._offset = 0
        self._recent.clear()
        self._busy = True
        try:
            given = sum(1 for _ in itertools.islice(steps, skip))
            if given < skip:
                raise ValueError(
                    f"the checkpoint was written after batch {skip} of epoch {epoch}, which now has {given}: "
                    "is the dataset still the same?"
                )
            self._last = (epoch, given, False)
            while (batch := self._next_batch(steps)) is not _END:
                given += 1
                self._last = (epoch, given, False)
                yield batch
            self._last = (epoch, given, True)
            self._busy = False
            if given == 0:
                warnings.warn(
                    f"epoch {epoch} has no batch: every sample was dropped (l_max={self.config.l_max}, "
                    f"oversize={self.config.oversize!r}, empty={self.config.empty!r})",
                    stacklevel=2,
                )
        finally:
            if self._producer is producer:
                self._close_unless(idle=self.config.persistent_workers)

    def close(self) -> None:
        """End the collate process, if one runs, and this rank's part in the control store."""
        self._stop()
        self._control = None

    def _stop(self) -> None:
        producer, self._producer = self._producer, None
        self._busy = False
        if isinstance(producer, CollateProcess):
            producer.close()

    def _close_unless(self, *, idle: bool) -> None:
        """Keep the collate process only if it has ended its epoch and is allowed to wait for the next."""
        if self._busy or not idle:
            self._stop()

    def _next_batch(self, steps: Iterator[Step]) -> Any:
        begin = time.perf_counter()
        step = next(steps, None)
        if step is None:
            return _END
        batch = from_bytes(step.payload)
        if self.config.pin_memory and torch.cuda.is_available():
            batch = pin_memory(batch)  # type: ignore[no-untyped-call]
        now = time.perf_counter()
        since = self._given_at if self._recent else begin
        self._recent.append(replace(step.info, wait_s=now - begin, elapsed_s=now - since))
        self._given_at = now
        return batch

    def _start(self) -> RankData | CollateProcess:
        rank, world_size = self._ranks()
        if world_size > 1 and self._control is None:
            self._control = ControlStore(rank=rank, world_size=world_size, timeout=self.config.timeout)
        job = RankJob(
            dataset=self.dataset,
            collate_fn=self.collate_fn,
            config=self.config,
            rank=rank,
            world_size=world_size,
            control=self._control.next_group() if self._control else None,
        )
        return CollateProcess(job) if self.config.num_workers else RankData(job)

    def _batch_settings(self) -> dict[str, Any]:
        """All that the batches of an epoch depend on, beside the data."""
        return {
            "samples": len(self.dataset),
            "world_size": self._ranks()[1],
            "accumulation": self._checked_accumulation(),
            **self.config.batch_settings(),
        }

    def _checked_accumulation(self) -> int:
        accumulation = self._accumulation() if callable(self._accumulation) else self._accumulation
        if accumulation < 1:
            raise ValueError(f"accumulation must be at least 1 micro-batch, got {accumulation}")
        return accumulation

    def _check_resumed_settings(self) -> None:
        now = self._batch_settings()
        for name, value in self._resumed_settings.items():
            if now[name] != value:
                raise ValueError(
                    f"the checkpoint was written within an epoch with {name}={value}, and this loader has {now[name]}: "
                    "its batches would be others. Resume with the same, or from a checkpoint of an epoch's end"
                )

    def _ranks(self) -> tuple[int, int]:
        rank, world_size = self._given_ranks or current_rank()
        check_shard(len(self.dataset), rank=rank, world_size=world_size)
        return rank, world_size
