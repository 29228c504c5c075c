"""One rank's side of a grouping round: group, exchange, align.

Source: ODB, sections 4.2 and 4.3. The state is the rank's buffer; everything else comes in as arguments and
goes out as messages, so that real and simulated ranks run the same code.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

import numpy as np

from odb_libra_lightning.odb.alignment import align_groups, group_target
from odb_libra_lightning.odb.exchange import Exchange, gather
from odb_libra_lightning.odb.grouping import group_by_budget
from odb_libra_lightning.odb.reader import Sample

FINISHED = -1


@dataclass(frozen=True)
class RankReport:
    """What a rank says of itself in a round.

    Attributes:
        status: number of candidate groups; 0 for not enough data yet; `FINISHED` for nothing left.
        free_slots: batches that the rank can take.
        groupable: samples that its candidate groups hold.
        buffered: samples in its buffer.
        remaining: views still in its sampler.
        outstanding: views fetched and not emitted, in the workers or in the buffer.
    """

    status: int
    free_slots: int
    groupable: int
    buffered: int
    remaining: int
    outstanding: int


@dataclass(frozen=True)
class GroupingRound:
    """What a round came to.

    Attributes:
        number: number of the round, from 0.
        steps: training steps that every rank takes in the round; 0 for a skipped one.
        groups: this rank's groups in the order of the steps; empty where it has no data left.
        finished: whether every rank is through, which ends the epoch.
        reports: what each rank said.
    """

    number: int
    steps: int
    groups: list[list[Sample]]
    finished: bool
    reports: list[RankReport]


class RankProtocol:
    """The buffer of one rank, and the rounds that empty it.

    Guarantee (`join`): every sample that is put in comes out in exactly one group; every rank takes the same
    number of steps; the epoch ends only when no rank has a sample left anywhere.

    Attributes:
        buffer: realized samples in order of arrival.
        rounds: rounds played so far.
    """

    def __init__(self, *, l_max: int, seed: int, epoch: int) -> None:
        self._l_max = l_max
        self._order_seed = [seed, epoch]
        self.rounds = 0
        self.buffer: list[Sample] = []

    def add(self, samples: list[Sample]) -> None:
        """Put realized samples into the buffer."""
        self.buffer.extend(samples)

    def play_round(
        self, *, remaining: int, in_workers: int, free_slots: int, failure: str | None = None
    ) -> Exchange[GroupingRound]:
        """Group the buffer, exchange reports, align, and take the groups out of the buffer.

        Args:
            remaining: views still in this rank's sampler.
            in_workers: views fetched and not yet in the buffer.
            free_slots: batches that the rank can take now.
            failure: what went wrong on this rank, if anything did; every rank then raises it.
        """
        groups, tail = group_by_budget([sample.length for sample in self.buffer], self._l_max)
        exhausted = remaining == 0 and in_workers == 0
        if exhausted and tail:
            groups.append(tail)
        report = RankReport(
            status=len(groups) or (FINISHED if exhausted else 0),
            free_slots=free_slots,
            groupable=sum(map(len, groups)),
            buffered=len(self.buffer),
            remaining=remaining,
            outstanding=in_workers + len(self.buffer),
        )
        gathered = yield from gather(astuple(report), failure=failure)
        reports = [RankReport(*row) for row in gathered.tolist()]
        number, self.rounds = self.rounds, self.rounds + 1
        steps = _steps(reports)
        taken = self._take(align_groups(groups, steps)[0], number) if groups and steps else []
        finished = all(r.status == FINISHED for r in reports)
        return GroupingRound(number, steps, taken, finished, reports)

    def _take(self, groups: list[list[int]], number: int) -> list[list[Sample]]:
        """Groups of samples in the order of the steps, which all ranks share; they leave the buffer."""
        order = np.random.default_rng([*self._order_seed, number]).permutation(len(groups))
        taken = [[self.buffer[position] for position in groups[step]] for step in order]
        gone = {position for group in groups for position in group}
        self.buffer = [sample for position, sample in enumerate(self.buffer) if position not in gone]
        return taken


def _steps(reports: list[RankReport]) -> int:
    """Steps of the round: the alignment target, or 0 where a rank must fetch or drain first."""
    waiting = any(report.status == 0 for report in reports)
    blocked = any(report.free_slots == 0 for report in reports)
    anyone_finished = any(report.status == FINISHED for report in reports)
    if waiting or (blocked and not anyone_finished):
        return 0
    return group_target(
        [max(report.status, 0) for report in reports],
        [report.free_slots for report in reports],
        [report.groupable for report in reports],
    )
