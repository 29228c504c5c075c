"""The planner thread: plans in order and ahead, errors where they belong, and a thread that always ends."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from odb_libra_lightning.libra.layout import PoolLayout
from odb_libra_lightning.libra.planner import Planner
from odb_libra_lightning.libra.pool_plan import layout_plan
from odb_libra_lightning.libra.worker_plan import plan_worker
from tests.launch import REPOSITORY

LAYOUT = PoolLayout(
    context_parallel=2,
    block_size=8,
    head_shards=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    bytes_per_element=2,
    chunks=2,
)
FIRST = [[32], [8, 8, 8, 8]]
SECOND = [[16, 16], [4] * 8]
POOLS = [FIRST, SECOND, [[30, 2], [1, 31]]]
BAD = [[32], [0, 32]]


def planner_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "odb-libra-planner"]


def comes_true(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return condition()


def planned_for(lengths: list[list[int]]) -> str:
    return layout_plan(lengths, LAYOUT).hash


@given(st.lists(st.sampled_from(POOLS), max_size=6), st.integers(1, 3), st.integers(0, 3), st.booleans())
def test_plans_come_in_order(pools: list[list[list[int]]], depth: int, worker: int, fed: bool) -> None:
    with Planner(LAYOUT, worker, lengths=None if fed else iter(pools), depth=depth) as planner:
        for number, lengths in enumerate(pools):
            if fed:
                planner.feed(lengths)
            batch = planner.next_plan(lengths)
            assert (batch.micro_batch, batch.plan.worker) == (number, worker)
            assert batch.plan.plan.hash == planned_for(lengths)
            assert np.array_equal(batch.plan.work.home, plan_worker(batch.plan.plan, worker).home)
        with pytest.raises(RuntimeError, match=f"micro-batch {len(pools)}: (its|the) lengths"):
            planner.next_plan()
    assert not planner_threads()


def test_no_more_than_depth_are_made_ahead() -> None:
    asked, ahead = 0, []

    def lengths() -> Iterator[list[list[int]]]:
        for number in range(20):
            ahead.append(number + 1 - asked)
            yield [[32 - number, number] if number else [32], [32]]

    with Planner(LAYOUT, 0, lengths=lengths(), depth=3) as planner:
        assert comes_true(lambda: len(ahead) == 3)
        for _ in range(20):
            asked += 1
            planner.next_plan()
    assert len(ahead) == 20
    assert max(ahead) == 3


def test_equal_lengths_share_a_plan_and_cost_nothing() -> None:
    with Planner(LAYOUT, 0, lengths=[FIRST, FIRST, SECOND, FIRST]) as planner:
        batches = [planner.next_plan() for _ in range(4)]
    assert batches[0].plan is batches[1].plan
    assert len({id(batch.plan) for batch in batches}) == 3
    assert [batch.planning_s > 0 for batch in batches] == [True, False, True, True]
    assert planner.planning_s == pytest.approx(sum(batch.planning_s for batch in batches))


def test_what_the_caller_waits_is_counted() -> None:
    with Planner(LAYOUT, 0, lengths=[FIRST, SECOND]) as planner:
        begin = time.perf_counter()
        batches = [planner.next_plan() for _ in range(2)]
        elapsed = time.perf_counter() - begin
    # How long each wait was is the machine's affair, but together they were inside this.
    assert all(batch.waited_s >= 0 for batch in batches)
    assert planner.waited_s == batches[0].waited_s + batches[1].waited_s <= elapsed


def test_indices_are_on_the_device_when_the_plan_comes() -> None:
    cpu = torch.device("cpu")
    with Planner(LAYOUT, 0, lengths=[FIRST], device=cpu) as planner:
        plan = planner.next_plan().plan
    assert list(plan._indices) == [cpu]
    assert list(plan.segments._on_device) == [cpu]


def test_an_error_comes_at_its_plan_with_its_traceback() -> None:
    with Planner(LAYOUT, 0, lengths=[FIRST, BAD, SECOND], depth=3) as planner:
        assert comes_true(lambda: not planner_threads())
        assert planner.next_plan().micro_batch == 0
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"micro-batch 1: no plan, ValueError: .*length") as caught:
                planner.next_plan()
        cause = caught.value.__cause__
        assert isinstance(cause, ValueError)
        assert "layout_plan" in "".join(traceback.format_exception(cause))


def test_an_error_of_the_lengths_comes_at_their_plan() -> None:
    def lengths() -> Iterator[list[list[int]]]:
        yield FIRST
        raise OSError("the length cache is gone")

    with Planner(LAYOUT, 0, lengths=lengths()) as planner:
        planner.next_plan()
        with pytest.raises(RuntimeError, match="micro-batch 1: no plan, OSError: the length cache is gone"):
            planner.next_plan()
    assert not planner_threads()


def test_a_worker_that_the_pool_lacks_is_refused_at_the_first_plan() -> None:
    with Planner(LAYOUT, 4, lengths=[FIRST]) as planner, pytest.raises(RuntimeError, match="worker=4: the pool has 4"):
        planner.next_plan()


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ([[32]], "micro-batch 0 .*: 1 packed sequences, planned 2"),
        (
            [[32], [8, 8, 16]],
            "packed sequence 1 differs from document 2 on, it has 3 documents of 32 tokens",
        ),
        ([[32, 1], [8, 8, 8, 8]], "packed sequence 0 differs from document 1 on, it has 2 documents of 33 tokens"),
    ],
)
def test_a_plan_for_other_lengths_is_refused_and_stays_the_next(asked: list[list[int]], message: str) -> None:
    with Planner(LAYOUT, 0, lengths=[FIRST]) as planner:
        with pytest.raises(ValueError, match=message):
            planner.next_plan(asked)
        lengths = [np.array(sequence) for sequence in FIRST]
        assert planner.next_plan(lengths).plan.plan.hash == planned_for(FIRST)  # type: ignore[arg-type]


def test_feeding_has_a_bound_and_needs_a_planner_without_lengths() -> None:
    with Planner(LAYOUT, 0, depth=2) as planner:
        with pytest.raises(RuntimeError, match="micro-batch 0: its lengths have not been fed"):
            planner.next_plan()
        planner.feed(FIRST)
        planner.feed(SECOND)
        with pytest.raises(RuntimeError, match="feed no more than depth=2 ahead"):
            planner.feed(FIRST)
        planner.next_plan()
        planner.feed(FIRST)
    with Planner(LAYOUT, 0, lengths=[]) as planner, pytest.raises(RuntimeError, match="make one without"):
        planner.feed(FIRST)


def test_a_closed_planner_says_so() -> None:
    planner = Planner(LAYOUT, 0)
    planner.close()
    planner.close()
    for call in (planner.next_plan, lambda: planner.feed(FIRST)):
        with pytest.raises(RuntimeError, match="closed"):
            call()


@pytest.mark.parametrize("depth", [0, -1, 1.5, True])
def test_a_depth_below_one_is_refused(depth: int) -> None:
    with pytest.raises(ValueError, match="depth="):
        Planner(LAYOUT, 0, depth=depth)


@pytest.mark.parametrize("lengths", [None, [], [FIRST], [FIRST, SECOND] * 5, [BAD]])
@pytest.mark.parametrize("end", ["close", "with", "raise", "garbage", "cycle"])
def test_no_thread_outlives_its_planner(lengths: list[list[list[int]]] | None, end: str) -> None:
    planner = Planner(LAYOUT, 0, lengths=lengths)
    if end == "close":
        planner.close()
    elif end == "with":
        with planner:
            pass
    elif end == "raise":
        with pytest.raises(KeyError), planner:
            raise KeyError
    elif end == "cycle":
        planner.itself = planner  # type: ignore[attr-defined]
    del planner
    gc.collect()
    assert not planner_threads()


ENDS = """
import os
from tests.libra.test_planner import *
planner = Planner(LAYOUT, 0, lengths=[FIRST, SECOND] * 5)
planner.next_plan()
"""
FORKS = """
child = os.fork()
if child == 0:
    planner.close()
    del planner
else:
    assert os.waitpid(child, 0)[1] == 0
    planner.next_plan()
"""


@pytest.mark.parametrize(
    "script", [pytest.param(ENDS, marks=pytest.mark.full, id="ends"), pytest.param(ENDS + FORKS, id="forks")]
)
def test_an_open_planner_does_not_hold_up_the_end_of_a_process(script: str) -> None:
    ended = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, timeout=60, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_list_that_was_fed_may_be_used_again() -> None:
    lengths = [[16], [9, 7]]
    with Planner(LAYOUT, 0, depth=2) as planner:
        planner.feed(lengths)
        lengths[1][:] = [4, 12]
        planner.feed(lengths)
        plans = [planner.next_plan().plan.plan for _ in range(2)]
    assert [plan.hash for plan in plans] == [layout_plan([[16], tail], LAYOUT).hash for tail in ([9, 7], [4, 12])]
