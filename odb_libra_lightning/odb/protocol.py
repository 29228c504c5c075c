"""One rank's side of a grouping round: group, exchange, align.

Source: ODB, sections 4.2 and 4.3. The state is the rank's buffer; everything else comes in as arguments and
goes out as messages, so that real and simulated ranks run the same code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from odb_libra_lightning.odb.alignment import align_groups, group_target
from odb_libra_lightning.odb.cost import TokenCost
from odb_libra_lightning.odb.exchange import Exchange, Message, gather, gather_small
from odb_libra_lightning.odb.grouping import group_by_budget
from odb_libra_lightning.odb.ledger import Views
from odb_libra_lightning.odb.reader import Sample

FINISHED = -1


class RankReport(NamedTuple):
    """What a rank says of itself in a round; all ranks' reports are the rows of `GroupingRound.reports`.

    Attributes:
        status: number of candidate groups; 0 for not enough data yet; `FINISHED` for nothing left.
        free_slots: batches that the rank can take.
        groupable: samples that its candidate groups hold.
        buffered: samples in its buffer (`B`).
        in_sampler: views still in its sampler (`R`).
        in_workers: views fetched and not in the buffer (`Q`).
        dropped: samples that a policy dropped since the last report.
    """

    status: int
    free_slots: int
    groupable: int
    buffered: int
    in_sampler: int
    in_workers: int
    dropped: int


@dataclass(frozen=True)
class GroupingRound:
    """What a round came to.

    Attributes:
        number: number of the round, from 0.
        steps: training steps that every rank takes in the round; 0 for a skipped one.
        groups: this rank's groups in the order of the steps; empty where it has no data left.
        ended: whether no round follows.
        reports: what each rank said, int64 `[W, len(RankReport._fields)]`.
        samples: samples of each rank in each of the steps, int64 `[W, steps]`.
        dropped: views of all ranks that a policy has dropped.
        emitted: views of all ranks in each of the steps.
    """

    number: int
    steps: int
    groups: list[list[Sample]]
    ended: bool
    reports: Message
    samples: Message
    dropped: Views
    emitted: list[Views]

    def column(self, name: str) -> Message:
        """One field of all ranks' reports, `[W]`."""
        column: Message = self.reports[:, RankReport._fields.index(name)]
        return column

    @property
    def potential(self) -> int:
        """Views of all ranks not emitted when the round began, `R + Q + B`; it falls in every round with steps."""
        return int(sum(self.column(name).sum() for name in ("in_sampler", "in_workers", "buffered")))


class RankProtocol:
    """The buffer of one rank, and the rounds that empty it.

    Guarantee: every rank takes the same number of steps, and no rank is finished while it has a sample anywhere. In
    `join` mode the rounds end when all ranks are finished, and every sample that was put in has come out in exactly one
    group; in `non_join` mode they end when one is, and what the others have is left.

    Args:
        l_max: budget of a batch, tokens.
        cost: what a batch costs of it.
        join: whether rounds end when all ranks are finished, not when one is.
        order_seed: seed of the order of a round's groups, the same on every rank.
        observed: whether to learn which views the other ranks emit. Only simulations of very many ranks do without.

    Attributes:
        buffer: realized samples in order of arrival.
        rounds: rounds played so far.
    """

    def __init__(
        self, *, l_max: int, cost: TokenCost, join: bool, order_seed: Sequence[int], observed: bool = True
    ) -> None:
        self._l_max = l_max
        self._cost = cost
        self._ended = all if join else any
        self._order_seed = order_seed
        self._observed = observed
        self._dropped: list[int] = []
        self.rounds = 0
        self.buffer: list[Sample] = []

    def add(self, samples: list[Sample]) -> None:
        """Put realized samples into the buffer, but for those that a policy drops."""
        self.buffer.extend(sample for sample in samples if not sample.dropped)
        self._dropped.extend(sample.view for sample in samples if sample.dropped)

    def play_round(
        self, *, in_sampler: int, in_workers: int, free_slots: int, failure: str | None = None
    ) -> Exchange[GroupingRound]:
        """Group the buffer, exchange reports, align, and take the groups out of the buffer.

        A second exchange, of the views that leave the buffers, follows if the reports say that there are any: so all
        ranks make it or none does.

        Args:
            in_sampler: views still in this rank's sampler.
            in_workers: views fetched and not yet in the buffer.
            free_slots: batches that the rank can take now.
            failure: what went wrong on this rank, if anything did; every rank then raises it.
        """
        groups, tail = group_by_budget([sample.length for sample in self.buffer], self._l_max, cost=self._cost)
        exhausted = in_sampler == 0 and in_workers == 0
        if exhausted and tail:
            groups.append(tail)
        report = RankReport(
            status=len(groups) or (FINISHED if exhausted else 0),
            free_slots=free_slots,
            groupable=sum(map(len, groups)),
            buffered=len(self.buffer),
            in_sampler=in_sampler,
            in_workers=in_workers,
            dropped=len(self._dropped),
        )
        reports = yield from gather(report, failure=failure)
        number, self.rounds = self.rounds, self.rounds + 1
        by_field = dict(zip(RankReport._fields, reports.T.tolist(), strict=True))
        ended = self._ended(status == FINISHED for status in by_field["status"])
        steps = 0 if ended else _steps(by_field["status"], by_field["free_slots"], by_field["groupable"])
        taken = self._take(align_groups(groups, steps)[0], number) if groups and steps else []
        samples = np.empty((len(reports), 0), np.int64)
        dropped, emitted = np.empty(0, np.int64), [np.empty(0, np.int64)] * steps
        if steps or any(by_field["dropped"]):
            # A rank emits no more than its candidate groups hold, so all know how long the longest message can be.
            views = max(map(sum, zip(by_field["dropped"], by_field["groupable"], strict=True)))
            lists = [self._dropped, *([s.view for s in group] for group in taken)]
            lists += [[]] * (steps + 1 - len(lists))
            row = [*map(len, lists), *(view for some in lists for view in some)]
            everyone = yield from gather_small(row, steps + 1 + views)
            sizes, views_by_rank = everyone[:, : steps + 1].astype(np.int64), everyone[:, steps + 1 :]
            samples = sizes[:, 1:]
            if self._observed:
                dropped, *emitted = _by_list(sizes, views_by_rank)
            self._dropped = []
        return GroupingRound(number, steps, taken, ended, reports, samples, dropped, emitted)

    def _take(self, groups: list[list[int]], number: int) -> list[list[Sample]]:
        """Groups of samples in the order of the steps, which all ranks share; they leave the buffer."""
        order = np.random.default_rng([*self._order_seed, number]).permutation(len(groups))
        taken = [[self.buffer[position] for position in groups[step]] for step in order]
        gone = {position for group in groups for position in group}
        self.buffer = [sample for position, sample in enumerate(self.buffer) if position not in gone]
        return taken


def _steps(statuses: list[int], free_slots: list[int], groupable: list[int]) -> int:
    """Steps of the round: the alignment target, or 0 where a rank must fetch or drain first."""
    if 0 in statuses or (0 in free_slots and FINISHED not in statuses):
        return 0
    return group_target([max(status, 0) for status in statuses], free_slots, groupable)


def _by_list(sizes: Message, views: npt.NDArray[np.int32]) -> list[Views]:
    """For each of a row's lists, the views of all ranks in it.

    Args:
        sizes: how long each list of each rank is, `[W, lists]`.
        views: what is in them, one list after the other, `[W, views]`.
    """
    sent = views[np.arange(views.shape[1]) < sizes.sum(axis=1, keepdims=True)]
    labels = np.repeat(np.tile(np.arange(sizes.shape[1]), len(sizes)), sizes.ravel())
    by_list = sent[np.argsort(labels, kind="stable")].astype(np.int64)
    return np.split(by_list, np.cumsum(sizes.sum(axis=0))[:-1])
