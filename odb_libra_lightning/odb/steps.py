"""From aligned groups to finished steps: collate, exchange what was counted, weigh, release.

Generators, as in `exchange`; they also yield `Step` where a batch is ready.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias, TypeVar

import numpy as np

from odb_libra_lightning.odb.batch_info import BatchInfo
from odb_libra_lightning.odb.config import LoaderConfig
from odb_libra_lightning.odb.errors import SampleError
from odb_libra_lightning.odb.exchange import SMALL, Broadcast, Exchange, Gather, Message, Room, gather_small
from odb_libra_lightning.odb.failure import RankFailure
from odb_libra_lightning.odb.labels import count_loss_tokens
from odb_libra_lightning.odb.ledger import Views
from odb_libra_lightning.odb.loss_weight import window_loss_weights
from odb_libra_lightning.odb.reader import Sample, whole_number
from odb_libra_lightning.odb.wire import from_bytes, to_bytes

T = TypeVar("T")

# Steps whose token counts travel in one exchange. They are known once the steps are collated, and a step is
# released once they are known, so this many collated batches wait here at the most (or one accumulation window).
STEPS_PER_EXCHANGE = 4


@dataclass(frozen=True)
class Step:
    """A finished step: what is known of the batch, the batch, and the views of all ranks that are done with it.

    The batch is as it travels, in bytes, until a `Feed` decodes it.

    `views` are of the epoch's only deal in `join`; in `non_join`, where what is left is dealt anew, they are positions
    in the epoch's order.
    """

    info: BatchInfo
    payload: Any
    views: Views = field(compare=False)


EpochEvents: TypeAlias = Generator[Gather | Broadcast | Room | Step, Any, T]


@dataclass(frozen=True)
class RoundFacts:
    """What all ranks know of the steps of a round: samples of each rank `[W, steps]`, views that each is done with."""

    round: int
    deal: int
    samples_dropped: Sequence[int]
    samples_total: int | None
    samples: Message
    views: Sequence[Views]


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
    def numbers(self) -> tuple[int, int, int]:
        """Tokens, the longest sample and the loss-bearing tokens."""
        lengths = [sample.length for sample in self.samples]
        return sum(lengths), max(lengths, default=0), self.loss_tokens


@dataclass(frozen=True)
class _Pending:
    """A step that waits for its window to fill: its facts but for the weight, and its shares of that."""

    info: Callable[..., BatchInfo]
    payload: bytes
    views: Views
    share: int
    total: int
    loss_tokens: int


_NO_DATA = _Collated([], None, 0)


class StepMaker:
    """Makes one rank's steps of an epoch.

    Guarantee: the weights make the data-parallel gradient the mean over the loss-bearing tokens of each accumulation
    window. Price: a rank without data, or whose batch bears no loss, takes a zero-weight step on a stand-in, the last
    batch it had (or one of a peer) with weight exactly 0.

    Args:
        rank: this rank.
        world_size: number of data-parallel ranks.
        epoch: number of the epoch, from 0.
        accumulation: micro-batches of a full accumulation window; windows end at its multiples.
        first_step: number of the epoch's next step.
        limit: number of the step at which the trainer ends the epoch, if it does; a window ends there too.
        samples_done: samples of the epoch that were done before.
        samples_dropped: samples among them that a policy dropped.
        config: settings.
        collate_fn: makes a batch of a list of samples. Where it has an attribute `pads` that is False, it pads none.
        failure: where this rank's failures go.
    """

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        epoch: int,
        accumulation: int,
        first_step: int,
        limit: int | None,
        samples_done: int,
        samples_dropped: int,
        config: LoaderConfig,
        collate_fn: Callable[[list[Any]], Any],
        failure: RankFailure,
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        self._epoch = epoch
        self._accumulation = accumulation
        self._next = first_step
        self._limit = limit
        self._samples_trained = samples_done - samples_dropped
        self._config = config
        self._collate_fn = collate_fn
        self._pads = getattr(collate_fn, "pads", True)
        self._failure = failure
        self._stand_in = _StandIn(None, 0)
        self._window: list[_Pending] = []

    @property
    def limit_reached(self) -> bool:
        """Whether the trainer draws no more of this epoch's steps."""
        return self._limit is not None and self._next >= self._limit

    def make(self, facts: RoundFacts, groups: Sequence[list[Sample]]) -> EpochEvents[None]:
        """Collate the groups of a round, weigh and release them, a few at a time."""
        for first in range(0, len(groups), STEPS_PER_EXCHANGE):
            some = groups[first : first + STEPS_PER_EXCHANGE]
            if self._limit is not None:
                some = some[: max(self._limit - self._next, 0)]
            if some:
                yield from self._make(facts, first, some)

    def _make(self, facts: RoundFacts, first: int, groups: Sequence[list[Sample]]) -> EpochEvents[None]:
        steps = [(self._failure.attempt(self._collate, group) if group else None) or _NO_DATA for group in groups]
        for step in steps:
            self._remember_stand_in(step)
        lacking = [step.payload is None or step.loss_tokens == 0 for step in steps]
        counts = yield from gather_small(
            [self._stand_in.quality, any(lacking), *(n for step in steps for n in step.numbers)],
            2 + 3 * len(steps),
            failure=self._failure.text,
        )
        everyone: Message = counts.astype(np.int64)  # sums over ranks may be large
        yield from self._share_stand_in(qualities=everyone[:, 0], wanting=everyone[:, 1])
        samples = facts.samples[:, first : first + len(steps)]
        tokens, longest, loss_tokens = everyone[:, 2:].reshape(self._world_size, len(steps), 3).transpose(2, 0, 1)
        shares = loss_tokens if self._config.loss_scaling == "token" else samples * (loss_tokens > 0)
        padded = samples * longest if self._pads else tokens
        totals = np.stack([samples, tokens, padded, loss_tokens, samples == 0, shares]).sum(axis=1).T.tolist()
        for i, step in enumerate(steps):
            payload = self._stand_in.payload if lacking[i] else step.payload
            assert payload is not None, "a round has steps only where some rank has a batch"
            info = self._info(facts, first + i, step, totals[i])
            share, total = int(shares[self._rank, i]), totals[i][-1]
            self._window.append(_Pending(info, payload, facts.views[first + i], share, total, totals[i][3]))
            self._next += 1
            if self._next % self._accumulation == 0 or self.limit_reached:
                yield from self.close_window()

    def _info(self, facts: RoundFacts, number: int, step: _Collated, totals: Sequence[int]) -> Callable[..., BatchInfo]:
        """The facts about a step but for its weight, from the numbers of its batches over all ranks."""
        samples, tokens, padded_tokens, loss_tokens, idle, _ = totals
        self._samples_trained += samples
        return partial(
            BatchInfo,
            epoch=self._epoch,
            batch_idx=self._next,
            round=facts.round,
            deal=facts.deal,
            indices=tuple(sample.identity for sample in step.samples),
            lengths=tuple(sample.length for sample in step.samples),
            padded_tokens=len(step.samples) * step.numbers[1] if self._pads else step.numbers[0],
            loss_tokens=step.loss_tokens,
            accumulation=self._accumulation,
            global_samples=samples,
            global_tokens=tokens,
            global_padded_tokens=padded_tokens,
            global_loss_tokens=loss_tokens,
            idle_ranks=idle,
            samples_done=self._samples_trained + facts.samples_dropped[number],
            samples_dropped=facts.samples_dropped[number],
            samples_total=facts.samples_total,
        )

    def close_window(self) -> EpochEvents[None]:
        """Weigh and release the steps of an accumulation window, at the epoch's end a short one."""
        window, self._window = self._window, []
        shares = [step.share for step in window]
        if self._config.loss_scaling == "none":
            weights = [float(share > 0) for share in shares]
        else:
            weights = window_loss_weights(
                shares,
                [step.total for step in window],
                world_size=self._world_size,
                accumulation=self._accumulation,
            )
        loss_tokens = sum(step.loss_tokens for step in window)
        for i, (step, weight) in enumerate(zip(window, weights, strict=True), 1):
            info = step.info(loss_weight=weight, window_loss_tokens=loss_tokens, ends_window=i == len(window))
            yield Step(info, step.payload, step.views)

    def _collate(self, group: list[Sample]) -> _Collated:
        indices = [sample.identity for sample in group]
        try:
            batch = self._collate_fn([from_bytes(sample.payload) for sample in group])
            loss_tokens = self._count_loss_tokens(batch, group)
            if loss_tokens >= SMALL or sum(sample.length for sample in group) >= SMALL:
                raise ValueError(f"a batch of {SMALL} tokens or more cannot be counted")
            payload = to_bytes(batch)
        except Exception as error:
            sentence = f"collating samples {indices}: {type(error).__name__}: {error}"
            raise SampleError(sentence, traceback.format_exc()) from error
        return _Collated(group, payload, loss_tokens)

    def _count_loss_tokens(self, batch: Any, group: list[Sample]) -> int:
        config = self._config
        if config.loss_tokens is not None:
            count = whole_number(config.loss_tokens(batch), "what loss_tokens returns")
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
        payload: bytes = yield Broadcast(giver, self._stand_in.payload if giver == self._rank else None)
        if self._stand_in.quality < best:
            self._stand_in = _StandIn(payload, best)


NO_VIEWS: Views = np.empty(0, np.int64)
