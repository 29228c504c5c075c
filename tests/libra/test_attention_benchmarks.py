"""The benchmarks of attention run, and their figures keep to what must be true of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from odb_libra_lightning.libra.calibration import Calibration

ROOT = Path(__file__).resolve().parents[2]


def run(name: str, *options: str) -> str:
    """Standard output of a benchmark of this tree."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, f"benchmarks/{name}.py", *options]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def cases(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import libra_attention

    return libra_attention.CASES


def test_every_case_trains_on_the_documents_of_the_step(cases: Any) -> None:
    step = [[50, 14], [64], [1] * 64, [40, 24], [30, 34], [64], [8] * 8, [60, 4]]
    documents = sorted(length for sequence in step for length in sequence)
    for case in cases:
        steps = case.micro_steps(step)
        assert {len(sequences) for sequences in steps} == {case.replicas}, case
        assert sorted(length for sequences in steps for one in sequences for length in one) == documents, case
        if case.name != "wlb":  # which alone packs documents anew
            assert sorted(one for sequences in steps for one in sequences) == sorted(step), case


def test_pairs_are_those_of_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from attention_measures import visible_pairs

    from odb_libra_lightning.libra.segments import Segments

    segments = Segments(query_lengths=(3, 1, 5), key_lengths=(7, 1, 5))
    for window in (None, 1, 2, 6, 9):
        seen = [
            0 <= own - key < (window or 9)
            for queries, keys in ((3, 7), (1, 1), (5, 5))
            for own in range(keys - queries, keys)
            for key in range(keys)
        ]
        assert visible_pairs(segments, causal=True, window=window) == sum(seen)
    assert visible_pairs(segments, causal=False, window=None) == 3 * 7 + 1 + 5 * 5


@pytest.mark.full
def test_dry_run_of_the_straggler_benchmark() -> None:
    found = json.loads(run("libra_attention", "--dry-run", "--json"))
    assert len(found["errors"]) == len(found["cases"])
    assert max(found["errors"].values()) < 1e-5
    for row in found["cases"]:
        assert 1 <= row["straggler_mean"] <= row["straggler_worst"] <= 4
        assert 1 <= row["counted_mean"] <= row["counted_worst"] <= 4
        assert row["kernel_max_s"] >= row["kernel_mean_s"] > 0
        assert row["sent_most"] >= row["sent_mean"] >= 0
        alone = row["context_parallel"] == 1 and row["pool_size"] is None
        assert (row["sent_mean"] == 0) == alone


@pytest.mark.full
def test_dry_run_of_the_overlap_benchmark(tmp_path: Path) -> None:
    trace, picture = tmp_path / "trace.json", tmp_path / "overlap.svg"
    times = ("--compute", "1", "--transfer", "1", "--repeat", "1")
    shown = run("libra_overlap", *times, "--trace", str(trace), "--picture", str(picture))
    assert "compute 1 ms, transfer 1 ms each way; median of 1" in shown
    names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    for chunks in (1, 4):
        assert {f"{chunks} chunks, worker 0: {part}" for part in ("out", "compute", "home")} <= names
    assert picture.read_text().startswith("<svg ")
    assert "compute 0 ms" in run("libra_overlap", "--compute", "0", "--transfer", "0", "--repeat", "1")


@pytest.mark.full
def test_dry_run_of_the_gpu_benchmark(tmp_path: Path) -> None:
    report, calibration = tmp_path / "report.json", tmp_path / "calibration.json"
    shown = run("gpu_attention", "--device", "cpu", "--json", str(report), "--calibration", str(calibration))
    sections = json.loads(report.read_text())["sections"]
    for name in ("kernels", "equality", "executor", "remember"):
        assert sections[name]["error"] is None
        assert sections[name]["rows"], name
        assert f"{name}: " in shown
    assert all(row["close"] for row in sections["equality"]["rows"])
    keep, refetch = sections["remember"]["rows"]
    assert keep["held"] > refetch["held"] > 0
    speed = Calibration.from_json(calibration)
    assert max(max(row) for row in speed.efficiency) <= 1
    assert "cpu" in speed.source
