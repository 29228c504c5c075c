"""The latency model against clocks that tick and sums done by hand."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from odb_libra_lightning.libra.latency import exchange_seconds, kernel_seconds, pipeline_seconds
from tests.libra.slow_clusters import SLOW_KERNEL, SLOW_LINKS


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
