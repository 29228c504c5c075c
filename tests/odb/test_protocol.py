"""Rounds of several ranks with output slots that fill up and samples that come late: nothing leaks, nothing hangs."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from odb_libra_lightning.odb.cost import TokenCost
from odb_libra_lightning.odb.exchange import Exchange
from odb_libra_lightning.odb.protocol import FINISHED, GroupingRound, RankProtocol
from odb_libra_lightning.odb.reader import Sample
from odb_libra_lightning.odb.transport import play


class Rank:
    """A rank whose workers and trainer move at random between rounds."""

    def __init__(self, lengths: list[int], l_max: int, random) -> None:  # type: ignore[no-untyped-def]
        self.sampler = [Sample(i, i, length, b"") for i, length in enumerate(lengths)]
        self.workers: list[Sample] = []
        self.emitted: list[Sample] = []
        self.steps = 0
        self.slots = 2
        self.random = random
        self.protocol = RankProtocol(l_max=l_max, cost=TokenCost(), join=True, order_seed=[0])
        self.rounds: list[GroupingRound] = []
        self.views = len(lengths)

    def move(self) -> None:
        fetched = self.random.randint(0, 3)
        self.workers += self.sampler[:fetched]
        del self.sampler[:fetched]
        drained = self.random.randint(0, 3)
        self.protocol.add(self.workers[:drained])
        del self.workers[:drained]
        self.slots = min(self.slots + self.random.randint(0, 2), 5)

    def epoch(self) -> Exchange[None]:
        while True:
            self.move()
            held = len(self.sampler), len(self.workers), len(self.protocol.buffer), len(self.emitted)
            assert sum(held) == self.views, "each view is in one of sampler, workers, buffer, and emitted (R, Q, B, E)"
            result = yield from self.protocol.play_round(in_sampler=held[0], in_workers=held[1], free_slots=self.slots)
            self.rounds.append(result)
            if result.ended:
                return
            assert not result.groups or len(result.groups) == result.steps
            self.emitted += [sample for group in result.groups for sample in group]
            self.slots = max(self.slots - result.steps, 0)
            self.steps += result.steps


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.lists(st.integers(1, 50), max_size=25), min_size=1, max_size=8),
    st.integers(1, 120),
    st.randoms(use_true_random=False),
)
def test_every_view_is_emitted_once_in_equal_steps(shares, l_max, random) -> None:  # type: ignore[no-untyped-def]
    ranks = [Rank(lengths, l_max, random) for lengths in shares]
    play(rank.epoch() for rank in ranks)
    assert len({rank.steps for rank in ranks}) == 1
    for rank, lengths in zip(ranks, shares, strict=True):
        assert sorted(sample.identity for sample in rank.emitted) == list(range(len(lengths)))
        assert (rank.rounds[-1].reports == ranks[0].rounds[-1].reports).all()
    left = [result.potential for result in ranks[0].rounds]
    assert left == sorted(left, reverse=True), "the work left never grows"
    for before, after in zip(ranks[0].rounds, left[1:], strict=False):
        skipped = before.steps == 0
        assert (after == left[before.number]) == skipped, "and falls in every round that is not skipped"
    for number, result in enumerate(ranks[0].rounds):
        waiting = (result.column("status") == 0).any()
        full = (result.column("free_slots") == 0).any()
        finished = (result.column("status") == FINISHED).any()
        assert (result.steps == 0) == (waiting or (full and not finished) or result.ended)
        assert result.number == number
