"""The benchmark of Libra's planning runs, and its figures keep to what must be true of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_dry_run_measures_and_draws(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/libra_planning.py", "--dry-run", "--json", "--pictures", str(tmp_path)]
    found = json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)

    placed = [row for row in found["placement"] if row["above_floor"] is not None]
    assert {"vrsp", "vrsp + refine", "wlb"} <= {row["method"] for row in placed}
    assert all(row["worst"] >= row["mean"] >= 0 and row["above_floor"] >= 0 for row in placed)

    assert found["time"]
    assert all(row["workers"] == 2 * row["pool_size"] for row in found["time"])

    planned = [row for row in found["exchange"] if row["floor"] is not None]
    assert all(row["total"] >= row["worst_busiest"] >= row["busiest"] >= row["floor"] for row in planned)
    assert {row["total_ratio"] for row in planned if row["variant"] == "Algorithm 2 to the letter"} == {1}

    drawn = sorted(path.name for path in tmp_path.iterdir())
    assert drawn == sorted(f"{picture['name']}.svg" for picture in found["pictures"])
    assert len(drawn) == 4
    assert all(path.stat().st_size < 150_000 for path in tmp_path.iterdir())
