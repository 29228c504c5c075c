"""Monitors of a run with pools, against the facts that its strategy made up; and the exact loss of an update."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from statistics import mean
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from odb_libra_lightning.callbacks import StragglerMonitor, timing
from odb_libra_lightning.callbacks.libra_monitor import LibraTotals, facts_row, totals_over_ranks
from odb_libra_lightning.callbacks.totals import Totals
from odb_libra_lightning.libra.process_groups import RankLayout
from odb_libra_lightning.strategies.micro_batch_facts import MicroBatchFacts
from tests.callbacks.pool_runs import At, fit_packs, fit_pools, pool_facts, rank_seconds
from tests.launch import run_ranks

ACCUMULATION, INTERVAL = 2, 2


def updates_of(counted: list[Any]) -> list[list[int]]:
    """Micro-steps of each update: windows end with the epoch."""
    updates: list[list[int]] = []
    for epoch in sorted({epoch for epoch, _, _ in counted}):
        steps = [step for step, (own, _, _) in enumerate(counted) if own == epoch]
        updates += [steps[at : at + ACCUMULATION] for at in range(0, len(steps), ACCUMULATION)]
    return updates


def token_losses(ranks: list[Any]) -> list[float | None]:
    """The mean over all labels of each update, from what the modules counted; None where there are none."""
    losses: list[float | None] = []
    for steps in updates_of(ranks[0]["counted"]):
        labels = [rank["counted"][step] for rank in ranks for step in steps]
        count = sum(count for _, _, count in labels)
        losses.append(sum(loss for _, loss, _ in labels) / count if count else None)
    return losses


def check_token_losses(ranks: list[Any]) -> None:
    losses = token_losses(ranks)
    assert len(ranks[0]["rows"]) >= 2
    for rank in ranks:
        for update, row in rank["rows"]:
            logged = [loss for loss in losses[update - INTERVAL : update] if loss is not None]
            # callback_metrics are float32
            assert row["train/token_loss"] == pytest.approx(mean(logged), rel=2e-7)


@pytest.fixture(scope="module")
def pooled(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], str]:
    """Two pools, each of one replica of two workers; and what rank 0 printed."""
    folder = tmp_path_factory.mktemp("pooled")
    degrees = {"context_parallel": 2, "pool_size": 1}
    ranks = run_ranks(fit_pools, 4, folder, degrees=degrees, devices=4, accumulation=ACCUMULATION, interval=INTERVAL)
    return ranks, (folder / "rank0.log").read_text()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The same data on two ranks without pools."""
    folder = tmp_path_factory.mktemp("plain")
    return run_ranks(fit_pools, 2, folder, degrees=None, devices=2, accumulation=ACCUMULATION, interval=INTERVAL)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What one process logs on the packs of the runs with Libra."""
    (rows,) = run_ranks(fit_packs, 1, tmp_path_factory.mktemp("alone"), options=None, devices=1, accumulation=4)
    return rows


def test_balance_of_pools_is_that_of_the_facts(pooled: tuple[list[Any], str]) -> None:
    ranks, _ = pooled
    updates = updates_of(ranks[0]["counted"])
    for rank in ranks:
        assert [update for update, _ in rank["rows"]] == list(range(INTERVAL, len(updates) + 1, INTERVAL))
        for update, row in rank["rows"]:
            steps = [step for each in updates[update - INTERVAL : update] for step in each]
            pools = [[pool_facts(pool, step) for pool in range(2)] for step in steps]
            loads = [[load for load, _, _ in step] for step in pools]
            expected = {
                "libra/pool_imbalance": mean(max(step) / mean(step) - 1 for step in loads),
                "libra/tile_imbalance": mean(imbalance for step in pools for _, imbalance, _ in step),
                "libra/bytes_moved": sum(moved for step in pools for _, _, moved in step) / INTERVAL,
                "libra/plan_ms": 1000 * mean(rank_seconds(r, step)[0] for r in range(4) for step in steps),
            }
            assert {key: row[key] for key in expected} == pytest.approx(expected, rel=1e-6)
            waited = mean(sum(rank_seconds(r, step)[1] for step in steps) for r in range(4))
            assert 0 < waited / row["libra/plan_wait_fraction"] < max(each["wall_s"] for each in ranks)


def test_stragglers_are_told_by_kernel_time_over_all_and_in_each_pool(pooled: tuple[list[Any], str]) -> None:
    ranks, _ = pooled
    updates = updates_of(ranks[0]["counted"])
    for rank in ranks:
        for update, row in rank["rows"]:
            steps = [step for each in updates[update - INTERVAL : update] for step in each]
            times = {r: [rank_seconds(r, step)[2] for step in steps] for r in range(4)}

            def spread(members: list[int], times: dict[int, list[float]] = times) -> tuple[float, float]:
                longest = mean(max(own) for own in zip(*(times[r] for r in members), strict=True))
                return longest, longest / mean(seconds for r in members for seconds in times[r])

            longest, ratio = spread([0, 1, 2, 3])
            pools = [spread([0, 1]), spread([2, 3])]
            expected = {
                "straggler/max_s": longest,
                "straggler/mean_s": longest / ratio,
                "straggler/ratio": ratio,
                "straggler/pool_max_s": max(seconds for seconds, _ in pools),
                "straggler/pool_ratio": max(ratio for _, ratio in pools),
                "straggler/pools/0": pools[0][1],
                "straggler/pools/1": pools[1][1],
            }
            assert {key: value for key, value in row.items() if key.startswith("straggler/")} == pytest.approx(
                expected, rel=1e-6
            )


def test_the_summary_tells_the_balance_of_the_whole_run(pooled: tuple[list[Any], str]) -> None:
    ranks, output = pooled
    steps = range(len(ranks[0]["counted"]))
    loads = [[pool_facts(pool, step)[0] for pool in range(2)] for step in steps]
    busiest = mean(max(step) / mean(step) - 1 for step in loads)
    lines = [line for line in output.splitlines() if "attention work of the busiest pool" in line]
    assert len(lines) == 1
    assert f"{busiest:.2%} above the mean pool" in lines[0]
    assert "waiting for plans" in output


def test_without_pools_nothing_is_said_of_them(plain: list[Any]) -> None:
    for rank in plain:
        for _, row in rank["rows"]:
            assert not [key for key in row if key.startswith(("libra/", "straggler/pool"))]
            assert row["straggler/max_s"] > 0


def test_the_token_loss_is_the_mean_over_the_labels_of_an_update(
    pooled: tuple[list[Any], str], plain: list[Any]
) -> None:
    check_token_losses(plain)
    check_token_losses(pooled[0])
    steps = [pooled[0][rank]["counted"] for rank in range(4)]
    assert any(count == 0 for rank in steps for _, _, count in rank), "a rank without a label took part"


def test_the_token_loss_of_a_run_is_the_same_with_pools_and_without(
    pooled: tuple[list[Any], str], plain: list[Any]
) -> None:
    with_pools, without = ([row["train/token_loss"] for _, row in ranks[0]["rows"]] for ranks in (pooled[0], plain))
    assert with_pools == pytest.approx(without, rel=2e-7)
    assert with_pools[-1] < with_pools[0], "it is trained on"


def test_the_token_loss_counts_tokens_whatever_gradients_are_weighted_by(tmp_path: Path) -> None:
    arguments = {"degrees": None, "devices": 1, "accumulation": ACCUMULATION, "interval": INTERVAL}
    ranks = run_ranks(fit_pools, 1, tmp_path, **arguments, loss_scaling="none")
    check_token_losses(ranks)
    assert None in token_losses(ranks), "an update without a label is left out"


def test_pools_are_told_apart_whatever_their_number_and_size() -> None:
    random_numbers = random.Random(0)
    for num_pools, num_workers, steps in [(1, 1, 1), (1, 4, 3), (3, 2, 5), (5, 1, 2)]:
        pools = [[[random_numbers.uniform(1, 9) for _ in range(3)] for _ in range(steps)] for _ in range(num_pools)]
        times = [
            [[random_numbers.uniform(0, 1) for _ in range(2)] for _ in range(steps)]
            for _ in range(num_pools * num_workers)
        ]
        facts = [
            [[*pools[rank // num_workers][step], *times[rank][step]] for step in range(steps)]
            for rank in range(num_pools * num_workers)
        ]
        found = totals_over_ranks(
            torch.tensor(facts, dtype=torch.float64),
            torch.arange(1.0, len(facts) + 1, dtype=torch.float64),
            num_workers=num_workers,
        )
        loads = [[pool[step][0] for pool in pools] for step in range(steps)]
        assert vars(found) == pytest.approx(
            {
                "micro_steps": steps,
                "pool_imbalance": sum(max(step) / mean(step) - 1 for step in loads),
                "tile_imbalance": sum(mean(pool[step][1] for pool in pools) for step in range(steps)),
                "bytes_moved": sum(row[2] for pool in pools for row in pool),
                "planning_s": sum(mean(rank[step][0] for rank in times) for step in range(steps)),
                "waited_s": sum(mean(rank[step][1] for rank in times) for step in range(steps)),
                "elapsed_s": mean(range(1, len(facts) + 1)),
            }
        )
        twice = LibraTotals()
        twice.add(found)
        twice.add(found)
        once, both = found.figures(updates=1), twice.figures(updates=2)
        assert both == pytest.approx(once)
        assert once["libra/plan_wait_fraction"] == pytest.approx(found.waited_s / found.elapsed_s)


@pytest.mark.parametrize(
    ("options", "accumulation"),
    [({"context_parallel": 2, "block_size": 16}, 4), ({"pool_size": 2, "block_size": 16}, 2)],
    ids=["two workers", "two replicas"],
)
def test_a_run_with_libra_has_the_curve_of_a_plain_one(
    options: dict[str, int], accumulation: int, alone: list[Any], tmp_path: Path
) -> None:
    for rank in run_ranks(fit_packs, 2, tmp_path, options=options, devices=2, accumulation=accumulation):
        assert [update for update, _ in rank] == [update for update, _ in alone]
        for (_, row), (_, expected) in zip(rank, alone, strict=True):
            assert row["train/token_loss"] == pytest.approx(expected["train/token_loss"], rel=2e-7)
            assert row["libra/pool_imbalance"] == 0
            assert row["libra/tile_imbalance"] > 0
            assert row["libra/bytes_moved"] > 0
            assert row["straggler/max_s"] >= row["straggler/mean_s"] > 0
            assert row["straggler/pools/0"] == row["straggler/pool_ratio"] == row["straggler/ratio"]


@pytest.mark.parametrize("num_pools", [16, 17])
def test_pools_are_shown_one_by_one_where_they_are_few(num_pools: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = RankLayout(world_size=2 * num_pools, context_parallel=2, pool_size=1)
    trainer: Any = SimpleNamespace(strategy=SimpleNamespace(session=SimpleNamespace(layout=ranks)))
    # Rank `r` takes 1 + r of what this one takes.
    monkeypatch.setattr(timing, "gather", lambda _, own: torch.stack([own * (1 + r) for r in range(2 * num_pools)]))
    monitor = StragglerMonitor()
    monitor._kernels = [At.times(3.0), At.times(5.0)]
    info: Any = None
    values = monitor.summarize(trainer, Totals(), info, updates=1)
    own = {key: value for key, value in values.items() if key.startswith("straggler/pools/")}
    # Workers of pool k take (1 + 2k) and (2 + 2k).
    expected = {f"straggler/pools/{k}": (2 + 2 * k) / (1.5 + 2 * k) for k in range(num_pools)}
    assert own == (pytest.approx(expected) if num_pools == 16 else {})
    assert values["straggler/pool_ratio"] == pytest.approx(2 / 1.5)
    assert values["straggler/pool_max_s"] == pytest.approx(4.0 * 2 * num_pools)


def test_attention_without_tiles_has_no_balance_of_them() -> None:
    facts = MicroBatchFacts(
        micro_batch=0,
        pool_load=10,
        imbalance=None,
        bytes_moved=None,
        planning_s=0.25,
        waited_s=0.5,
        kernel=At.times(1.0),
    )
    rows = torch.tensor([[facts_row(facts)], [facts_row(replace(facts, pool_load=30))]], dtype=torch.float64)
    totals = totals_over_ranks(rows, torch.tensor([2.0, 2.0]), num_workers=1)
    assert totals.figures(updates=1) == {
        "libra/pool_imbalance": 0.5,
        "libra/plan_ms": 250.0,
        "libra/plan_wait_fraction": 0.25,
    }
    assert totals.rows(updates=1) == [
        ("attention work of the busiest pool", "50.00% above the mean pool"),
        ("waiting for plans", "25.0% of the time"),
    ]
    assert LibraTotals().rows(updates=1) == []
