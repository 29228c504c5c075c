"""The quickstart from the command line: what it prints, writes and leaves."""

from __future__ import annotations

import math
import re

import pytest
from omegaconf import OmegaConf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from odb_libra_lightning.callbacks.panels import PANELS
from tests.cli.conftest import Training

pytestmark = pytest.mark.timeout(240)


def test_it_trains_on_two_processes_and_sums_up(quickstart: Training) -> None:
    assert quickstart.code == 0, quickstart.output
    assert "All distributed processes registered. Starting with 2 processes" in quickstart.output
    lines = re.split(r"[\r\n]+", quickstart.output)
    bars = [line for line in lines if line.startswith("Epoch 0:") and "/48 [" in line]
    assert any("48/48" in bar and "tokens/s=" in bar and "padding=" in bar for bar in bars)
    summary = dict(re.findall(r"│ ([^│]+?) +│ ([^│]+?) +│", quickstart.output))
    assert summary["samples"] == "48"
    fixed = next(float(value[:-1]) for key, value in summary.items() if key.startswith("padding ratio of fixed"))
    assert float(summary["padding ratio"][:-1]) < fixed
    assert float(summary["samples per update"]) > 1
    assert re.search(r"Dashboard: \S*odb-libra dashboard \S+", quickstart.output)
    assert quickstart.left_nothing, "a process of the run is still there"


def test_every_panel_of_the_dashboard_has_finite_data_with_samples_beside_it(quickstart: Training) -> None:
    events = EventAccumulator(str(quickstart.folder / "tensorboard"))
    events.Reload()
    losses = [event.value for event in events.Scalars("train/loss")]
    assert losses[-1] < losses[0]
    for category, charts in PANELS.items():
        for key in charts.values():
            if category == "Libra" or key.startswith("straggler/pool"):
                assert key not in events.Tags()["scalars"]  # there are no pools
                continue
            values = [event.value for event in events.Scalars(key)]
            # Of the number of steps there is no estimate before the second.
            assert len(values) == len(losses) - (key == "odb/steps_per_epoch"), key
            assert all(math.isfinite(value) and value >= 0 for value in values), key
    samples = [event.value for event in events.Scalars("progress/samples")]
    assert samples == sorted(samples)
    assert samples[-1] == 48
    per_update = [event.value for event in events.Scalars("odb/samples_per_update")]
    assert sum(per_update) == 48


def test_the_recipe_is_kept_and_can_run_again_and_wandb_wrote_offline(quickstart: Training) -> None:
    kept = OmegaConf.load(quickstart.folder / "config.yaml")
    assert kept.data.l_max == 512
    assert kept.data.train_dataset.limit == 48
    assert list((quickstart.folder / "wandb").glob("offline-run-*/run-*.wandb"))
