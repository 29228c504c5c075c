"""Validation every so many samples, and which options of the trainer work with a loader without a length."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from odb_libra_lightning import ODBDataModule
from odb_libra_lightning.callbacks import (
    SampleProgressBar,
    SamplesPerUpdateMonitor,
    StepsPerEpochMonitor,
    ValidateEverySamples,
    batch_info,
)
from tests.launch import run_ranks
from tests.modules import BigramModel, quiet_trainer
from tests.samples import Documents, pad


class Record(L.Callback):
    """Samples trained on over all ranks at each batch, and at each validation."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.validations: list[int] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        before = self.batches[-1] if self.batches else 0
        self.batches.append(before + batch_info(trainer, batch_idx).global_samples)

    def on_validation_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.validations.append(self.batches[-1] if self.batches else 0)


def data(*, validate: bool = True, **settings: Any) -> ODBDataModule:
    settings = {"l_max": 700, "buffer_size": 16, "num_workers": 0, **settings}
    return ODBDataModule(Documents(30), pad, val_dataset=Documents(4) if validate else None, **settings)


def fit(
    *callbacks: L.Callback, validate: bool = True, resume: Path | None = None, **settings: Any
) -> tuple[L.Trainer, Record]:
    record = Record()
    trainer = quiet_trainer(**{"devices": 1, "callbacks": [*callbacks, record], **settings})
    trainer.fit(BigramModel(), datamodule=data(validate=validate), ckpt_path=resume)
    return trainer, record


def due(batches: Sequence[int], every: int) -> list[int]:
    """Where each multiple is reached first, by going through them all."""
    reached = []
    for multiple in range(every, batches[-1] + 1, every):
        reached.append(next(count for count in batches if count >= multiple))
    return sorted(set(reached))


def fit_two_ranks(every: int, accumulation: int) -> Any:
    _, record = fit(
        ValidateEverySamples(every), devices=2, strategy="ddp", max_epochs=3, accumulate_grad_batches=accumulation
    )
    return {"batches": record.batches, "validations": record.validations}


def test_all_ranks_validate_after_the_batch_that_reaches_the_next_multiple(tmp_path: Path) -> None:
    first, second = run_ranks(fit_two_ranks, 2, tmp_path, every=25, accumulation=2)
    assert first == second
    assert first["batches"][-1] == 90
    assert first["validations"] == due(first["batches"], 25)
    assert len(first["validations"]) == 3, "counted across epochs, and not at their ends"


def test_a_step_that_passes_several_multiples_validates_once() -> None:
    _, record = fit(ValidateEverySamples(1), max_epochs=1)
    assert record.validations == record.batches
    _, record = fit(ValidateEverySamples(3), max_epochs=2)
    assert record.validations == due(record.batches, 3)


def test_a_resumed_run_counts_on(tmp_path: Path) -> None:
    def run(resume: str | None = None) -> Record:
        steps = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, every_n_train_steps=10)
        validated = ModelCheckpoint(tmp_path, filename="val{step}", save_top_k=-1, save_on_train_epoch_end=False)
        _, record = fit(
            ValidateEverySamples(20),
            steps,
            validated,
            max_epochs=3,
            enable_checkpointing=True,
            resume=tmp_path / resume if resume else None,
        )
        return record

    whole = run()
    assert whole.validations == due(whole.batches, 20)
    saved = sorted(int(path.stem.removeprefix("valstep=")) for path in tmp_path.glob("val*.ckpt"))
    assert [whole.batches[step - 1] for step in saved] == whole.validations, "each validation saves"
    for name, step in [("step=10.ckpt", 10), (f"valstep={saved[1]}.ckpt", saved[1])]:
        done = whole.batches[step - 1]
        resumed = run(name)
        batches = [*whole.batches[:step], *(done + count for count in resumed.batches)]
        assert batches[-1] == 90
        assert [done + count for count in resumed.validations] == [v for v in due(batches, 20) if v > done]


def test_early_stopping_looks_at_each_validation() -> None:
    class Constant(BigramModel):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            super().validation_step(batch, batch_idx)
            self.log("val/loss", 1.0, batch_size=1)

    stop = EarlyStopping("val/loss", patience=1, check_on_train_epoch_end=False)
    record = Record()
    quiet_trainer(devices=1, max_epochs=5, callbacks=[ValidateEverySamples(10), stop, record]).fit(
        Constant(), datamodule=data()
    )
    assert len(record.validations) == 2
    assert record.batches[-1] == record.validations[-1] < 30


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"validate": False}, "has nothing to validate on: the module needs a validation_step, the datamodule"),
        ({"limit_val_batches": 0}, "limit_val_batches=0 must not be 0"),
        ({"val_check_interval": 5}, "val_check_interval=5 and check_val_every_n_epoch=1 are two intervals"),
        ({"check_val_every_n_epoch": 2}, "check_val_every_n_epoch=2 are two intervals: leave the trainer's"),
    ],
)
def test_settings_without_a_sense_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit(ValidateEverySamples(5), max_epochs=1, **settings)
    with pytest.raises(ValueError, match="samples must be at least 1, got 0"):
        ValidateEverySamples(0)


@cache
def steps_of_two_epochs() -> tuple[int, int]:
    """What nobody knows in advance."""
    loader = data().train_dataloader()
    first, second = (sum(1 for _ in loader) for _ in range(2))
    assert 12 <= first < 18
    assert 12 <= second < 18
    return first, second


# What docs/schedules.md says of the trainer's options. Two epochs of `a` and `b` batches: how many are trained on, and
# after which the trainer validates.
WORKS: dict[str, tuple[dict[str, Any], Callable[[int, int], tuple[int, list[int]]]]] = {
    "max_epochs": ({}, lambda a, b: (a + b, [a, a + b])),
    "max_steps": ({"max_epochs": -1, "max_steps": 20}, lambda a, b: (20, [a])),
    "min_steps is no maximum": ({"min_steps": 100}, lambda a, b: (a + b, [a, a + b])),
    "limit_train_batches": ({"limit_train_batches": 5}, lambda a, b: (10, [5, 10])),
    "overfit_batches": ({"overfit_batches": 3}, lambda a, b: (6, [3, 6])),
    "a limit beyond the epoch loses the validation": ({"limit_train_batches": 30}, lambda a, b: (a + b, [])),
    "val_check_interval": ({"val_check_interval": 6}, lambda a, b: (a + b, [6, 12, a + 6, a + 12])),
    "val_check_interval across epochs": (
        {"val_check_interval": 6, "check_val_every_n_epoch": None},
        lambda a, b: (a + b, list(range(6, a + b + 1, 6))),
    ),
    "check_val_every_n_epoch": ({"check_val_every_n_epoch": 2}, lambda a, b: (a + b, [a + b])),
    "num_sanity_val_steps": ({"num_sanity_val_steps": 1}, lambda a, b: (a + b, [0, a, a + b])),
    "fast_dev_run": ({"fast_dev_run": 3}, lambda a, b: (3, [3])),
    "fast_dev_run with the callback": (
        {"fast_dev_run": 3, "callbacks": [ValidateEverySamples(1)]},
        lambda a, b: (3, [3]),
    ),
}


@pytest.mark.parametrize("options", WORKS)
def test_an_option_works(options: str) -> None:
    settings, expected = WORKS[options]
    batches, validated = expected(*steps_of_two_epochs())
    callbacks = settings.get("callbacks", [])
    rest = {name: value for name, value in settings.items() if name != "callbacks"}
    trainer, record = fit(*callbacks, **{"max_epochs": 2, **rest})
    assert len(record.batches) == trainer.global_step == batches
    assert [record.batches.index(count) + 1 if count else 0 for count in record.validations] == validated


def test_a_stop_waits_for_min_epochs_and_min_steps() -> None:
    class Stop(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            trainer.should_stop = True

    assert fit(Stop(), max_epochs=3)[0].global_step == 1
    assert fit(Stop(), max_epochs=3, min_epochs=1)[0].global_step == steps_of_two_epochs()[0]
    assert 5 <= fit(Stop(), max_epochs=3, min_steps=5)[0].global_step <= steps_of_two_epochs()[0]


def test_validation_by_time_does_not_need_a_length() -> None:
    class Hurry(L.Callback):
        def on_train_start(self, trainer: L.Trainer, *args: Any) -> None:
            trainer._val_check_time_interval = 0.0  # no waiting in a test

    trainer, record = fit(Hurry(), max_epochs=1, val_check_interval="00:01:00:00")
    assert record.validations == record.batches
    assert len(record.batches) == trainer.global_step


def test_log_every_n_steps_counts_updates() -> None:
    every = steps_of_two_epochs()[0]
    trainer, _ = fit(SamplesPerUpdateMonitor(), max_epochs=1, log_every_n_steps=every)
    assert float(trainer.callback_metrics["odb/samples_per_update"]) == pytest.approx(30 / every)


def test_the_steps_of_an_epoch_are_estimated_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    rows: list[dict[str, float]] = []

    class Log(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            rows.append({key: float(value) for key, value in trainer.callback_metrics.items()})

    fit(
        *[StepsPerEpochMonitor(), Log(), SampleProgressBar()],
        max_epochs=1,
        log_every_n_steps=1,
        enable_progress_bar=True,
    )
    steps = len(rows)
    assert "odb/steps_per_epoch" not in rows[0], "one step shows no spread"
    assert (rows[-1]["odb/steps_per_epoch"], rows[-1]["odb/steps_per_epoch_error"]) == (steps, 0)
    errors = [row["odb/steps_per_epoch_error"] for row in rows[1:]]
    assert max(errors[len(errors) // 2 :]) < max(errors[: len(errors) // 2])
    output = capsys.readouterr().out
    assert "steps=1/~" in output
    assert f"steps={steps}/{steps}," in output


def test_a_limit_beyond_the_epoch_loses_the_last_short_window() -> None:
    first = steps_of_two_epochs()[0]
    assert first % 4, "the last window is short"
    assert fit(max_epochs=1, accumulate_grad_batches=4)[0].global_step == first // 4 + 1
    assert fit(max_epochs=1, accumulate_grad_batches=4, limit_train_batches=30)[0].global_step == first // 4


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"limit_train_batches": 0.5}, MisconfigurationException, r"must be `1.0` or an int"),
        ({"val_check_interval": 0.5}, MisconfigurationException, r"must be time based, `1.0` or an int"),
        ({"overfit_batches": 0.5}, MisconfigurationException, r"must be `1.0` or an int"),
    ],
    ids=str,
)
def test_an_option_that_needs_a_length_is_refused_by_the_trainer(
    settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        fit(max_epochs=1, **settings)


@pytest.mark.parametrize(
    ("settings", "expected"), [({"max_epochs": -1}, math.inf), ({"max_epochs": 2}, -1), ({"max_steps": 7}, 7)], ids=str
)
def test_the_trainer_s_own_estimate_is_its_max_steps(settings: dict[str, Any], expected: float) -> None:
    class Ask(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
            assert trainer.estimated_stepping_batches == expected
            trainer.should_stop = True

    trainer, _ = fit(Ask(), **settings)
    assert trainer.global_step == 1
