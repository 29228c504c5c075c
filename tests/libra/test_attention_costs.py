"""What attention costs, against messages that are counted one by one and sums done by hand."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import numpy as np
import pytest

from odb_libra_lightning.libra.attention_costs import (
    AttentionShape,
    pool_cost,
    pool_kernel_seconds,
    ring_cost,
    ulysses_cost,
)
from odb_libra_lightning.libra.pool_plan import plan_pool
from tests.libra.slow_clusters import SLOW_KERNEL, SLOW_LINKS


def ulysses_messages(rows: int, shape: AttentionShape) -> tuple[list[list[int]], list[list[int]]]:
    """Heads of rows of Q, K, V that each worker lacks, and of the output that each lacks, by who has them."""
    workers, heads = shape.context_parallel, shape.num_heads
    home = [next(c for c in range(workers) if row < (c + 1) * rows // workers) for row in range(rows)]
    there = [[0] * workers for _ in range(workers)]
    back = [[0] * workers for _ in range(workers)]
    for worker in range(workers):
        mine = [head for head in range(heads) if head * workers // heads == worker]
        read = {head * shape.num_kv_heads // heads for head in mine}
        for row in range(rows):
            if home[row] != worker:
                there[home[row]][worker] += len(mine) + 2 * len(read)
                back[worker][home[row]] += len(mine)
    return there, back


def busiest(*messages: list[list[int]]) -> int:
    total = np.sum([np.array(one) for one in messages], axis=0)
    return int(max(total.sum(axis=0).max(), total.sum(axis=1).max()))


@pytest.mark.parametrize(
    ("workers", "heads", "kv_heads", "rows"),
    [(1, 4, 2, 8), (2, 4, 2, 8), (4, 8, 2, 8), (4, 8, 8, 10), (8, 8, 2, 16), (4, 12, 3, 8), (4, 4, 1, 7)],
)
def test_ulysses_bytes_are_those_of_messages_counted_one_by_one(workers, heads, kv_heads, rows):
    shape = AttentionShape(
        context_parallel=workers, num_heads=heads, num_kv_heads=kv_heads, head_dim=3, bytes_per_element=2
    )
    there, back = ulysses_messages(rows, shape)
    links = dataclasses.replace(SLOW_LINKS, workers_per_node=64)
    cost = ulysses_cost([rows], rows, shape, first_worker=0, calibration=links)
    assert cost.bytes_moved == 6 * (np.sum(there) + np.sum(back))
    assert cost.busiest_bytes == 6 * busiest(there, back)
    # A byte a second, forward and then the same in backward.
    assert cost.seconds == pytest.approx(2 * 6 * (busiest(there) + busiest(back)))


def test_ulysses_computes_whole_documents_with_its_share_of_the_heads():
    shape = AttentionShape(context_parallel=2, num_heads=4, num_kv_heads=4, head_dim=1, bytes_per_element=2)
    cost = ulysses_cost([3, 4], 8, shape, first_worker=0, calibration=SLOW_KERNEL)
    assert cost.seconds == pytest.approx(4 * (6 + 10) * 2 * 3.5)


def test_ulysses_across_nodes_is_as_slow_as_the_network():
    shape = AttentionShape(context_parallel=2, num_heads=2, num_kv_heads=2, head_dim=1, bytes_per_element=1)
    inside, across = (ulysses_cost([2], 2, shape, first_worker=w, calibration=SLOW_LINKS).seconds for w in (2, 3))
    assert inside == pytest.approx(2 * (3 + 1))
    assert across == pytest.approx(10 * inside)


def test_ulysses_refuses_heads_that_cannot_be_dealt():
    shape = AttentionShape(context_parallel=3, num_heads=4, num_kv_heads=2, head_dim=1, bytes_per_element=2)
    with pytest.raises(ValueError, match="context_parallel=3 does not divide num_heads=4"):
        ulysses_cost([3], 3, shape, first_worker=0, calibration=SLOW_LINKS)


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_ring_bytes_are_those_of_blocks_handed_on(workers):
    rows, kv_heads = 4 * workers, 2
    shape = AttentionShape(
        context_parallel=workers, num_heads=4, num_kv_heads=kv_heads, head_dim=3, bytes_per_element=2
    )
    # Blocks of K and V are handed to the right until everyone has seen them all.
    seen = [{w} for w in range(workers)]
    held = list(range(workers))
    sent = [0] * workers
    while any(len(blocks) < workers for blocks in seen):
        held = [held[w - 1] for w in range(workers)]
        for w in range(workers):
            sent[w] += 4 * kv_heads * 2 * 6
            seen[w].add(held[w])
    links = dataclasses.replace(SLOW_LINKS, workers_per_node=64)
    cost = ring_cost([rows], rows, shape, first_worker=0, calibration=links)
    assert cost.bytes_moved == sum(sent)
    assert cost.busiest_bytes == max(sent)
    # Backward hands the blocks on as often, and their gradients, of 4 bytes, once more to bring them home.
    assert cost.seconds == pytest.approx(2 * max(sent) + (2 * (max(sent) + 96) if workers > 1 else 0))


@pytest.mark.parametrize(("bytes_per_element", "of_gradients"), [(1, 4), (2, 4), (4, 4), (8, 8)])
def test_ring_adds_gradients_up_in_float32_at_least(bytes_per_element, of_gradients):
    shape = AttentionShape(
        context_parallel=2, num_heads=1, num_kv_heads=1, head_dim=1, bytes_per_element=bytes_per_element
    )
    cost = ring_cost([4], 4, shape, first_worker=0, calibration=SLOW_LINKS)
    # Two rows of K and of V once forward and once backward; their gradients twice.
    assert cost.seconds == pytest.approx(4 * (2 * bytes_per_element + 2 * of_gradients))


def test_ring_work_is_shared_evenly():
    shape = AttentionShape(context_parallel=2, num_heads=4, num_kv_heads=4, head_dim=1, bytes_per_element=2)
    cost = ring_cost([3, 5], 8, shape, first_worker=0, calibration=SLOW_KERNEL)
    assert cost.seconds == pytest.approx(4 * (6 + 15) * 4 / 2 * 3.5)


def test_ring_pays_for_its_short_segments():
    uneven = dataclasses.replace(
        SLOW_KERNEL, efficiency_rows=(2, 8), efficiency_heads=(1,), efficiency=((0.25,), (1.0,))
    )
    shape = AttentionShape(context_parallel=2, num_heads=1, num_kv_heads=1, head_dim=1, bytes_per_element=2)
    long, short = (ring_cost([n], n, shape, first_worker=0, calibration=uneven).seconds for n in (32, 8))
    assert long == pytest.approx(4 * 32 * 33 / 2 / 2 * 3.5)
    assert short == pytest.approx(4 * 8 * 9 / 2 / 2 * 3.5 / 0.25)


class TestPool:
    LENGTHS = ((37, 3, 24), (5, 5, 54), (64,), (1,) * 64)
    LAYOUT: ClassVar[dict[str, Any]] = {
        "context_parallel": 2,
        "block_size": 8,
        "head_shards": 2,
        "num_heads": 8,
        "num_kv_heads": 2,
        "head_dim": 4,
        "bytes_per_element": 2,
    }

    @pytest.mark.parametrize("window", [None, 10])
    @pytest.mark.parametrize("chunks", [1, 4])
    def test_a_kernel_computes_the_load_of_its_worker(self, window, chunks):
        plan = plan_pool(self.LENGTHS, **self.LAYOUT, window=window, chunks=chunks)
        seconds = pool_kernel_seconds(plan, SLOW_KERNEL) * chunks
        np.testing.assert_allclose(seconds, 4 * 4 * plan.worker_load)

    def test_each_segment_is_priced_by_its_own_rows(self):
        # One worker: rows 0-7 and 8-15 are blocks, and the document of 12 that they cut is one segment again.
        plan = plan_pool([[3, 12, 1]], **self.LAYOUT | {"context_parallel": 1}, chunks=2, split_oversize=False)
        table = dataclasses.replace(
            SLOW_KERNEL, efficiency_rows=(1, 2, 4, 8), efficiency=tuple((share,) for share in (0.2, 0.4, 0.6, 0.8))
        )
        pairs = {3: 6, 12: 78, 1: 1}
        expected = sum(4 * 4 * 8 / 2 * n / table.efficiency_at([rows], 2)[0] for rows, n in pairs.items())
        assert pool_kernel_seconds(plan, table).tolist() == pytest.approx([expected])

    @pytest.mark.parametrize("first_worker", [0, 3])
    def test_without_overlap_it_is_every_exchange_one_after_the_other(self, first_worker):
        plan = plan_pool(self.LENGTHS, **self.LAYOUT, chunks=1)
        cost = pool_cost(plan, chunks=1, first_worker=first_worker, calibration=SLOW_LINKS)
        expected = 0.0
        forward, backward = ("queries", "keys", "outputs"), ("queries", "outputs", "key_gradients")
        for phase in (*forward, *backward):
            slowest = 0.0
            for worker in range(plan.num_workers):
                for direction in plan.split_sizes(worker, phase, 0):
                    near = [(first_worker + other) // 4 == (first_worker + worker) // 4 for other in range(8)]
                    inside = sum(n for n, is_near in zip(direction, near, strict=True) if is_near)
                    slowest = max(slowest, 2 * inside, 10 * 2 * (sum(direction) - inside))
            expected += slowest
        assert expected > 0
        assert cost.seconds == pytest.approx(expected)

    @pytest.mark.parametrize("chunks", [1, 2, 4])
    def test_the_bytes_are_the_plans_whatever_the_chunks(self, chunks):
        plan = plan_pool(self.LENGTHS, **self.LAYOUT, chunks=1)
        cost = pool_cost(plan, chunks=chunks, first_worker=0, calibration=SLOW_LINKS)
        assert (cost.bytes_moved, cost.busiest_bytes) == (plan.bytes_moved, plan.busiest_bytes)
        sent = [0] * plan.num_workers
        chunked = plan_pool(self.LENGTHS, **self.LAYOUT, chunks=chunks)
        for phase in ("queries", "keys", "outputs"):
            for chunk in range(chunks):
                for worker in range(plan.num_workers):
                    sent[worker] += 2 * sum(chunked.split_sizes(worker, phase, chunk)[0])
        assert sum(sent) == cost.bytes_moved

    def test_a_single_worker_exchanges_nothing_and_pays_a_launch_a_chunk(self):
        plan = plan_pool([[4]], **self.LAYOUT | {"context_parallel": 1, "block_size": 4}, chunks=1)
        costly = dataclasses.replace(SLOW_KERNEL, launch_seconds=1000.0, intra_node_alpha=1e9)
        cost = pool_cost(plan, chunks=4, first_worker=0, calibration=costly)
        assert cost.seconds == pytest.approx(4 * 4 * 10 * 8 * 3.5 + 2 * 4 * 1000)
        assert cost.bytes_moved == 0

    def test_chunks_that_do_not_divide_the_heads_are_refused(self):
        plan = plan_pool(self.LENGTHS, **self.LAYOUT, chunks=1)
        with pytest.raises(ValueError, match="chunks=3"):
            pool_cost(plan, chunks=3, first_worker=0, calibration=SLOW_LINKS)

    @pytest.mark.parametrize("chunks", [1, 2, 4])
    def test_other_chunks_of_a_plan_are_the_plan_made_with_them(self, chunks):
        plan = plan_pool(self.LENGTHS, **self.LAYOUT, chunks=1)
        other, anew = plan.with_chunks(chunks), plan_pool(self.LENGTHS, **self.LAYOUT, chunks=chunks)
        assert other.hash == anew.hash
        assert other.kernel_segments is plan.kernel_segments
        for phase in ("queries", "keys", "outputs", "key_gradients"):
            for chunk in range(chunks):
                assert other.elements(phase, chunk).tolist() == anew.elements(phase, chunk).tolist()
