"""Whole epochs with late workers, full trainers, drops, stops and resumes: the claims of docs/protocol.md.

Each claim is held against a count of the test's own.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odb_libra_lightning.data.length_mixes import LENGTH_MIXES, length_mix
from odb_libra_lightning.odb.cost import TokenCost
from odb_libra_lightning.odb.epoch import Partition, RankEpoch
from odb_libra_lightning.odb.exchange import Broadcast, Gather
from odb_libra_lightning.odb.ledger import open_ledger
from odb_libra_lightning.odb.protocol import GroupingRound
from odb_libra_lightning.odb.reader import Draw, Sample
from odb_libra_lightning.odb.steps import STEPS_PER_EXCHANGE, Step
from tests.odb.simulation import LateSource, LengthSource, ListSource, simulate


@dataclass(frozen=True)
class Scenario:
    """An epoch to play; a length of 0 is a sample that is dropped."""

    lengths: list[int]
    world: int
    l_max: int
    buffer: int
    quadratic_length: int | None
    non_join: bool
    pacing: bool
    accumulation: int
    latency: int | None  # rounds without samples at first; None for a source that waits, as the real one does
    crowded: float  # how many trainers have no room, on average
    random: Random = field(compare=False, repr=False)

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "l_max": self.l_max,
            "buffer_size": self.buffer,
            "cost": "quadratic" if self.quadratic_length else "linear",
            "quadratic_length": self.quadratic_length,
            "mode": "non_join" if self.non_join else "join",
            "pacing": self.pacing,
            "length_fn": int,
            "empty": "drop",
        }

    @property
    def kept(self) -> set[int]:
        return {identity for identity, length in enumerate(self.lengths) if length}


LENGTHS = st.lists(st.integers(1, 400), min_size=1, max_size=120) | st.lists(
    st.sampled_from([0, 0, 1, 2, 90, 400]), min_size=1, max_size=120
)
SCENARIOS = st.builds(
    Scenario,
    lengths=LENGTHS,
    world=st.integers(1, 16),
    l_max=st.integers(1, 900),
    buffer=st.integers(1, 60),
    quadratic_length=st.none() | st.integers(1, 300),
    non_join=st.booleans(),
    pacing=st.booleans(),
    accumulation=st.integers(1, 3),
    latency=st.none() | st.integers(1, 20),
    crowded=st.sampled_from([0.0, 0.5]),
    random=st.builds(Random, st.integers(0, 2**32)),
)


class Record:
    """What was seen of an epoch from outside."""

    def __init__(self, scenario: Scenario, **options: Any) -> None:
        self.sources: list[ListSource] = []
        self.rounds: dict[int, list[GroupingRound]] = defaultdict(list)  # of rank 0, by deal
        self.partitions: dict[tuple[int, int], list[Partition]] = defaultdict(list)  # by deal and rank
        self.groups: dict[tuple[int, int], list[list[list[Sample]]]] = defaultdict(list)
        self.dropped: list[int] = []  # identities, as they are read
        self.dropped_by: dict[int, int] = {}  # how many of them by the end of a deal
        self.gathers: dict[int, int] = defaultdict(int)
        self.answers: dict[int, list[bool]] = defaultdict(list)  # of each rank, whether it has room
        self.broadcasts = 0
        self.scenario = scenario
        self.ranks: list[list[Step]] = simulate(
            scenario.lengths,
            has_room=self._has_room,
            watch=self._watch,
            source=self._source,
            tap=self._tap,
            accumulation=scenario.accumulation,
            **{"world_size": scenario.world, **scenario.settings, **options},
        )
        self.steps = list(zip(*self.ranks, strict=True))

    def _source(self, dataset: Any, rank: int, config: Any) -> ListSource:
        dropped = self.dropped

        class Watched(LateSource if self.scenario.latency is not None else ListSource):  # type: ignore[misc]
            def _read(self, draw: Draw) -> Sample:
                sample = super()._read(draw)
                dropped.extend([sample.identity] * sample.dropped)
                return sample

        late = {} if self.scenario.latency is None else {"latency": self.scenario.latency, "random": Random(rank)}
        self.sources.append(Watched(dataset, rank, config, **late))
        return self.sources[-1]

    def _watch(self, rank: int, epoch: RankEpoch, result: GroupingRound) -> None:
        deal = len(self.rounds) - (rank > 0 or result.number > 0)
        if rank == 0:
            self.rounds[deal].append(result)
            self.dropped_by[deal] = len(self.dropped)
        self.partitions[deal, rank].append(epoch.partition)
        self.groups[deal, rank].append(result.groups)
        source = self.sources[rank]
        assert (source.in_sampler, source.in_workers) == epoch.partition[:2]
        if isinstance(source, LateSource):
            source.next_round()

    def _has_room(self, rank: int) -> bool:
        has_room = self.scenario.random.random() * self.scenario.world >= self.scenario.crowded
        self.answers[rank].append(has_room)
        return has_room

    def _tap(self, rank: int, event: Any) -> bool:
        self.gathers[rank] += isinstance(event, Gather)
        self.broadcasts += rank == 0 and isinstance(event, Broadcast)
        return False

    def left_after(self, deal: int) -> int:
        """Samples that no rank has emitted or dropped by the end of a deal."""
        emitted = {
            sample.identity
            for (number, _), rounds in self.groups.items()
            for groups in rounds
            for group in groups
            for sample in group
            if number <= deal
        }
        return len(self.scenario.lengths) - len(emitted | set(self.dropped[: self.dropped_by[deal]]))

    @property
    def trained(self) -> Counter[int]:
        return trained(self.steps)


def trained(steps: list[tuple[Step, ...]]) -> Counter[int]:
    return Counter(identity for step in steps for rank in step for identity in rank.info.indices)


def check_no_leak(record: Record, deal: int, shares: list[int]) -> int:
    """`R + Q + B + E` and what was dropped are the share, at every round of every rank; returns the views dropped."""
    dropped = np.array([result.column("dropped") for result in record.rounds[deal]]).cumsum(axis=0)
    for rank, share in enumerate(shares):
        emitted = np.cumsum([sum(map(len, groups)) for groups in record.groups[deal, rank]])
        for number, part in enumerate(record.partitions[deal, rank]):
            assert sum(part) == share
            assert (part.emitted, part.dropped) == (emitted[number], dropped[number, rank])
    return int(dropped[-1].sum())


def check_rounds(record: Record, deal: int, shares: list[int], dropped: int) -> None:
    """The potential falls as views leave, and rounds are bounded."""
    rounds, world = record.rounds[deal], len(shares)
    assert [result.number for result in rounds] == list(range(len(rounds)))
    assert [result.ended for result in rounds] == [False] * (len(rounds) - 1) + [True]
    for before, after in itertools.pairwise(rounds):
        emitted = sum(sum(map(len, record.groups[deal, rank][before.number])) for rank in range(world))
        assert before.potential - after.potential == emitted + after.column("dropped").sum()
        assert emitted >= before.steps, "and falls in every round with steps"
    latency = record.scenario.latency
    if latency is None:
        assert all(result.steps for result in rounds[:-1]), "who waits for its workers never skips a round"
        assert len(rounds) <= max(shares) + 1
    else:
        # A rank whose arrivals of a round were all dropped has nothing to group, and a round is skipped.
        assert len(rounds) <= max(shares) + latency + dropped + 1
        assert sum(not result.steps for result in rounds[:-1]) <= latency + dropped


def check_exchanges(record: Record) -> None:
    """Nothing is exchanged but what the argument against deadlock lists; `play` sees to it that all do the same."""
    (messages,) = set(record.gathers.values())
    asked_again = sum(not all(answers) for answers in zip(*record.answers.values(), strict=True))
    rounds = [result for deal in record.rounds.values() for result in deal]
    with_views = sum(result.steps > 0 or result.column("dropped").any() for result in rounds)
    token_counts = sum(-(-result.steps // STEPS_PER_EXCHANGE) for result in rounds)
    assert messages - asked_again == 1 + len(rounds) + with_views + token_counts
    assert record.broadcasts <= 2, "a rank has no stand-in, or one without loss, at most once each"
    assert sum(result.steps for result in rounds) == len(record.steps)


def check_budgets_and_facts(record: Record) -> None:
    scenario, cost = record.scenario, TokenCost(record.scenario.quadratic_length)
    done = 0
    for number, step in enumerate(record.steps):
        done += len(step[0].views)
        assert step[0].info.samples_done == done, "each view is delivered with one step"
        for rank in step:
            assert rank.info.batch_idx == number
            assert np.array_equal(rank.views, step[0].views)
            assert rank.info.lengths == tuple(scenario.lengths[i] for i in rank.info.indices)
            longest = max(rank.info.lengths, default=0)
            assert cost.of(rank.info.samples, longest) <= max(scenario.l_max, cost.of(1, longest))


def check_deals(record: Record) -> None:
    """How samples are dealt, and that each deal leaves fewer; a deal of `join` leaves none."""
    scenario, world = record.scenario, record.scenario.world
    left = worst = len(scenario.lengths)
    most_deals = 2  # of fewer samples than ranks: in one all are emitted, unless it ends with drops
    while worst >= world:
        worst, most_deals = worst - worst // world, most_deals + 1
    for deal in record.rounds:
        if scenario.non_join and left >= world:
            shares = [len(range(rank, left, world)) for rank in range(world)]
        else:
            shares = [-(-left // world)] * world
        check_rounds(record, deal, shares, check_no_leak(record, deal, shares))
        before, left = left, record.left_after(deal)
        assert left <= before - max(before // world, 1), "the rank that ends a deal is done with its share"
    assert left == 0
    assert len(record.rounds) <= (most_deals if scenario.non_join else 1)


def check_coverage(record: Record) -> None:
    """Every sample that is not dropped is emitted, and how many views of it there are."""
    scenario, counts = record.scenario, record.trained
    n, kept, world = len(scenario.lengths), len(scenario.kept), scenario.world
    assert set(counts) == scenario.kept, "identity coverage"
    if scenario.non_join:
        largest_step = max((step[0].info.global_samples for step in record.steps), default=0)
        assert kept <= counts.total() <= kept + min(largest_step, world - 1), "quota"
        assert all(rank.info.indices for step in record.steps for rank in step), "no step without data"
    else:
        assert counts.total() + len(record.dropped) == world * -(-n // world), "all views of all ranks"


def check_epoch(scenario: Scenario) -> None:
    record = Record(scenario)
    check_budgets_and_facts(record)
    check_exchanges(record)
    check_deals(record)
    check_coverage(record)


@settings(deadline=None, max_examples=120)
@given(SCENARIOS)
def test_every_claim_on_an_epoch(scenario: Scenario) -> None:
    check_epoch(scenario)


@pytest.mark.full
@pytest.mark.timeout(1200)
@settings(deadline=None, max_examples=4000)
@given(SCENARIOS)
def test_every_claim_on_many_epochs(scenario: Scenario) -> None:
    check_epoch(scenario)


@settings(deadline=None, max_examples=40)
@given(SCENARIOS, st.lists(st.integers(0, 15), max_size=120))
def test_ranks_that_begin_empty_or_end_early(scenario: Scenario, owners: list[int]) -> None:
    scenario = replace(scenario, non_join=False)
    shares: list[list[int]] = [[] for _ in range(scenario.world)]
    for identity, owner in zip(range(len(scenario.lengths)), owners, strict=False):
        shares[owner % scenario.world].append(identity)
    record = Record(scenario, shares=shares)
    check_budgets_and_facts(record)
    check_exchanges(record)
    sizes = [len(share) for share in shares]
    check_rounds(record, 0, sizes, check_no_leak(record, 0, sizes))
    assert record.trained == Counter(i for share in shares for i in share if scenario.lengths[i])


@settings(deadline=None, max_examples=50)
@given(SCENARIOS, st.lists(st.tuples(st.integers(1, 16), st.booleans(), st.floats(0, 1)), min_size=1, max_size=3))
def test_an_epoch_that_is_stopped_goes_on_with_just_what_is_left(
    scenario: Scenario, stops: list[tuple[int, bool, float]]
) -> None:
    """A chain of passes; each but the last is stopped somewhere, and the next has the same or another world size."""
    n, mode = len(scenario.lengths), scenario.settings["mode"]
    seen, whole = Counter[int](), Counter[int]()
    state: dict[str, Any] | None = None
    keeps_shares = False
    for next_world, same_world, portion in [*stops, (1, True, 1.0)]:
        ledger = open_ledger(n, world_size=scenario.world, mode=mode, state=state)
        record = Record(scenario, state=state)
        emitted = record.trained
        if keeps_shares:
            assert seen + emitted == whole, "as if never stopped, the repeats included"
        else:
            assert set(emitted) == scenario.kept - set(seen), "what is left, and nothing twice"
            if 0 not in scenario.lengths:
                left, world = n - len(seen), scenario.world
                repeats = emitted.total() - left
                assert repeats == -left % world if mode == "join" else 0 <= repeats < world
            whole = seen + emitted
        trained_on = round(portion * len(record.steps))
        while trained_on and not record.steps[trained_on - 1][0].info.ends_window:
            trained_on -= 1
        for step in record.steps[:trained_on]:
            ledger.mark(step[0].views)
            ledger.steps, ledger.dropped = step[0].info.batch_idx + 1, step[0].info.samples_dropped
        seen += trained(record.steps[:trained_on])
        state = ledger.state_dict() if trained_on else state
        keeps_shares = mode == "join" and same_world and state is not None
        scenario = scenario if same_world else replace(scenario, world=next_world)


@pytest.mark.parametrize(
    ("samples", "surplus"), [(57_284, 4), pytest.param(207_865, 7, marks=[pytest.mark.full, pytest.mark.timeout(900)])]
)
def test_an_epoch_of_the_paper_s_size_on_eight_ranks(samples: int, surplus: int) -> None:
    lengths = length_mix("sharegpt4o", samples).tolist()
    rounds: list[GroupingRound] = []
    ranks = simulate(
        lengths,
        world_size=8,
        l_max=14_336,
        source=LengthSource,
        collate_fn=len,
        watch=lambda rank, epoch, result: rounds.append(result) if rank == 0 else None,
    )
    counts = trained(list(zip(*ranks, strict=True)))
    assert set(counts) == set(range(samples))
    assert Counter(counts.values()) == Counter({1: samples - surplus, 2: surplus})
    assert len(rounds) <= samples // 8 + 2
    idle = sum(step.info.idle_ranks for step in ranks[0])
    assert idle < 0.005 * 8 * len(ranks[0])


@pytest.mark.parametrize("mix", sorted(LENGTH_MIXES))
def test_a_rank_sends_at_most_16_kib_a_round_at_the_default_buffer(mix: str) -> None:
    sent, rounds = [], []
    simulate(
        length_mix(mix, 4 * 2048).tolist(),
        world_size=4,
        l_max=LENGTH_MIXES[mix].l_max,
        source=LengthSource,
        collate_fn=len,
        watch=lambda rank, epoch, result: rounds.append(result.steps) if rank == 0 else None,
        tap=lambda rank, event: sent.append(event.message.nbytes) if rank == 0 and isinstance(event, Gather) else None,
    )
    *with_steps, last = rounds
    assert (len(with_steps), last) == (2, 0), "the buffer is filled twice"
    assert sum(sent) <= 2 * 16_384
