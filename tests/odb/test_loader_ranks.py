"""The loader over two real ranks."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from odb_libra_lightning import ODBLoader
from odb_libra_lightning.odb.errors import ODBError
from tests.launch import run_ranks, start_ranks
from tests.odb.broken import FAULTS, broken_loader
from tests.samples import Documents, identities, pad


def init_group() -> int:
    dist.init_process_group("gloo")
    return dist.get_rank()


def leave_group() -> None:
    dist.destroy_process_group()


def train_two_epochs(start_method: str | None, workers: int, persistent: bool) -> Any:
    init_group()
    loader = ODBLoader(
        Documents(151),
        pad,
        l_max=1000,
        num_workers=workers,
        start_method=start_method,
        persistent_workers=persistent,
        buffer_size=30,
    )
    epochs = []
    for _ in range(2):
        epochs.append([[identities(batch) if loader.info.indices else [], loader.info.loss_weight] for batch in loader])
    loader.close()
    leave_group()
    return epochs


@pytest.mark.parametrize(
    ("start_method", "workers", "persistent"),
    [("fork", 2, False), ("fork", 1, True), ("spawn", 1, True), (None, 0, False)],
)
def test_two_ranks_share_the_samples_and_keep_step(
    start_method: str | None, workers: int, persistent: bool, tmp_path: Path
) -> None:
    ranks = run_ranks(train_two_epochs, 2, tmp_path, start_method=start_method, workers=workers, persistent=persistent)
    orders = []
    for epoch in range(2):
        steps = [rank[epoch] for rank in ranks]
        assert len(steps[0]) == len(steps[1])
        counts = Counter(i for rank in steps for batch, _ in rank for i in batch)
        assert set(counts) == set(range(151))
        assert counts.total() == 152
        for batches in zip(*steps, strict=True):
            assert sum(weight for _, weight in batches) == pytest.approx(2.0)
        orders.append(steps)
    assert orders[0] != orders[1]


def break_after_one_batch_then_train() -> Any:
    init_group()
    loader = ODBLoader(Documents(100), pad, l_max=500, num_workers=1, persistent_workers=True)
    for _ in loader:
        break
    seen = [i for batch in loader for i in identities(batch)]
    loader.close()
    leave_group()
    return seen


def test_two_ranks_can_leave_a_pass_and_begin_another(tmp_path: Path) -> None:
    ranks = run_ranks(break_after_one_batch_then_train, 2, tmp_path)
    assert Counter(i for rank in ranks for i in rank) == Counter(range(100))


def meet_faults(workers: int) -> Any:
    init_group()
    met = []
    for how, settings, _ in FAULTS:
        # Only rank 1's share of an unshuffled dataset holds the bad sample, and not at its beginning.
        loader = broken_loader(how, num_workers=workers, shuffle=False, buffer_size=10, **settings)
        steps = 0
        try:
            for _ in loader:
                steps += 1
        except ODBError as error:
            met.append({"error": str(error), "steps": steps})
    leave_group()
    return met


@pytest.mark.parametrize("workers", [0, 1])
def test_a_fault_on_one_rank_stops_both_at_the_same_step_with_its_text(workers: int, tmp_path: Path) -> None:
    ranks = run_ranks(meet_faults, 2, tmp_path, timeout=60, workers=workers)
    for (_, _, says), zero, one in zip(FAULTS, *ranks, strict=True):
        assert zero["error"] == one["error"]
        assert zero["steps"] == one["steps"] > 0
        assert re.match(f"rank 1: {says}", zero["error"])


def pause_longer_than_the_timeout() -> Any:
    rank = init_group()
    loader = ODBLoader(Documents(300), pad, l_max=400, num_workers=1, buffer_size=80, prefetch_batches=1, timeout=3)
    seen = []
    for number, batch in enumerate(loader):
        seen.extend(identities(batch))
        if number == 6:
            time.sleep(8)  # as in a long validation, on all ranks alike
        if number == 12 and rank == 0:
            time.sleep(5)  # as in a checkpoint that one rank writes
        dist.barrier()  # as training does
    leave_group()
    return seen


@pytest.mark.full
def test_training_may_pause_longer_than_the_timeout(tmp_path: Path) -> None:
    ranks = run_ranks(pause_longer_than_the_timeout, 2, tmp_path)
    assert Counter(i for rank in ranks for i in rank) == Counter(range(300))


def disagree() -> Any:
    rank = init_group()
    errors = []
    for settings in ({"shuffle": rank == 0}, {"loss_scaling": ["token", "sample"][rank]}, {"l_max": 400 + rank}):
        loader = ODBLoader(Documents(30), pad, **{"l_max": 400, "num_workers": 0, **settings})
        try:
            list(loader)
        except ODBError as error:
            errors.append(str(error))
    leave_group()
    return errors


def test_settings_that_differ_between_ranks_are_refused(tmp_path: Path) -> None:
    expected = [
        "shuffle must be the same on every rank, got [1, 0] (by rank)",
        "loss_scaling must be the same on every rank, got ['token', 'sample'] (by rank)",
        "l_max must be the same on every rank, got [400, 401] (by rank)",
    ]
    assert run_ranks(disagree, 2, tmp_path) == [expected, expected]


def iterate_without_a_group() -> None:
    list(ODBLoader(Documents(10), pad, num_workers=0))


def test_ranks_without_a_process_group_are_refused_and_not_each_alone(tmp_path: Path) -> None:
    for end in start_ranks(iterate_without_a_group, 2, tmp_path):
        assert end.code == 1
        assert "WORLD_SIZE is 2 but there is no process group" in end.output


def die_on_rank_one() -> Any:
    if init_group() == 1:
        os._exit(3)
    return None


def test_a_rank_that_dies_fails_the_run(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"rank 1 ended with 3"):
        run_ranks(die_on_rank_one, 2, tmp_path)


def lose_a_worker() -> Any:
    init_group()
    # Killed while both trainers are busy with batches that were ready before.
    loader = broken_loader("dies", num_workers=1, shuffle=False, buffer_size=10, prefetch_batches=1)
    steps = 0
    try:
        for _ in loader:
            steps += 1
            time.sleep(0.2)
    except ODBError as error:
        leave_group()
        return {"error": str(error).splitlines()[0], "steps": steps}
    return None


def test_a_worker_that_is_killed_stops_both_ranks_at_the_same_step(tmp_path: Path) -> None:
    zero, one = run_ranks(lose_a_worker, 2, tmp_path, timeout=60)
    assert zero == one
    assert re.match("rank 1: DataLoader worker .*exited unexpectedly", zero["error"])
    assert zero["steps"] > 0
