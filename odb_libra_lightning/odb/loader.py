"""The loader that a training loop iterates: plain batches out, facts about them beside."""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from numbers import Integral
from typing import Any

import torch
from torch.utils.data import default_collate

from odb_libra_lightning.odb.batch_info import BatchInfo
from odb_libra_lightning.odb.collate_process import CollateProcess
from odb_libra_lightning.odb.config import LoaderConfig, takes_settings
from odb_libra_lightning.odb.feeds import Feed, FollowerFeed, LeaderFeed, LocalFeed, decoder
from odb_libra_lightning.odb.position import Position
from odb_libra_lightning.odb.rank_data import RankData, RankJob
from odb_libra_lightning.odb.rendezvous import ControlStore, current_rank
from odb_libra_lightning.odb.sharding import check_shard, samples_drawn
from odb_libra_lightning.odb.steps import Step

# Batches whose facts are kept: a trainer looks a batch or two ahead of the one that it trains on.
_RECENT = 16
_END = object()


@dataclass(frozen=True, kw_only=True)
class TrainerClock:
    """How the trainer that iterates a loader counts.

    Attributes:
        accumulation: micro-batches of an accumulation window.
        limit: number of batches at which it ends an epoch; None for where the loader ends.
        next_step: by which number it would call the next batch, were it to go on from a checkpoint written now; None
            where it counts as the loader does.
    """

    accumulation: int = 1
    limit: int | None = None
    next_step: int | None = None


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
        if (rank is None) != (world_size is None):
            raise ValueError(f"give both rank and world_size or neither, got {rank} and {world_size}")
        if replica_size < 1 or (replica_size > 1 and rank is None):
            raise ValueError(
                f"replica_size must be at least 1, and above 1 needs rank and world_size; got {replica_size}"
            )
        if not _is_whole(accumulation, least=1):
            raise ValueError(f"accumulation must be a whole number of at least 1 micro-batch, got {accumulation!r}")
        if not (collate_fn is None or callable(collate_fn)):
            raise ValueError(f"collate_fn must be a function or None, got {collate_fn!r}")
        self.dataset = dataset
        self.collate_fn = collate_fn or default_collate
        self.config = LoaderConfig.from_keywords(l_max=l_max, **settings)
        self._num_samples = _count_samples(dataset, self.config)
        self._given_ranks = None if rank is None or world_size is None else (rank, world_size)
        self._replica_size = replica_size
        self._check_shard(*(self._given_ranks or (0, 1)))
        self._clock: Callable[[], TrainerClock] = partial(TrainerClock, accumulation=accumulation)
        self._trainer: object | None = None
        order: dict[str, Any] = {"seed": self.config.seed, "max_samples": self.config.max_samples}
        if self._num_samples is not None:
            order |= {"dataset": len(dataset), "shuffle": self.config.shuffle}
        else:
            order["stream_sharding"] = self.config.stream_sharding
            if self.config.stream_sharding == "dataset":
                order["num_workers"] = max(self.config.num_workers, 1)
        self.position = Position(self._num_samples, self.config.mode, order)
        self._marks = False  # whether someone says which batches have been trained on
        self._recent: deque[BatchInfo] = deque(maxlen=_RECENT)
        self._control: ControlStore | None = None
        self._feed: Feed | None = None
        self._given_at = 0.0  # when the last batch was given out
        self._busy = False  # whether a pass over the loader has begun and not ended

    @property
    def info(self) -> BatchInfo:
        """Facts about the batch that the loader gave out last.

        A trainer draws batches ahead of the one it trains on: under one, ask `info_at`.

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
            if info.batch_idx == batch_idx:
                return info
        numbers = [info.batch_idx for info in self._recent]
        raise LookupError(f"batch {batch_idx} is not among the last of this loader, {numbers}")

    def set_epoch(self, epoch: int) -> None:
        """Number of the next epoch; without this call each pass over the loader is the one after the last."""
        self.position.set_epoch(_checked_epoch(epoch), carry_on=self._marks)

    def restart(self, epoch: int = 0) -> None:
        """Forget where training stands: the next pass is this epoch, from its beginning."""
        self.position.restart(_checked_epoch(epoch))

    def follow(self, trainer: object, clock: Callable[[], TrainerClock], *, epoch: int) -> None:
        """Count as a trainer does, and be told by it which batches it has trained on, by `mark_trained`.

        Args:
            trainer: the trainer.
            clock: tells, when a pass begins and when a checkpoint is written, how it counts.
            epoch: where training begins, if another trainer has used the loader.
        """
        if self._trainer is not None and not self.follows(trainer):
            self.restart(epoch)
        self._trainer = trainer
        self._clock = clock
        self._marks = True

    def follows(self, trainer: object) -> bool:
        """Whether it counts as this trainer does."""
        return self._trainer is trainer

    def mark_trained(self, batch_idx: int) -> None:
        """Tell the loader that a batch has been trained on, for `state_dict`.

        For a trainer that the loader follows; in a plain loop a batch given out counts as trained on. Batches count
        when their accumulation window is full, since there is no update before.
        """
        self.position.settle(through=batch_idx)

    def state_dict(self) -> dict[str, Any]:
        """Where training stands: the epoch, and which of its views are trained on; complete on every rank."""
        return self.position.state_dict(next_step=self._clock().next_step)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Have the next pass go on where a state was taken: with what is not trained on, in new batches.

        Nothing is read again. The number of ranks and of workers, the buffer and the budget may be others than before:
        with as many ranks as before each goes on with its own share, else what is left is shared out anew.

        Raises:
            ValueError: if the state is of another dataset or order.
            RuntimeError: within a pass.
        """
        if self._busy:
            raise RuntimeError(
                "a loader's state can only be restored between two passes, and this loader has given out batches. A "
                "trainer whose strategy restores checkpoints after its set-up, as for FSDP2 and DeepSpeed, draws its "
                "first batch before that if trainer.estimated_stepping_batches is read in configure_optimizers: do not"
            )
        self.position.load_state_dict(state_dict)

    @property
    def samples_per_epoch(self) -> int | None:
        """Samples that an epoch draws over all ranks, the repeats included; None for an iterable dataset."""
        return self.position.samples_per_epoch(self._ranks()[1])

    def __iter__(self) -> Iterator[Any]:
        """Batches of one epoch. Nothing starts before the first is asked for."""
        rank, world_size = self._ranks()
        clock = self._clock()
        start = self.position.begin(
            world_size, carry_on=self._marks, accumulation=clock.accumulation, limit=clock.limit
        )
        self._close_unless(idle=True)
        feed = self._feed = self._feed or self._open_feed(rank, world_size)
        self._recent.clear()
        self._busy = True
        try:
            steps = feed.steps(start)
            while (batch := self._next_batch(steps)) is not _END:
                yield batch
                if self._feed is not feed:
                    raise RuntimeError("the loader was closed, or another pass over it has begun, before this ended")
            self._busy = False
            self.position.end()
            if not self._recent and not start.state:
                why = f"(l_max={self.config.l_max}, oversize={self.config.oversize!r}, empty={self.config.empty!r})"
                if self._num_samples is None:
                    why += ", or the iterable dataset gave none; a generator can be iterated only once"
                warnings.warn(f"epoch {start.epoch} has no batch: every sample was dropped {why}", stacklevel=2)
        finally:
            if self._feed is feed:
                self._close_unless(idle=self.config.persistent_workers)

    def close(self) -> None:
        """End the collate process, if one runs, and this rank's part in the control store."""
        self._stop()
        if self._control is not None:
            self._control.close()
            self._control = None

    def _stop(self) -> None:
        feed, self._feed = self._feed, None
        self._busy = False
        if feed is not None:
            feed.close()

    def _close_unless(self, *, idle: bool) -> None:
        """Keep the collate process only if it has ended its epoch and is allowed to wait for the next."""
        if self._busy or not idle:
            self._stop()

    def _next_batch(self, steps: Iterator[Step]) -> Any:
        begin = time.perf_counter()
        step = next(steps, None)
        if step is None:
            return _END
        now = time.perf_counter()
        since = self._given_at if self._recent else begin
        self._recent.append(replace(step.info, wait_s=now - begin, elapsed_s=now - since))
        self._given_at = now
        self.position.give(step.info, step.views)
        if not self._marks:
            self.position.settle(through=step.info.batch_idx)
        return step.payload

    def _open_feed(self, rank: int, world_size: int) -> Feed:
        decode = decoder(pinned=self.config.pin_memory)
        channel = control = None
        if world_size * self._replica_size > 1:
            if self._control is None:
                self._control = ControlStore(
                    rank=rank, world_size=world_size, timeout=self.config.timeout, transport=self.config.transport
                )
            if (found := len(self._control.members)) != self._replica_size:
                raise ValueError(
                    f"replica_size={self._replica_size}, and {found} of the processes say that they are data-parallel "
                    f"rank {rank} of {world_size}: give each its own rank, or replica_size={found}"
                )
            channel = self._control.replica_channel()
            if channel is not None and not self._control.leads:
                return FollowerFeed(channel, decode)
            control = self._control.next_group()
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

    def _ranks(self) -> tuple[int, int]:
        rank, world_size = self._given_ranks or current_rank()
        self._check_shard(rank, world_size)
        return rank, world_size

    def _check_shard(self, rank: int, world_size: int) -> None:
        # Of a stream nobody knows whether it has a sample for each rank.
        check_shard(world_size if self._num_samples is None else self._num_samples, rank=rank, world_size=world_size)


def _is_whole(value: object, *, least: int) -> bool:
    return not isinstance(value, bool) and isinstance(value, Integral) and least <= int(value) < 2**63


def _checked_epoch(epoch: int) -> int:
    if not _is_whole(epoch, least=0):
        raise ValueError(f"epoch must be a whole number of at least 0, got {epoch!r}")
    return int(epoch)


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
