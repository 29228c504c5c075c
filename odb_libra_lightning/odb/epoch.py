"""One rank's epoch: fill the buffer, play rounds, release finished steps, and deal out anew what is left.

A generator that yields `Gather` where ranks must talk and `Step` where a batch is ready. The collate process
runs it, and so does the main process without workers; in simulations all ranks run in one process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from odb_libra_lightning.odb.config import CHOICES, LoaderConfig
from odb_libra_lightning.odb.errors import ODBError
from odb_libra_lightning.odb.exchange import Exchange, gather
from odb_libra_lightning.odb.failure import RankFailure
from odb_libra_lightning.odb.ledger import EpochLedger, StreamLedger, Views
from odb_libra_lightning.odb.pacing import views_due
from odb_libra_lightning.odb.protocol import GroupingRound, RankProtocol
from odb_libra_lightning.odb.reader import Sample
from odb_libra_lightning.odb.steps import NO_VIEWS, EpochEvents, RoundFacts, StepMaker


@dataclass(frozen=True, kw_only=True)
class EpochStart:
    """How a pass over an epoch begins, the same on every rank.

    Attributes:
        epoch: number of the epoch, from 0.
        accumulation: micro-batches of a full accumulation window.
        first_step: number of the first step, as the trainer counts; windows end at multiples of `accumulation`.
        limit: number of the step at which the trainer ends the epoch; None for where its samples end.
        state: state of the ledger to go on from; None begins the epoch.
    """

    epoch: int = 0
    accumulation: int = 1
    first_step: int = 0
    limit: int | None = None
    state: dict[str, Any] | None = None


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

    def start(self, ledger: Any) -> None:
        """Begin to draw what a ledger leaves to this rank."""
        ...

    def take(self, count: int) -> list[Sample]:
        """Next samples, fewer than `count` only at the end."""
        ...


class Partition(NamedTuple):
    """Where the views of a rank's deal are; they never leak, so the sum is the same at every round.

    Attributes:
        in_sampler: no worker has been asked for them (`R`).
        in_workers: asked for and not in the buffer (`Q`).
        buffered: in the grouping buffer (`B`).
        emitted: in a group that has left the buffer (`E`).
        dropped: left out by a policy.
    """

    in_sampler: int
    in_workers: int
    buffered: int
    emitted: int
    dropped: int


class RankEpoch:
    """One rank's epoch of online dynamic batching.

    Guarantees: all ranks release the same number of steps. In `join` mode each rank trains on its own share; every view
    is released in exactly one step, or counted as dropped. In `non_join` mode a deal ends as soon as one rank is
    through, and what the others have left is dealt out to all again, until nothing is left: every sample is released
    once, and fewer than `world_size` of them once more. Price: in `join` mode zero-weight steps where ranks do not run
    out together; in `non_join` mode the samples that were left are read twice.

    Args:
        rank: this rank.
        start: how the pass begins.
        ledger: what is left of the epoch; it is marked as steps are formed.
        config: settings, the same on every rank.
        source: this rank's samples.
        collate_fn: makes a batch of a list of samples.
        observed: whether to learn which views the other ranks emit. Only simulations of very many ranks do without,
            in `join` mode and where nothing is dropped.
        watch: called after each round; for tests and simulations.
    """

    def __init__(
        self,
        *,
        rank: int,
        start: EpochStart,
        ledger: EpochLedger | StreamLedger,
        config: LoaderConfig,
        source: Source,
        collate_fn: Callable[[list[Any]], Any],
        observed: bool = True,
        watch: Callable[[GroupingRound], None] = lambda _: None,
    ) -> None:
        self._start = start
        self._ledger = ledger
        self._config = config
        self._source = source
        self._observed = observed
        self._watch = watch
        self._failure = RankFailure(rank)
        self._deal = 0
        self._rounds = 0  # of earlier deals
        self._repeated = 0  # views of earlier deals beyond one a sample
        self._undelivered = NO_VIEWS  # dropped views of all ranks that no step has been told of
        self._samples_dropped = ledger.dropped
        self._steps = StepMaker(
            rank=rank,
            world_size=ledger.world_size,
            epoch=start.epoch,
            accumulation=start.accumulation,
            first_step=start.first_step,
            limit=start.limit,
            samples_done=ledger.done_views,
            samples_dropped=ledger.dropped,
            config=config,
            collate_fn=collate_fn,
            failure=self._failure,
        )
        self._rank = rank
        self._begin_deal()

    def _begin_deal(self) -> None:
        """An empty buffer, and rounds to draw this rank's share in."""
        self._protocol = RankProtocol(
            l_max=self._config.l_max,
            cost=self._config.token_cost,
            join=self._config.mode == "join",
            order_seed=[self._config.seed, self._start.epoch, self._deal],
            observed=self._observed,
        )
        self._taken = self._emitted = self._dropped = 0
        self._share = self._planned_rounds = 0
        if isinstance(self._ledger, EpochLedger):
            shares = self._ledger.share_sizes()
            self._share = int(shares[self._rank])
            self._planned_rounds = -(-int(shares.max()) // self._config.buffer_size)

    @property
    def partition(self) -> Partition:
        """Where this rank's views are."""
        source = self._source
        return Partition(source.in_sampler, source.in_workers, len(self._protocol.buffer), self._emitted, self._dropped)

    def run(self) -> EpochEvents[None]:
        """Play the epoch.

        Raises:
            ODBError: the same on every rank, at the same step, when any rank cannot go on.
        """
        yield from self._agree_on_settings()
        while True:
            self._failure.attempt(self._source.start, self._ledger)
            yield from self._play_deal()
            if self._config.mode == "join" or isinstance(self._ledger, StreamLedger) or self._steps.limit_reached:
                break
            if self._ledger.samples_left == 0:
                break
            done = self._ledger.done_views
            self._ledger.deal(self._ledger.world_size)
            self._repeated += done - self._ledger.done_views
            self._rounds += self._protocol.rounds
            self._deal += 1
            self._begin_deal()
        yield from self._steps.close_window()

    def _play_deal(self) -> EpochEvents[None]:
        """Rounds until all ranks are through; in `non_join` mode, until one is."""
        while not self._steps.limit_reached:
            self._failure.attempt(self._fill)
            result = yield from self._protocol.play_round(
                in_sampler=self._source.in_sampler,
                in_workers=self._source.in_workers,
                # A step waits here until there is room for it, and the buffer is not grouped again before:
                # so capacity never binds, and what a round holds does not depend on timing.
                free_slots=self._config.buffer_size,
                failure=self._failure.text,
            )
            self._emitted += sum(map(len, result.groups))
            self._watch(result)
            dropped, views = self._account(result)
            if result.ended:
                return
            facts = RoundFacts(
                round=self._rounds + result.number,
                deal=self._deal,
                samples_dropped=dropped,
                samples_total=None if self._ledger.total is None else self._ledger.total + self._repeated,
                samples=result.samples,
                views=views,
            )
            yield from self._steps.make(facts, result.groups or [[] for _ in range(result.steps)])

    def _account(self, result: GroupingRound) -> tuple[list[int], list[Views]]:
        """Mark what left the buffers in a round; say how many samples are dropped by each step, and its views."""
        gone = [result.dropped, *result.emitted]
        for views in gone:
            self._ledger.mark(views)
        if self._config.mode == "non_join" and isinstance(self._ledger, EpochLedger):
            gone = [self._ledger.positions(views) for views in gone]
        self._undelivered = np.concatenate([self._undelivered, gone[0]])
        if not result.steps:
            return [], []
        # Evenly over the steps, so that what is done after each of them is a fair share.
        dropped = np.array_split(self._undelivered, result.steps)
        told = [self._samples_dropped + part for part in np.cumsum([len(part) for part in dropped]).tolist()]
        self._undelivered, self._samples_dropped = NO_VIEWS, told[-1]
        return told, [np.concatenate(parts) for parts in zip(dropped, gone[1:], strict=True)]

    def _fill(self) -> None:
        """Draw the views that are due, and on until there is a sample to group or no view is left."""
        while (due := self._views_due()) > 0 and (samples := self._source.take(due)):
            self._taken += len(samples)
            self._dropped += sum(sample.dropped for sample in samples)
            self._protocol.add(samples)

    def _views_due(self) -> int:
        buffered = len(self._protocol.buffer)
        size, rounds = self._config.buffer_size, self._protocol.rounds
        if not self._config.pacing:
            return size - buffered
        if isinstance(self._ledger, StreamLedger):
            due = (rounds + 1) * size
        else:
            due = views_due(rounds, views=self._share, rounds=self._planned_rounds)
        return max(due - self._taken, 0 if buffered else 1)

    def _agree_on_settings(self) -> Exchange[None]:
        start, ledger = self._start, self._ledger
        mine: dict[str, Any] = {
            "world_size": ledger.world_size,
            "epoch": start.epoch,
            "accumulation": start.accumulation,
            "the number of the next step": start.first_step,
            "limit": start.limit,
            "the number of samples": ledger.num_samples,
            "what is trained on already (a checksum)": ledger.checksum(),
        }
        mine.update(self._config.batch_settings())
        numbers = [
            CHOICES[name].index(value) if name in CHOICES else -1 if value is None else value
            for name, value in mine.items()
        ]
        everyone = yield from gather(numbers)
        for name, values in zip(mine, everyone.T.tolist(), strict=True):
            if len(set(values)) > 1:
                shown = [CHOICES[name][value] for value in values] if name in CHOICES else values
                raise ODBError(f"{name} must be the same on every rank, got {shown} (by rank)")
