"""What hides behind what: attention on a clock of its own, on which a transfer and a chunk take as long as we say.

Each worker is played alone. Its transport brings zeros, and moves the clock only where the worker waits; its kernel
moves it by what a chunk takes. So the times are exact, and no machine decides a test.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from odb_libra_lightning.libra.attention import Remember, libra_attention
from odb_libra_lightning.libra.pool_plan import PoolPlan
from odb_libra_lightning.libra.segments import Segments
from tests.libra.attention_of_pools import POOL, rows_of, starts_of
from tests.libra.oracles import Pool
from tests.libra.plans import plan_of

COMPUTE = 10.0


class Event(NamedTuple):
    """A transfer from its call to its arrival, or a chunk from begin to end."""

    kind: str
    begin: float
    end: float


@dataclass(kw_only=True)
class Clock:
    now: float = 0.0
    events: list[Event] = field(default_factory=list)

    def of(self, kind: str) -> list[Event]:
        return [event for event in self.events if event.kind == kind]


@dataclass(kw_only=True)
class Link:
    """A transport of one worker. In `turns` a transfer begins when the one before it has ended, as NCCL's do."""

    clock: Clock
    rank: int
    size: int
    seconds: float
    turns: bool = False
    free: float = 0.0

    def all_to_all(self, output: Tensor, *_: Any) -> Arrival:
        begin = max(self.clock.now, self.free) if self.turns else self.clock.now
        self.free = begin + self.seconds
        event = Event("transfer", self.clock.now, self.free)
        self.clock.events.append(event)
        output.zero_()
        return Arrival(self.clock, event)


@dataclass
class Arrival:
    clock: Clock
    event: Event

    def wait(self) -> None:
        self.clock.now = max(self.clock.now, self.event.end)


@dataclass
class Stub:
    """A kernel that gives zeros."""

    clock: Clock

    def _compute(self) -> None:
        begin = self.clock.now
        self.clock.now += COMPUTE
        self.clock.events.append(Event("compute", begin, self.clock.now))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, **mask: Any) -> tuple[Tensor, Tensor]:
        self._compute()
        return torch.zeros_like(q), q.new_zeros(q.shape[1], q.shape[0])

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any, **mask: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        self._compute()
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)


def pool_of(chunks: int) -> Pool:
    """Every KV head is read in one chunk alone, so that keys go and come in each."""
    return dataclasses.replace(POOL, num_kv_heads=8, head_shards=1, chunks=chunks, documents=((44,), (1,) * 44))


def play(
    plan: PoolPlan, pool: Pool, worker: int, *, seconds: float, turns: bool = False, remember: Remember = "keep"
) -> tuple[Clock, Clock]:
    """Forward and backward of one worker, each from second 0."""
    start, stop = starts_of(pool)[worker : worker + 2]
    q, k, v, grad = (each[start:stop] for each in rows_of(pool, dtype=torch.float32))
    clock = Clock()
    link = Link(clock=clock, rank=worker, size=pool.num_workers, seconds=seconds, turns=turns)
    q.requires_grad_()
    out = libra_attention(q, k, v, plan, transport=link, kernel=Stub(clock), remember=remember)
    forward = Clock(now=clock.now, events=list(clock.events))
    clock.now, link.free = 0.0, 0.0
    clock.events.clear()
    out.backward(grad)
    return forward, clock


CHUNKS = pytest.mark.parametrize("chunks", [1, 2, 4, 8])
BOTH = pytest.mark.parametrize("remember", ["keep", "refetch"])


@CHUNKS
@BOTH
@pytest.mark.parametrize("seconds", [0.0, 3.0, COMPUTE])
def test_of_transfers_no_longer_than_a_chunk_only_the_first_and_the_last_show(
    chunks: int, remember: Remember, seconds: float
) -> None:
    pool = pool_of(chunks)
    plan = plan_of(pool)
    for worker in range(pool.num_workers):
        for clock in play(plan, pool, worker, seconds=seconds, remember=remember):
            assert clock.now == 2 * seconds + chunks * COMPUTE
            computed = clock.of("compute")
            assert len(computed) == chunks
            assert all(a.end == b.begin for a, b in pairwise(computed)), "the kernel waited between two chunks"


@CHUNKS
@pytest.mark.parametrize("seconds", [COMPUTE + 5, 4 * COMPUTE])
def test_of_longer_transfers_only_as_much_shows_as_is_longer_than_a_chunk(chunks: int, seconds: float) -> None:
    pool = pool_of(chunks)
    for clock in play(plan_of(pool), pool, 0, seconds=seconds):
        assert clock.now == 2 * seconds + COMPUTE + (chunks - 1) * seconds


@CHUNKS
def test_transfers_that_take_turns_hide_as_long_as_those_of_a_chunk_fit_into_it(chunks: int) -> None:
    """Three a chunk: queries, keys, outputs; in backward gradients of outputs out, of queries and of keys home."""
    pool, seconds = pool_of(chunks), COMPUTE / 4
    for worker in range(pool.num_workers):
        forward, backward = play(plan_of(pool), pool, worker, seconds=seconds, turns=True)
        assert forward.now == 2 * seconds + chunks * COMPUTE + seconds
        assert backward.now == seconds + chunks * COMPUTE + 2 * seconds
        for clock in (forward, backward):
            assert all(a.end == b.begin for a, b in pairwise(clock.of("compute")))


@CHUNKS
@BOTH
def test_a_chunk_is_sent_before_the_one_before_it_is_computed_and_returns_before_the_next(
    chunks: int, remember: Remember
) -> None:
    pool = pool_of(chunks)
    forward, backward = play(plan_of(pool), pool, 1, seconds=1.0, remember=remember)
    # Queries and keys go out, outputs come home; gradients of outputs go out, those of queries and of keys come home.
    for clock, out, home in ((forward, 2, 1), (backward, 1 if remember == "keep" else 3, 2)):
        calls = "".join("t" if event.kind == "transfer" else "c" for event in clock.events)
        between = [len(each) for each in calls.split("c")]
        if chunks == 1:
            assert between == [out, home]
        else:
            assert between == [2 * out, *[home + out] * (chunks - 2), home, home]


def test_every_worker_calls_as_many_transfers_as_the_others() -> None:
    for chunks in (1, 2, 4, 8):
        for remember in ("keep", "refetch"):
            pool = pool_of(chunks)
            plan = plan_of(pool)
            counts = set()
            for worker in range(pool.num_workers):
                clocks = play(plan, pool, worker, seconds=1.0, remember=remember)  # type: ignore[arg-type]
                counts.add(tuple(len(clock.of("transfer")) for clock in clocks))
            assert len(counts) == 1
