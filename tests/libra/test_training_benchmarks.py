"""The benchmarks of trainings with Libra run, and their figures keep to what must be true of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.libra.test_attention_benchmarks import run

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]


def test_dry_run_of_the_training_benchmark() -> None:
    found = json.loads(run("libra_training", "--dry-run", "--json"))
    rows = {row["method"]: row for row in found["methods"]}
    assert list(rows) == ["none", "ulysses", "libra", "libra-4"]
    for row in rows.values():
        assert 1 <= row["straggler_mean"] <= row["straggler_worst"] <= 4
        assert len(row["kernel_s_per_process"]) == row["data_parallel"] * row["context_parallel"] == 4
        assert 0 < row["slowest_s_mean"] <= row["slowest_s_worst"] <= row["slowest_s_total"]
        assert 0 < row["predicted_s_mean"] <= row["predicted_s_worst"]
        assert 0 <= row["plan_wait_share"] < 1
        assert row["step_s_worst"] >= row["step_s_mean"] > 0


def test_dry_run_of_the_loss_overlay(tmp_path: Path) -> None:
    found = json.loads(run("libra_loss_overlay", "--dry-run", "--assets", str(tmp_path)))
    assert found["float64_largest_difference"] < 1e-8
    assert found["bf16_gap_largest"] < 0.1 * found["loss_first"]
    kept = json.loads((tmp_path / "libra_loss.json").read_text())
    assert {len(curve) for strategy in kept["curves"]["bf16"].values() for curve in strategy.values()} == {4}
    assert (tmp_path / "libra_loss.svg").read_text().startswith("<?xml")
