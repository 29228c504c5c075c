"""What is the ring's own: which rank computes what at which step, and that keys travel meanwhile."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from odb_libra_lightning.baselines import ring_attention
from odb_libra_lightning.baselines.replica_shards import replica_sequence
from odb_libra_lightning.baselines.ring_schedule import RingSchedule, Run, ring_schedule
from odb_libra_lightning.libra.attention_costs import AttentionShape, ring_cost
from odb_libra_lightning.libra.calibration import DEFAULT_CALIBRATION
from odb_libra_lightning.libra.pool_plan import plan_pool
from odb_libra_lightning.libra.thread_transport import DelayedTransport, TransferEvent
from odb_libra_lightning.libra.transport import Transport
from tests.baselines.compared import Replica
from tests.libra.dense import DenseKernel


def schedules(lengths: list[int], ranks: int, *, window: int | None = None, padding: int = 0) -> list[RingSchedule]:
    replica = Replica(lengths=lengths, ranks=ranks, window=window, padding=padding)
    sequence = replica_sequence(replica.plan(), 0)
    return [ring_schedule(sequence, rank, ranks, window=window) for rank in range(ranks)]


def block_rows(rank: int, ranks: int, rows: int) -> list[int]:
    """Rows of the sequence in a rank's block, by the definition of zigzag."""
    edges = [at * rows // (2 * ranks) for at in range(2 * ranks + 1)]
    return [row for at in (rank, 2 * ranks - 1 - rank) for row in range(edges[at], edges[at + 1])]


def pairs_of(run: Run, queries: list[int], keys: list[int]) -> Counter[tuple[int, int]]:
    """Pairs of rows of the sequence that a kernel computes for a run, by the interface of kernels."""
    queries, keys = queries[run.queries], keys[run.keys]
    if run.backwards:
        queries, keys = queries[::-1], keys[::-1]
    segments, counted = run.segments, Counter[tuple[int, int]]()
    assert (len(queries), len(keys)) == (segments.query_starts[-1], segments.key_starts[-1])
    for number, (height, width) in enumerate(zip(segments.query_lengths, segments.key_lengths, strict=True)):
        for row in range(height):
            last = row + width - height if run.causal else width - 1
            first = 0 if run.window is None else max(0, last - run.window + 1)
            for column in range(first, last + 1):
                counted[queries[segments.query_starts[number] + row], keys[segments.key_starts[number] + column]] += 1
    return counted


@settings(max_examples=150)
@given(
    lengths=st.lists(st.one_of(st.sampled_from([1, 2, 3]), st.integers(1, 30)), min_size=1, max_size=8),
    ranks=st.integers(1, 6),
    window=st.sampled_from([None, None, 1, 2, 5, 11, 40]),
    padding=st.sampled_from([0, 0, 1, 9, 40]),
)
def test_every_pair_that_is_seen_is_computed_once(lengths: list[int], ranks: int, window: int, padding: int) -> None:
    rows = sum(lengths) + padding
    counted = Counter[tuple[int, int]]()
    for rank, schedule in enumerate(schedules(lengths, ranks, window=window, padding=padding)):
        assert len(schedule.steps) == ranks
        for step, runs in enumerate(schedule.steps):
            for run in runs:
                counted += pairs_of(run, block_rows(rank, ranks, rows), block_rows((rank - step) % ranks, ranks, rows))
    seen, start = set(), 0
    for length in lengths:
        for query in range(start, start + length):
            seen |= {(query, key) for key in range(start, query + 1) if window is None or query - key < window}
        start += length
    assert counted == Counter(seen)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_one_long_document_is_even_at_every_step(ranks: int) -> None:
    rows = 24 * ranks
    for step in range(ranks):
        work = {
            sum(
                pairs_of(run, block_rows(rank, ranks, rows), block_rows((rank - step) % ranks, ranks, rows)).total()
                for run in schedule.steps[step]
            )
            for rank, schedule in enumerate(schedules([rows], ranks))
        }
        assert len(work) == 1


def test_steps_of_two_ranks_by_hand() -> None:
    # Pieces of 4 rows: rank 0 has rows 0-3 and 12-15, rank 1 has 4-11. Documents: rows 0-5, 6-13, 14-15.
    first, second = schedules([6, 8, 2], 2)
    (own,), (met,) = first.steps
    assert own.segments.query_lengths == own.segments.key_lengths == (4, 2, 2)
    assert own.causal
    # Rows 12 and 13 of rank 0 see rows 6 to 11, the last of rank 1.
    assert (met.queries, met.keys, met.causal) == (slice(4, 6), slice(2, 8), False)
    (own,), (met,) = second.steps
    assert own.segments.query_lengths == (2, 6)
    # Rows 4 and 5 of rank 1 see rows 0 to 3.
    assert (met.queries, met.keys, met.causal) == (slice(0, 2), slice(0, 4), False)
    assert (first.home_splits, first.block_splits, first.swapped) == ((4, 4), (4, 4), False)
    assert (second.home_splits, second.block_splits, second.swapped) == ((4, 4), (4, 4), True)


def test_what_no_query_sees_is_skipped() -> None:
    for schedule in schedules([8, 8, 8, 8], 2):  # documents end where pieces do
        assert [len(runs) for runs in schedule.steps] == [1, 0]
    for rank, schedule in enumerate(schedules([64], 4, window=3)):
        # Pieces of 8 rows: a query reaches into the piece before at most, which the rank before or after it has.
        met = {(rank - step) % 4 for step, runs in enumerate(schedule.steps) if runs}
        assert met <= {rank - 1, rank, rank + 1}


@pytest.mark.parametrize("ranks", [2, 4])
def test_keys_travel_while_others_are_computed(ranks: int) -> None:
    class Timed(DenseKernel):
        def __init__(self, events: list[TransferEvent]) -> None:
            self.events = events

        def forward(self, *args: Any, **options: Any) -> Any:
            return self.timed("forward", lambda: super(Timed, self).forward(*args, **options))

        def backward(self, *args: Any, **options: Any) -> Any:
            return self.timed("backward", lambda: super(Timed, self).backward(*args, **options))

        def timed(self, kind: str, call: Any) -> Any:
            begin = time.monotonic()
            result = call()
            self.events.append(TransferEvent(kind=kind, begin=begin, end=time.monotonic()))
            return result

    replica = Replica(lengths=[16 * ranks], ranks=ranks)
    logs: dict[int, list[TransferEvent]] = {rank: [] for rank in range(ranks)}

    def attention(*inputs: Any, transport: Transport, **options: Any) -> torch.Tensor:
        return ring_attention(*inputs, transport=transport, kernel=Timed(logs[transport.rank]), **options)

    replica.on_threads(
        attention, wrapped=lambda transport: DelayedTransport(transport, 0.002, events=logs[transport.rank])
    )
    for log in logs.values():
        for kind in ("forward", "backward"):
            computed = [event for event in log if event.kind == kind]
            assert len(computed) == ranks  # a document of all rows gives a run a step
            transfers = [event for event in log if event.kind == "all_to_all"]
            for at, event in enumerate(computed):
                under_way = [each for each in transfers if each.begin <= event.begin and event.end <= each.end]
                keys = at < ranks - 1
                gradients = kind == "backward" and at > 0
                assert len(under_way) == keys + gradients


@pytest.mark.parametrize(("kv_heads", "dtype"), [(1, torch.float32), (8, torch.float32), (2, torch.bfloat16)])
@pytest.mark.parametrize("ranks", [2, 4])
def test_passes_on_the_bytes_that_the_simulator_counts(kv_heads: int, dtype: torch.dtype, ranks: int) -> None:
    replica = Replica(lengths=[90, 3, 27], ranks=ranks, kv_heads=kv_heads, padding=8, dtype=dtype)
    transports = []

    def counted(transport: Transport) -> Transport:
        transports.append(DelayedTransport(transport))
        return transports[-1]

    replica.on_threads(ring_attention, wrapped=counted)
    shape = AttentionShape(
        context_parallel=ranks, num_heads=8, num_kv_heads=kv_heads, head_dim=4, bytes_per_element=dtype.itemsize
    )
    passed = ring_cost(
        replica.lengths, replica.rows, shape, first_worker=0, calibration=DEFAULT_CALIBRATION
    ).bytes_moved
    # To the block, CP - 1 hops, home; in backward gradients travel too, CP hops, in float32.
    forward, backward = ranks + 1, 2 * ranks + 1
    hops = [event.sent_bytes for each in transports for event in each.events[1 : forward - 1]]
    assert sum(hops) == passed
    hops = [event.sent_bytes for each in transports for event in each.events[forward + 1 : forward + backward - 1]]
    assert sum(hops) == passed + passed * ranks // (ranks - 1) * 4 // dtype.itemsize


def test_documents_of_a_replica_as_the_plan_has_them() -> None:
    lengths = [[5, 1, 30, 2], [64], [1] * 20, [7, 9]]
    for window in (None, 4):
        plan = plan_pool(
            lengths,
            context_parallel=2,
            block_size=6,
            head_shards=1,
            num_heads=4,
            num_kv_heads=1,
            head_dim=4,
            bytes_per_element=2,
            window=window,
            sequence_length=70,
        )
        for replica, expected in enumerate(lengths):
            sequence = replica_sequence(plan, replica)
            assert sequence.document_lengths == tuple(expected)
            assert (sequence.home_start, sequence.tokens) == ((0, 35, 70), sum(expected))
