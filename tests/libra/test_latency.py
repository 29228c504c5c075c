"""The latency model against clocks that tick, messages that are counted one by one, and sums done by hand."""

from __future__ import annotations

import dataclasses
import json
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odb_libra_lightning.libra.attention_costs import (
    AttentionShape,
    pool_cost,
    pool_kernel_seconds,
    ring_cost,
    ulysses_cost,
)
from odb_libra_lightning.libra.calibration import DEFAULT_CALIBRATION, Calibration
from odb_libra_lightning.libra.latency import exchange_seconds, kernel_seconds, pipeline_seconds
from odb_libra_lightning.libra.pool_plan import plan_pool

NOTHING = 1e-30  # a cost that vanishes beside any other
WITHOUT_END = 1e30

# One FLOP a second, nothing else costs anything.
SLOW_KERNEL = Calibration(
    source="test",
    peak_flops=1.0,
    efficiency_rows=(1,),
    efficiency_heads=(1,),
    efficiency=((1.0,),),
    backward_ratio=2.5,
    launch_seconds=NOTHING,
    workers_per_node=8,
    intra_node_alpha=NOTHING,
    intra_node_beta=WITHOUT_END,
    inter_node_alpha=NOTHING,
    inter_node_beta=WITHOUT_END,
)
# One byte a second within a node and a tenth of one across, nothing else costs anything.
SLOW_LINKS = dataclasses.replace(
    SLOW_KERNEL, peak_flops=WITHOUT_END, workers_per_node=4, intra_node_beta=1.0, inter_node_beta=0.1
)


def ticking_clock(compute: list[list[int]], dispatch: list[int], returned: list[int]) -> int:
    """Ticks that the executor's loop takes: every worker runs it as written, collectives wait for every worker."""
    chunks, workers = len(compute), len(compute[0])
    durations = {("in", m): dispatch[m] for m in range(chunks)} | {("out", m): returned[m] for m in range(chunks)}
    issued: dict[tuple[str, int], int] = dict.fromkeys(durations, 0)
    order: deque[tuple[str, int]] = deque()
    arrived: set[tuple[str, int]] = set()

    def issue(collective: tuple[str, int]) -> None:
        if not issued[collective]:
            order.append(collective)
        issued[collective] += 1

    def worker(w: int) -> Iterator[Any]:
        issue(("in", 0))
        for m in range(chunks):
            while ("in", m) not in arrived:
                yield "wait"
            if m + 1 < chunks:
                issue(("in", m + 1))
            if m > 0:
                issue(("out", m - 1))
            for _ in range(compute[m][w]):
                yield "tick"
        issue(("out", chunks - 1))
        while len(arrived) < len(durations):
            yield "wait"

    programs = {w: worker(w) for w in range(workers)}
    ticking: set[int] = set()
    running: list[Any] = []
    now = 0
    while True:
        ticking.clear()
        before = None
        while before != (len(arrived), len(programs), sum(issued.values()), len(ticking), bool(running)):
            before = (len(arrived), len(programs), sum(issued.values()), len(ticking), bool(running))
            for w in list(programs):
                if w not in ticking:
                    said = next(programs[w], None)
                    if said is None:
                        del programs[w]
                    elif said == "tick":
                        ticking.add(w)
            if running and running[1] == now:
                arrived.add(running[0])
                running.clear()
            if not running and order and issued[order[0]] == workers:
                collective = order.popleft()
                running[:] = [collective, now + durations[collective]]
        if not programs:
            return now
        now += 1


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[list[list[int]], list[int], list[int]]:
    chunks, workers = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    ticks = st.integers(0, 6)
    compute = [[draw(ticks) for _ in range(workers)] for _ in range(chunks)]
    return compute, [draw(ticks) for _ in range(chunks)], [draw(ticks) for _ in range(chunks)]


@settings(max_examples=300, deadline=None)
@given(pipelines())
def test_the_pipeline_takes_as_long_as_the_executor_under_a_ticking_clock(pipeline):
    assert pipeline_seconds(*pipeline) == ticking_clock(*pipeline)


def test_only_the_first_dispatch_and_the_last_return_show_when_computation_covers_the_rest():
    assert pipeline_seconds([[10.0]] * 4, [3.0] * 4, [5.0] * 4) == 3 + 4 * 10 + 5


def test_one_chunk_hides_nothing():
    assert pipeline_seconds([[10.0, 7.0]], [3.0], [5.0]) == 18


def test_where_links_are_slow_the_transfers_are_what_takes_time():
    assert pipeline_seconds([[1.0]] * 4, [3.0] * 4, [5.0] * 4) == 4 * (3 + 5)


def test_an_exchange_takes_its_larger_direction_on_the_slower_kind_of_link():
    between = np.array([[99, 10, 7, 0], [30, 99, 0, 0], [0, 0, 99, 0], [0, 0, 0, 99]])
    links = dataclasses.replace(
        SLOW_LINKS, workers_per_node=2, intra_node_alpha=1.0, inter_node_alpha=2.0, intra_node_beta=10.0
    )
    links = dataclasses.replace(links, inter_node_beta=1.0)
    # 0: in 30, out 10 within the node, 7 out of it. 1: 30 out within. 2: 7 in from outside. 3: nothing.
    assert exchange_seconds(between, first_worker=0, calibration=links).tolist() == [9.0, 4.0, 9.0, 0.0]
    # One worker later, worker 0 is alone in its node and 1 and 2 share one.
    assert exchange_seconds(between, first_worker=1, calibration=links).tolist() == [32.0, 32.0, 9.0, 0.0]


def test_kernel_seconds_are_four_flops_an_element_over_the_speed():
    speed = dataclasses.replace(SLOW_KERNEL, peak_flops=1000.0, efficiency=((0.5,),))
    assert kernel_seconds([6, 10], [3, 4], heads=2, head_dim=5, calibration=speed).tolist() == [0.48, 0.8]


class TestEfficiency:
    TABLE = dataclasses.replace(
        SLOW_KERNEL,
        efficiency_rows=(64, 1024),
        efficiency_heads=(2, 8),
        efficiency=((0.2, 0.4), (0.6, 1.0)),
    )

    @pytest.mark.parametrize(
        ("rows", "heads", "share"),
        [
            (64, 2, 0.2),
            (64, 8, 0.4),
            (1024, 2, 0.6),
            (1024, 8, 1.0),
            (256, 2, 0.4),  # half way in log2
            (64, 4, 0.3),
            (256, 4, 0.55),
            (1, 1, 0.2),  # beyond the edges
            (10**6, 64, 1.0),
        ],
    )
    def test_is_the_table_bilinear_in_log2_and_constant_outside(self, rows, heads, share):
        assert self.TABLE.efficiency_at([rows], heads)[0] == pytest.approx(share)


class TestCalibrationFile:
    def test_comes_back_as_it_was_written(self, tmp_path: Path):
        DEFAULT_CALIBRATION.to_json(tmp_path / "c.json")
        assert Calibration.from_json(tmp_path / "c.json") == DEFAULT_CALIBRATION

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("peak_flops", 0),
            ("peak_flops", -1),
            ("peak_flops", "fast"),
            ("peak_flops", True),
            ("peak_flops", None),
            ("peak_flops", float("nan")),
            ("peak_flops", float("inf")),
            ("backward_ratio", 0),
            ("launch_seconds", [1]),
            ("workers_per_node", 7.5),
            ("inter_node_beta", -45e9),
            ("source", 3),
            ("efficiency_rows", []),
            ("efficiency_rows", 64),
            ("efficiency_rows", [64, 64]),
            ("efficiency_heads", [2, 1]),
            ("efficiency_heads", [0]),
            ("efficiency", []),
            ("efficiency", [0.5]),
            ("efficiency", [[0.5]]),
            ("efficiency", [["high"]]),
        ],
    )
    def test_a_figure_that_is_none_is_refused_with_file_and_key(self, tmp_path: Path, key: str, value: Any):
        file = tmp_path / "c.json"
        file.write_text(json.dumps(dataclasses.asdict(DEFAULT_CALIBRATION) | {key: value}))
        with pytest.raises(ValueError, match=rf"c\.json: {key}\b") as caught:
            Calibration.from_json(file)
        assert "\n" not in str(caught.value)

    def test_unknown_and_missing_keys_are_refused(self, tmp_path: Path):
        figures = dataclasses.asdict(DEFAULT_CALIBRATION)
        (tmp_path / "more.json").write_text(json.dumps(figures | {"speed": 1}))
        with pytest.raises(ValueError, match=r"more\.json: unknown key speed"):
            Calibration.from_json(tmp_path / "more.json")
        del figures["peak_flops"]
        (tmp_path / "less.json").write_text(json.dumps(figures))
        with pytest.raises(ValueError, match=r"less\.json: missing key peak_flops"):
            Calibration.from_json(tmp_path / "less.json")

    @pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"[1]", b"3", b"[" * 100_000, b""])
    def test_what_is_no_object_is_refused(self, tmp_path: Path, content: bytes):
        (tmp_path / "c.json").write_bytes(content)
        with pytest.raises(ValueError, match=r"c\.json") as caught:
            Calibration.from_json(tmp_path / "c.json")
        assert "\n" not in str(caught.value)

    def test_a_file_that_is_not_there_is_named(self, tmp_path: Path):
        with pytest.raises(ValueError, match=r"none\.json cannot be read"):
            Calibration.from_json(tmp_path / "none.json")


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
