"""Checkpoints of sharded runs with Libra: a run goes on from them with other degrees."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.launch import run_ranks
from tests.strategies.dense_decoder import largest_gap, train_alone
from tests.strategies.libra_runs import Case, as_arguments, windows_of
from tests.strategies.test_libra_checkpoints import CHECKPOINT, EPOCHS, PACKS, fit_all

pytest.importorskip("deepspeed")

SINGLE = {"dtype": "float32"}
FSDP = Case(flavour="fsdp2", dp=1, cp=2, accumulate=4, count=PACKS, epochs=EPOCHS)
SAVED = [
    replace(FSDP, options={"save_distributed_checkpoint": True}),
    replace(FSDP, options={"save_distributed_checkpoint": False}),
    replace(FSDP, flavour="zero2", decoder=SINGLE),
    replace(FSDP, flavour="zero3", decoder=SINGLE),
]


def save_and_resume(saved: dict[str, Any], resumed: dict[str, Any], folder: str) -> list[Any]:
    return [*fit_all([saved], folder), *fit_all([resumed], folder, f"{folder}/{CHECKPOINT}")]


@pytest.mark.parametrize(
    "case", [SAVED[0], *(pytest.param(case, marks=pytest.mark.full) for case in SAVED[1:])], ids=str
)
def test_a_sharded_run_goes_on_with_other_degrees(case: Case, tmp_path: Path) -> None:
    resumed = replace(case, dp=2, cp=1, pool=2, accumulate=2)
    arguments = dict(zip(("saved", "resumed"), as_arguments([case, resumed]), strict=True))
    ranks = run_ranks(save_and_resume, 2, tmp_path, **arguments, folder=str(tmp_path / "checkpoints"), timeout=150)
    windows = windows_of(case, [rank[0] for rank in ranks], case.make_packs())
    expected = train_alone(windows, packs_a_window=4, **case.decoder)
    tolerance = 1e-10 if case.flavour == "fsdp2" else 5e-6
    for rank in ranks:
        assert [len(run["packs"]) for run in rank] == [EPOCHS, EPOCHS - 1]
        for run in rank:
            assert largest_gap(run["weights"], expected.weights) < tolerance
