"""One rank's epoch: fill the buffer, play rounds, collate, weigh, and release finished steps.

A generator that yields `Gather` where ranks must talk and `Step` where a batch is ready. The collate process
runs it, and so does the main process without workers; in simulations all ranks run in one process.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias, TypeVar

from odb_libra_lightning.odb.batch_info import BatchInfo
from odb_libra_lightning.odb.config import CHOICES, LoaderConfig
from odb_libra_lightning.odb.errors import ODBError, SampleError
from odb_libra_lightning.odb.exchange import Exchange, Gather, Message, Room, gather, gather_bytes
from odb_libra_lightning.odb.labels import count_loss_tokens
from odb_libra_lightning.odb.loss_weight import window_loss_weights
from odb_libra_lightning.odb.pacing import views_due
from odb_libra_lightning.odb.protocol import RankProtocol
from odb_libra_lightning.odb.reader import Sample
from odb_libra_lightning.odb.sharding import views_per_rank
from odb_libra_lightning.odb.wire import from_bytes, to_bytes

T = TypeVar("T")

# Steps whose token counts travel in one exchange. They are known once the steps are collated, and a step is
# released once they are known, so this many collated batches wait here at the most (or one accumulation window).
_STEPS_PER_EXCHANGE = 4


@dataclass(frozen=True)
class Step:
    """A finished step: what is known of the batch, and the batch as bytes."""

    info: BatchInfo
    payload: bytes


EpochEvents: TypeAlias = Generator[Gather | Room | Step, Any, T]


class Source(Protocol):
    """Where samples come from; `SampleSource` is the real one."""

    @property
    def in_sampler(self) -> int:
        """Views that no worker has been asked for."""
        ...

    @property
    def in_workers(self) -> int:
        """Views asked for and not yet taken."""
        ...

    def take(self, count: int) -> list[Sample]:
        """Next samples, fewer than `count` only at the end."""
        ...


@dataclass(frozen=True)
class _StandIn:
    """What a zero-weight step runs on; quality 2 for a batch that bears loss, 1 for another, 0 for none."""

    payload: bytes | None
    quality: int


@dataclass(frozen=True)
class _Collated:
    """A step of this rank on its way out; `payload` is None for want of data."""

    samples: list[Sample]
    payload: bytes | None
    loss_tokens: int

    @property
    def numbers(self) -> tuple[int, int, int, int]:
        lengths = [sample.length for sample in self.samples]
        return len(lengths), sum(lengths), len(lengths) * max(lengths, default=0), self.loss_tokens


@dataclass(frozen=True)
class _Pending:
    """A step that is complete but for its weight: this rank's share of the loss, and all ranks'."""

    info: BatchInfo
    payload: bytes
    share: int
    total: int


_NO_DATA = _Collated([], None, 0)


class RankEpoch:
    """One rank's epoch of online dynamic batching in `join` mode.

    Guarantees: all ranks release the same number of steps; every view of every rank is released in exactly one
    step, or counted as dropped; the weights make the data-parallel gradient the mean over the loss-bearing
    tokens of each accumulation window. Price: a rank without data, or whose batch bears no loss, takes a
    zero-weight step on a stand-in, the last batch it had (or one of a peer) with weight exactly 0.

    Args:
        rank: this rank.
        world_size: number of data-parallel ranks.
        epoch: number of the epoch, from 0.
        accumulation: micro-batches of a full accumulation window.
        num_samples: samples in the dataset.
        config: settings, the same on every rank.
        source: this rank's samples, at the start of the epoch.
        collate_fn: makes a batch of a list of samples.
    """

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        epoch: int,
        accumulation: int,
        num_samples: int,
        config: LoaderConfig,
        source: Source,
        collate_fn: Callable[[list[Any]], Any],
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        self._epoch = epoch
        self._accumulation = accumulation
        self._num_samples = num_samples
        self._config = config
        self._source = source
        self._collate_fn = collate_fn
        self._protocol = RankProtocol(l_max=config.l_max, seed=config.seed, epoch=epoch)
        self._failure: str | None = None
        self._dropped = 0  # on this rank, since the last exchange
        self._samples_dropped = 0  # on all ranks
        self._samples_trained = 0  # on all ranks
        self._stand_in = _StandIn(None, 0)
        self._window: list[_Pending] = []
        self._released = 0

    def run(self) -> EpochEvents[None]:
        """Play the epoch.

        Raises:
            ODBError: the same on every rank, at the same step, when any rank cannot go on.
        """
        yield from self._agree_on_settings()
        while True:
            self._attempt(self._fill)
            result = yield from self._protocol.play_round(
                remaining=self._source.in_sampler,
                in_workers=self._source.in_workers,
                # A step waits here until there is room for it, and the buffer is not grouped again before:
                # so capacity never binds, and what a round holds does not depend on timing.
                free_slots=self._config.buffer_size,
                failure=self._failure,
            )
            if result.finished:
                break
            for first in range(0, result.steps, _STEPS_PER_EXCHANGE):
                last = min(first + _STEPS_PER_EXCHANGE, result.steps)
                groups = result.groups[first:last] or [[] for _ in range(first, last)]
                yield from self._release(result.number, groups)
        yield from self._close_window()

    def _agree_on_settings(self) -> Exchange[None]:
        mine: dict[str, Any] = {
            "world_size": self._world_size,
            "epoch": self._epoch,
            "accumulation": self._accumulation,
            "the number of samples": self._num_samples,
        }
        mine.update(self._config.batch_settings())
        numbers = [CHOICES[name].index(value) if name in CHOICES else value for name, value in mine.items()]
        everyone = yield from gather(numbers)
        for name, values in zip(mine, everyone.T.tolist(), strict=True):
            if len(set(values)) > 1:
                shown = [CHOICES[name][value] for value in values] if name in CHOICES else values
                raise ODBError(f"{name} must be the same on every rank, got {shown} (by rank)")

    def _attempt(self, action: Callable[..., T], *args: Any) -> T | None:
        """Do this rank's own work; a failure is kept for the next exchange, where all ranks learn of it."""
        if self._failure is None:
            try:
                return action(*args)
            except Exception as error:
                detail = error.traceback if isinstance(error, SampleError) else traceback.format_exc()
                self._failure = f"rank {self._rank}: {error}"
                if detail:
                    self._failure += f"\n\nOn rank {self._rank}:\n{detail}"
        return None

    def _fill(self) -> None:
        """Draw the views that are due, and on until there is a sample to group or no view is left."""
        while (due := self._views_due()) > 0 and (samples := self._source.take(due)):
            kept = [sample for sample in samples if not sample.dropped]
            self._dropped += len(samples) - len(kept)
            self._protocol.add(kept)

    def _views_due(self) -> int:
        buffered = len(self._protocol.buffer)
        if not self._config.pacing:
            return self._config.buffer_size - buffered
        views = views_per_rank(self._num_samples, self._world_size)
        drawn = views - self._source.in_sampler - self._source.in_workers
        due = views_due(self._protocol.rounds, views=views, buffer_size=self._config.buffer_size) - drawn
        return max(due, 0 if buffered else 1)

    def _collate(self, group: list[Sample]) -> _Collated:
        indices = [sample.identity for sample in group]
        try:
            batch = self._collate_fn([from_bytes(sample.payload) for sample in group])
            loss_tokens = self._count_loss_tokens(batch, group)
            payload = to_bytes(batch)
        except Exception as error:
            sentence = f"collating samples {indices}: {type(error).__name__}: {error}"
            raise SampleError(sentence, traceback.format_exc()) from error
        return _Collated(group, payload, loss_tokens)

    def _count_loss_tokens(self, batch: Any, group: list[Sample]) -> int:
        config = self._config
        if config.loss_tokens is not None:
            count = int(config.loss_tokens(batch))
            if count < 0:
                raise ValueError(f"loss_tokens returned {count} for a batch; it counts tokens, so 0 or more")
            return count
        labels = count_loss_tokens(batch, causal_shift=config.causal_shift, ignore_index=config.ignore_index)
        if labels is None:
            if config.loss_scaling == "token":
                warnings.warn(
                    f"no labels found in a batch of type {type(batch).__name__}: the loss is weighted by realized "
                    "lengths. Pass loss_tokens=, a function that counts what the loss of a batch is a mean over.",
                    stacklevel=2,
                )
            return sum(sample.length for sample in group)
        return labels

    def _release(self, round_number: int, groups: list[list[Sample]]) -> EpochEvents[None]:
        """Collate a few steps, exchange what ranks must know of each other's, and let them go."""
        steps = [(self._attempt(self._collate, group) if group else None) or _NO_DATA for group in groups]
        for step in steps:
            self._remember_stand_in(step)
        lacking = [step.payload is None or step.loss_tokens == 0 for step in steps]
        everyone = yield from gather(
            [
                self._dropped,
                self._stand_in.quality,
                any(lacking),
                *(n for step in steps for n in step.numbers),
            ],
            failure=self._failure,
        )
        self._samples_dropped += int(everyone[:, 0].sum())
        self._dropped = 0
        yield from self._share_stand_in(qualities=everyone[:, 1], wanting=everyone[:, 2])
        by_step = everyone[:, 3:].reshape(self._world_size, len(steps), 4)
        for i, step in enumerate(steps):
            payload = self._stand_in.payload if lacking[i] else step.payload
            assert payload is not None, "a round has steps only where some rank has a batch"
            self._samples_trained += int(by_step[:, i, 0].sum())
            self._window.append(self._pending(round_number, step, payload, by_step[:, i]))
            if len(self._window) == self._accumulation:
                yield from self._close_window()

    def _pending(self, round_number: int, step: _Collated, payload: bytes, by_rank: Message) -> _Pending:
        """A step that waits for its window to fill, from `by_rank` `[W, 4]`: the numbers of each rank's batch."""
        samples, tokens, padded_tokens, loss_tokens = by_rank.sum(axis=0).tolist()
        info = BatchInfo(
            epoch=self._epoch,
            batch_idx=-1,
            round=round_number,
            indices=tuple(sample.identity for sample in step.samples),
            lengths=tuple(sample.length for sample in step.samples),
            padded_tokens=step.numbers[2],
            loss_tokens=step.loss_tokens,
            loss_weight=0.0,
            accumulation=self._accumulation,
            window_loss_tokens=0,
            global_samples=samples,
            global_tokens=tokens,
            global_padded_tokens=padded_tokens,
            global_loss_tokens=loss_tokens,
            idle_ranks=int((by_rank[:, 0] == 0).sum()),
            samples_done=self._samples_trained + self._samples_dropped,
            samples_dropped=self._samples_dropped,
            samples_total=self._world_size * views_per_rank(self._num_samples, self._world_size),
        )
        by_tokens = self._config.loss_scaling == "token"
        shares = by_rank[:, 3] if by_tokens else by_rank[:, 0] * (by_rank[:, 3] > 0)
        return _Pending(info, payload, int(shares[self._rank]), int(shares.sum()))

    def _close_window(self) -> EpochEvents[None]:
        """Weigh and release the steps of an accumulation window, at the epoch's end a short one."""
        shares = [step.share for step in self._window]
        if self._config.loss_scaling == "none":
            weights = [float(share > 0) for share in shares]
        else:
            weights = window_loss_weights(
                shares,
                [step.total for step in self._window],
                world_size=self._world_size,
                accumulation=self._accumulation,
            )
        loss_tokens = sum(step.info.global_loss_tokens for step in self._window)
        for step, weight in zip(self._window, weights, strict=True):
            info = replace(step.info, batch_idx=self._released, loss_weight=weight, window_loss_tokens=loss_tokens)
            self._released += 1
            yield Step(info, step.payload)
        self._window.clear()

    def _remember_stand_in(self, step: _Collated) -> None:
        if step.payload is not None:
            quality = 2 if step.loss_tokens else 1
            if quality >= self._stand_in.quality:
                self._stand_in = _StandIn(step.payload, quality)

    def _share_stand_in(self, *, qualities: Message, wanting: Message) -> Exchange[None]:
        """Hand a batch to the ranks that need a stand-in and have none as good; rare, and never while all do."""
        best = int(qualities.max())
        if not (wanting.astype(bool) & (qualities < best)).any():
            return
        giver = int(qualities.argmax())
        mine = self._stand_in.payload if giver == self._rank else None
        payloads = yield from gather_bytes(mine or b"")
        if self._stand_in.quality < best:
            self._stand_in = _StandIn(payloads[giver], best)
