"""What all loaders of this package are to a training loop: batches out, facts beside, a place to go on from."""

from __future__ import annotations

import time
import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from numbers import Integral
from typing import Any, Literal

from odb_libra_lightning.odb.account import EpochAccount
from odb_libra_lightning.odb.batch_info import BatchInfo
from odb_libra_lightning.odb.feeds import Feed
from odb_libra_lightning.odb.position import Position
from odb_libra_lightning.odb.rendezvous import ControlStore, current_rank
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


class TrainingLoader(ABC):
    """Base of the loaders, and what callbacks and strategies may ask of one.

    A loader says through `_open_feed` where its steps come from; the pass over an epoch, the facts about recent batches
    and where training stands are kept here.

    Args:
        position: where training stands.
        rank: this data-parallel rank; None asks the process group when the first batch is drawn.
        world_size: number of data-parallel ranks; None likewise.
        replica_size: processes that share each data-parallel rank.
        accumulation: micro-batches of an accumulation window, for a loop without a trainer.
        keep_feed: keep the feed, and what runs for it, from one epoch to the next.

    Attributes:
        position: where training stands, the same on every rank.
        on_pass: called when a pass begins, before its first batch is drawn.
        on_batch: called with every batch at the moment it is drawn, on every process, before it is given out. A trainer
            or the loader itself draws batches ahead of the one that is trained on.

    Raises:
        ValueError: if the numbers of ranks cannot work.
    """

    loss_scaling: Literal["token", "sample", "none"] = "token"

    def __init__(
        self,
        position: Position,
        *,
        rank: int | None,
        world_size: int | None,
        replica_size: int,
        accumulation: int,
        keep_feed: bool,
    ) -> None:
        if (rank is None) != (world_size is None):
            raise ValueError(f"give both rank and world_size or neither, got {rank} and {world_size}")
        if replica_size < 1 or (replica_size > 1 and rank is None):
            raise ValueError(
                f"replica_size must be at least 1, and above 1 needs rank and world_size; got {replica_size}"
            )
        if not _is_whole(accumulation, least=1):
            raise ValueError(f"accumulation must be a whole number of at least 1 micro-batch, got {accumulation!r}")
        self.on_pass: Callable[[], None] | None = None
        self.on_batch: Callable[[Any], None] | None = None
        self.position = position
        self._given_ranks = None if rank is None or world_size is None else (rank, world_size)
        self._replica_size = replica_size
        self._check_shard(*(self._given_ranks or (0, 1)))
        self._clock: Callable[[], TrainerClock] = partial(TrainerClock, accumulation=accumulation)
        self._trainer: object | None = None
        self._marks = False  # whether someone says which batches have been trained on
        self._recent: deque[BatchInfo] = deque(maxlen=_RECENT)
        self._keep_feed = keep_feed
        self._control: ControlStore | None = None
        self._feed: Feed | None = None
        self._pass: object | None = None  # the pass that the feed serves
        self._given_at = 0.0  # when the last batch was given out
        self._busy = False  # whether a pass over the loader has begun and its feed has not come to its end

    @property
    def ranks(self) -> tuple[int, int]:
        """Data-parallel rank and number of ranks: as given, or else those of this process.

        Raises:
            ODBError: if neither was given, and the process group of this process does not exist yet.
        """
        return self._given_ranks or current_rank()

    @property
    def replica_size(self) -> int:
        """Processes that share each data-parallel rank."""
        return self._replica_size

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

    @property
    def samples_done(self) -> int:
        """Samples of the epoch under way that are trained on or dropped, all ranks; 0 between two epochs."""
        return self.position.samples_done

    @property
    def account(self) -> EpochAccount | None:
        """What the epoch under way has covered, or the last one between epochs; None where nobody knows its size."""
        return self.position.account

    @property
    def samples_per_epoch(self) -> int | None:
        """Samples that an epoch draws over all ranks, the repeats included; None for an iterable dataset."""
        return self.position.samples_per_epoch(self._ranks()[1])

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

        Nothing is read again. The number of ranks and of workers, and how batches are made, may be others than before.

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

    def __iter__(self) -> Iterator[Any]:
        """Batches of one epoch. Nothing starts before the first is asked for."""
        rank, world_size = self._ranks()
        clock = self._clock()
        start = self.position.begin(
            world_size, carry_on=self._marks, accumulation=clock.accumulation, limit=self._limit(clock)
        )
        self._close_unless(idle=True)
        self._feed = self._feed or self._open_feed(rank, world_size)
        this_pass = self._pass = object()
        self._recent.clear()
        self._busy = True
        if self.on_pass is not None:
            self.on_pass()
        try:
            steps = self._drawn(self._feed.steps(start))
            while (batch := self._next_batch(steps)) is not _END:
                yield batch
                if self._pass is not this_pass:
                    raise RuntimeError("the loader was closed, or another pass over it has begun, before this ended")
            self._busy = False
            self.position.end()
            if not self._recent and not start.state:
                self._warn_of_no_batch(start.epoch)
        finally:
            if self._pass is this_pass:
                self._close_unless(idle=self._keep_feed)

    def close(self) -> None:
        """End what runs for the loader, and this rank's part in the control store."""
        self._stop()
        if self._control is not None:
            self._control.close()
            self._control = None

    @abstractmethod
    def _open_feed(self, rank: int, world_size: int) -> Feed:
        """Where the steps of this data-parallel rank come from."""

    @abstractmethod
    def _check_shard(self, rank: int, world_size: int) -> None:
        """Refuse a number of ranks that the data cannot be shared out to."""

    def _warn_of_no_batch(self, epoch: int) -> None:
        warnings.warn(f"epoch {epoch} has no batch", stacklevel=3)

    def _limit(self, clock: TrainerClock) -> int | None:
        """Number of the step at which the trainer ends the pass that begins."""
        return clock.limit

    def _drawn(self, steps: Iterator[Step]) -> Iterator[Step]:
        for step in steps:
            if self.on_batch is not None:
                self.on_batch(step.payload)
            yield step

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
            self.mark_trained(step.info.batch_idx)
        return step.payload

    def _stop(self) -> None:
        feed, self._feed, self._pass = self._feed, None, None
        self._busy = False
        if feed is not None:
            feed.close()

    def _close_unless(self, *, idle: bool) -> None:
        """Keep the feed only if it has ended its epoch and is allowed to wait for the next."""
        if self._busy or not idle:
            self._stop()

    def _joined_control(
        self, rank: int, world_size: int, *, timeout: float, transport: Literal["gloo", "store"] = "gloo"
    ) -> ControlStore:
        """The store through which the processes of this loader find one another.

        Raises:
            ValueError: if not `replica_size` of them share this data-parallel rank.
        """
        if self._control is None:
            self._control = ControlStore(rank=rank, world_size=world_size, timeout=timeout, transport=transport)
        if (found := len(self._control.members)) != self._replica_size:
            raise ValueError(
                f"replica_size={self._replica_size}, and {found} of the processes say that they are data-parallel "
                f"rank {rank} of {world_size}: give each its own rank, or replica_size={found}"
            )
        return self._control

    def _ranks(self) -> tuple[int, int]:
        rank, world_size = self.ranks
        self._check_shard(rank, world_size)
        return rank, world_size


def _is_whole(value: object, *, least: int) -> bool:
    return not isinstance(value, bool) and isinstance(value, Integral) and least <= int(value) < 2**63


def _checked_epoch(epoch: int) -> int:
    if not _is_whole(epoch, least=0):
        raise ValueError(f"epoch must be a whole number of at least 0, got {epoch!r}")
    return int(epoch)
