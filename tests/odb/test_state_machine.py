"""Rounds between arbitrary interleavings of fetching, draining and training, as a state machine.

Each rank keeps books of its own, and what the protocol says is held against them.
"""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from odb_libra_lightning.odb.cost import TokenCost
from odb_libra_lightning.odb.exchange import Exchange
from odb_libra_lightning.odb.protocol import GroupingRound, RankProtocol
from odb_libra_lightning.odb.reader import Sample
from odb_libra_lightning.odb.transport import play


class Books:
    """A rank by its own account: the views in each place, by number."""

    def __init__(self, samples: list[Sample], slots: int, protocol: RankProtocol) -> None:
        self.views = Counter(sample.view for sample in samples)
        self.sampler, self.workers = list(samples), list[Sample]()
        self.unreported, self.dropped, self.emitted = list[int](), list[int](), list[int]()
        self.slots = self.capacity = slots
        self.protocol = protocol
        self.steps = 0

    def fetch(self, count: int, depth: int) -> None:
        count = max(min(count, depth - len(self.workers) - len(self.protocol.buffer)), 0)
        self.workers += self.sampler[:count]
        del self.sampler[:count]

    def drain(self, count: int) -> None:
        self.protocol.add(self.workers[:count])
        self.unreported += [sample.view for sample in self.workers[:count] if sample.dropped]
        del self.workers[:count]

    def train(self, count: int) -> None:
        self.slots = min(self.slots + count, self.capacity)

    @property
    def buffered(self) -> list[int]:
        return [sample.view for sample in self.protocol.buffer]

    @property
    def left(self) -> int:
        return len(self.sampler) + len(self.workers) + len(self.protocol.buffer)

    def exchange(self) -> Exchange[None]:
        self.result: GroupingRound = yield from self.protocol.play_round(
            in_sampler=len(self.sampler), in_workers=len(self.workers), free_slots=self.slots
        )


class Rounds(RuleBasedStateMachine):
    """`RankProtocol` of 1 to 16 ranks under any schedule."""

    def __init__(self) -> None:
        super().__init__()
        self.ranks: list[Books] = []
        self.ended = True
        self.held = True  # whether every claim so far did

    @initialize(
        sizes=st.lists(st.integers(0, 2) | st.integers(3, 80), min_size=1, max_size=16),
        seed=st.integers(0, 2**32),
        shape=st.sampled_from(["even", "short and long", "much is dropped"]),
        l_max=st.integers(1, 99) | st.integers(100, 500),
        quadratic_length=st.none() | st.integers(1, 200),
        join=st.booleans(),
        depth=st.integers(1, 60),
        slots=st.integers(1, 3) | st.integers(4, 40),
    )
    def begin(
        self,
        sizes: list[int],
        seed: int,
        shape: str,
        l_max: int,
        quadratic_length: int | None,
        join: bool,
        depth: int,
        slots: int,
    ) -> None:
        self.l_max, self.cost, self.join, self.depth = l_max, TokenCost(quadratic_length), join, depth
        random, view = Random(seed), 0
        for rank, size in enumerate(sizes):
            longest = 4 if shape == "short and long" and rank % 2 else 100
            samples = []
            for _ in range(size):
                dropped = shape == "much is dropped" and random.random() < 0.7
                samples.append(Sample(view, view, 0 if dropped else random.randint(1, longest), b""))
                view += 1
            protocol = RankProtocol(l_max=l_max, cost=self.cost, join=join, order_seed=[0])
            self.ranks.append(Books(samples, slots, protocol))
        self.ended = False

    @rule(rank=st.integers(0, 15), count=st.integers(1, 40))
    def workers_fetch(self, rank: int, count: int) -> None:
        self.ranks[rank % len(self.ranks)].fetch(count, self.depth)

    @rule(rank=st.integers(0, 15), count=st.integers(1, 40))
    def a_buffer_is_filled(self, rank: int, count: int) -> None:
        self.ranks[rank % len(self.ranks)].drain(count)

    @rule(rank=st.integers(0, 15), count=st.integers(1, 40))
    def a_trainer_takes_batches(self, rank: int, count: int) -> None:
        self.ranks[rank % len(self.ranks)].train(count)

    @rule(seed=st.integers(0, 2**32), most=st.integers(1, 30))
    def all_move(self, seed: int, most: int) -> None:
        random = Random(seed)
        for rank in self.ranks:
            rank.train(random.randint(0, most))
            rank.fetch(random.randint(0, most), self.depth)
            rank.drain(random.randint(0, most))

    @precondition(lambda self: not self.ended)
    @rule(count=st.integers(1, 4))
    def rounds_follow(self, count: int) -> None:
        for _ in range(count):
            if not self.ended:
                self.a_round()

    def a_round(self) -> None:
        self.held = False
        held = [set(rank.buffered) for rank in self.ranks]
        left = sum(rank.left for rank in self.ranks)
        play(rank.exchange() for rank in self.ranks)
        results = [rank.result for rank in self.ranks]
        first = results[0]

        through = [not h and not rank.sampler and not rank.workers for rank, h in zip(self.ranks, held, strict=True)]
        waiting = [not h and not done for h, done in zip(held, through, strict=True)]
        full = [rank.slots == 0 for rank in self.ranks]
        assert first.ended == (all(through) if self.join else any(through))
        skipped = first.ended or any(waiting) or (any(full) and not any(through))
        active = [i for i, views in enumerate(held) if views]
        groups, groupable = first.column("status"), first.column("groupable")
        terms = [max((groups[i] for i in active), default=0), *(groupable[i] for i in active)]
        terms += [self.ranks[i].slots for i in active if self.ranks[i].slots]
        assert first.steps == (0 if skipped else max(min(terms), 1)), "Algorithm 1"
        assert first.potential == left

        for rank, result, views in zip(self.ranks, results, held, strict=True):
            assert (result.number, result.steps, result.ended) == (first.number, first.steps, first.ended)
            assert (result.reports == first.reports).all()
            assert len(result.groups) == (result.steps if views else 0), "equal steps wherever there is data"
            for group in result.groups:
                longest = max(sample.length for sample in group)
                cost = self.cost.of(len(group), longest)
                assert cost <= max(self.l_max, self.cost.of(1, longest)), "within the budget"
            out = [sample.view for group in result.groups for sample in group]
            assert Counter(out) + Counter(rank.buffered) == Counter(views), "what leaves the buffer is in one group"
            rank.emitted += out
            rank.steps += result.steps
            rank.slots = max(rank.slots - result.steps, 0)
        for step in range(first.steps):
            everyone = [s.view for r in results if r.groups for s in r.groups[step]]
            for result in results:
                assert sorted(result.emitted[step]) == sorted(everyone), "all know what each step is done with"
        dropped = sorted(view for rank in self.ranks for view in rank.unreported)
        for rank, result in zip(self.ranks, results, strict=True):
            assert sorted(result.dropped) == dropped
            rank.dropped, rank.unreported = rank.dropped + rank.unreported, []
        now = sum(rank.left for rank in self.ranks)
        assert now == left if skipped else now < left, "the potential falls just in the rounds that are not skipped"
        self.ended = first.ended
        self.held = True

    @invariant()
    def no_leak(self) -> None:
        for rank in self.ranks:
            places = [s.view for s in rank.sampler + rank.workers] + rank.buffered + rank.emitted
            assert Counter(places + rank.dropped + rank.unreported) == rank.views

    def teardown(self) -> None:
        """Once every rank has something to group and room for it, as many rounds as the most views of a rank do."""
        if not (self.ranks and self.held):
            return
        most = max(rank.left for rank in self.ranks)
        rounds = 0
        while not self.ended:
            for rank in self.ranks:
                rank.train(rank.capacity)
                while not rank.buffered and (rank.sampler or rank.workers):
                    rank.fetch(1, self.depth)
                    rank.drain(1)
            self.a_round()
            self.no_leak()
            rounds += 1
        assert rounds <= most + 1
        left = [rank.left for rank in self.ranks]
        assert max(left) == 0 if self.join else min(left) == 0
        assert len({rank.steps for rank in self.ranks}) == 1


@pytest.mark.parametrize("examples", [60, pytest.param(2000, marks=[pytest.mark.full, pytest.mark.timeout(900)])])
def test_any_schedule_of_rounds(examples: int) -> None:
    run_state_machine_as_test(Rounds, settings=settings(max_examples=examples, stateful_step_count=40, deadline=None))
