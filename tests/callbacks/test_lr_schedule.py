"""Learning rates over epochs of unknown steps: against the factor at the samples of each batch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from odb_libra_lightning import ODBDataModule
from odb_libra_lightning.callbacks import SampleLRSchedule, batch_info
from odb_libra_lightning.odb.batch_info import BatchInfo
from odb_libra_lightning.odb.progress import lr_factor
from tests.launch import run_ranks
from tests.modules import BigramModel, quiet_trainer
from tests.samples import Documents, pad

LR = 0.1  # of BigramModel
SIZE = 36


class Rates(L.Callback):
    """The rate of the first parameter group at each batch, at each update, and after training."""

    def __init__(self) -> None:
        self.batches: list[float] = []
        self.updates: list[float] = []
        self.after = -1.0
        self.shares: list[float] = []
        self.dropped = 0
        self.infos: list[BatchInfo] = []

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        self.batches.append(trainer.optimizers[0].param_groups[0]["lr"])

    def on_before_optimizer_step(self, trainer: L.Trainer, module: Any, optimizer: torch.optim.Optimizer) -> None:
        self.updates.append(optimizer.param_groups[0]["lr"])

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        info = batch_info(trainer, batch_idx)
        self.shares.append(info.epoch + info.samples_done / info.samples_total)
        self.dropped = info.samples_dropped
        self.infos.append(info)

    def on_train_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.after = trainer.optimizers[0].param_groups[0]["lr"]


def data(**settings: Any) -> ODBDataModule:
    return ODBDataModule(
        Documents(SIZE), pad, **{"l_max": 700, "buffer_size": 32, "num_workers": 0, "seed": 3, **settings}
    )


def fit(
    schedule: SampleLRSchedule,
    *,
    module: L.LightningModule | None = None,
    loader: ODBDataModule | None = None,
    callbacks: Sequence[L.Callback] = (),
    resume: Path | None = None,
    **settings: Any,
) -> Rates:
    rates = Rates()
    trainer = quiet_trainer(**{"devices": 1, "callbacks": [schedule, rates, *callbacks], **settings})
    trainer.fit(module or BigramModel(), datamodule=loader or data(), ckpt_path=resume)
    return rates


def assert_rises_then_falls(rates: list[float], *, peak: float = LR) -> None:
    top = rates.index(max(rates))
    assert max(rates) <= peak
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)


def fit_two_ranks(accumulation: int) -> Any:
    shape = {"warmup": 0.2, "minimum": 0.1}
    rates = fit(
        SampleLRSchedule(warmup=0.2, minimum=0.1),
        devices=2,
        strategy="ddp",
        max_epochs=3,
        accumulate_grad_batches=accumulation,
    )
    expected = [lr_factor(share / 3, **shape) * LR for share in [0.0, *rates.shares]]
    return {"batches": rates.batches, "updates": rates.updates, "after": rates.after, "expected": expected}


@pytest.mark.parametrize("accumulation", [1, 3])
def test_ranks_have_the_rate_of_the_samples_done_by_all(tmp_path: Path, accumulation: int) -> None:
    first, second = run_ranks(fit_two_ranks, 2, tmp_path, accumulation=accumulation)
    assert first == second
    assert first["after"] == 0.1 * LR
    assert_rises_then_falls(first["updates"])
    assert len(first["updates"]) > 12 // accumulation
    if accumulation == 1:
        assert first["updates"] == first["expected"][:-1]
    else:
        assert set(first["updates"]) <= set(first["expected"])


@pytest.mark.parametrize("decay", ["cosine", "linear"])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_each_update_has_the_rate_of_the_samples_before_it(accumulation: int, decay: Any) -> None:
    rates = fit(
        SampleLRSchedule(warmup=0.15, decay=decay, minimum=0.05), max_epochs=3, accumulate_grad_batches=accumulation
    )
    per_epoch = len(rates.shares) // 3
    begins, epochs = [], [0, *(i + 1 for i, share in enumerate(rates.shares) if share == int(share))]
    for begin, end in itertools.pairwise(epochs):
        begins += list(range(begin, end, accumulation))  # of windows; the last of an epoch may be short
    done = [0.0, *rates.shares]
    expected = [LR * lr_factor(done[i] / 3, warmup=0.15, decay=decay, minimum=0.05) for i in begins]
    assert rates.updates == expected
    assert len(set(rates.batches)) == len(rates.updates), "the rate stays within a window"
    assert per_epoch > 10
    assert rates.after == LR * 0.05
    assert_rises_then_falls(rates.updates)


def test_a_stop_by_max_steps_ends_at_the_minimum_too() -> None:
    rates = fit(SampleLRSchedule(minimum=0.1), max_steps=17)
    assert len(rates.updates) == 17
    assert rates.updates == [pytest.approx(LR * lr_factor(step / 17, minimum=0.1)) for step in range(17)]
    assert rates.after == LR * 0.1
    first_to_end = fit(SampleLRSchedule(), max_steps=1_000, max_epochs=2)
    assert first_to_end.after == 0
    assert len(first_to_end.updates) < 100


def test_samples_dropped_after_the_last_step_count_as_done() -> None:
    # Unshuffled, the long documents come last: the epoch ends in a round that drops all it draws.
    class Rising(Documents):
        def length(self, index: int) -> int:
            return 10 + 3 * index

    loader = ODBDataModule(
        Rising(60), pad, l_max=100, buffer_size=4, num_workers=0, shuffle=False, oversize="drop", empty="drop"
    )
    rates = fit(SampleLRSchedule(minimum=0.1), loader=loader, max_epochs=2)
    assert rates.dropped < 29, "not all of them are known to be dropped at the last step"
    assert max(share % 1 for share in rates.shares) < 0.6
    half = len(rates.updates) // 2
    assert rates.updates[half] == LR * lr_factor(0.5, minimum=0.1), "the second epoch begins half-way"
    assert rates.after == LR * 0.1


def test_an_epoch_ends_at_limit_train_batches() -> None:
    rates = fit(SampleLRSchedule(), max_epochs=2, limit_train_batches=5)
    assert rates.updates == [pytest.approx(LR * lr_factor(step / 10)) for step in range(10)]
    assert rates.after == 0


def test_totals_of_samples_and_tokens() -> None:
    tokens = sum(Documents(SIZE).length(i) for i in range(SIZE))
    by_epochs = fit(SampleLRSchedule(decay="linear"), max_epochs=2)
    by_samples = fit(SampleLRSchedule(decay="linear", total_samples=2 * SIZE), max_epochs=3)
    both = len(by_epochs.updates)
    assert by_samples.updates[:both] == pytest.approx(by_epochs.updates)
    assert set(by_samples.updates[both:]) == {0.0}, "the total does not end training"
    by_tokens = fit(SampleLRSchedule(decay="linear", total_tokens=tokens), max_epochs=2)
    assert by_tokens.after == 0
    half = both // 2
    assert by_tokens.updates[half - 1] > 0
    assert by_tokens.updates[half:] == [0.0] * half


def checkpoints(folder: Path) -> list[L.Callback]:
    some = ModelCheckpoint(folder, filename="{step}", save_top_k=-1, every_n_train_steps=2)
    return [some, ModelCheckpoint(folder, filename="end{epoch}", save_top_k=-1, save_on_train_epoch_end=True)]


def expected_rates(infos: Sequence[BatchInfo], before: Sequence[BatchInfo], **limits: int) -> list[float]:
    """The rate of each update, from all that was trained on before its accumulation window."""

    def rate(done: Sequence[BatchInfo]) -> float:
        shares = {
            "epochs": done[-1].epoch + done[-1].samples_done / done[-1].samples_total if done else 0.0,
            "samples": sum(info.global_samples for info in done),
            "tokens": sum(info.global_tokens for info in done),
        }
        return LR * lr_factor(max(shares[name] / limit for name, limit in limits.items()), warmup=0.1)

    done, rates = list(before), []
    now = rate(done)
    for info in infos:
        done.append(info)
        if info.ends_window:
            rates.append(now)
            now = rate(done)
    return rates


@pytest.mark.parametrize(("accumulation", "by"), [(1, "epochs"), (3, "samples"), (3, "tokens"), (3, "epochs")])
def test_a_resumed_run_goes_on_from_what_the_broken_one_consumed(tmp_path: Path, accumulation: int, by: str) -> None:
    # What is left of an epoch is grouped anew, so the rates are the same as far as the batches are.
    limits = {"epochs": 2, **{"epochs": {}, "samples": {"samples": 50}, "tokens": {"tokens": 9_000}}[by]}
    shape = {f"total_{name}": limit for name, limit in limits.items() if name != "epochs"}

    def run(**more: Any) -> Rates:
        return fit(SampleLRSchedule(warmup=0.1, **shape), max_epochs=2, accumulate_grad_batches=accumulation, **more)

    whole = run(callbacks=checkpoints(tmp_path), enable_checkpointing=True)
    assert whole.updates == pytest.approx(expected_rates(whole.infos, [], **limits))
    ends = [number for number, info in enumerate(whole.infos, start=1) if info.ends_window]
    epoch_end = next(number for number, info in enumerate(whole.infos, start=1) if info.samples_done == SIZE)
    for name, batches in [("step=2", ends[1]), ("step=4", ends[3]), ("endepoch=0", epoch_end)]:
        resumed = run(resume=tmp_path / f"{name}.ckpt")
        before = whole.infos[:batches]
        assert sum(info.global_samples for info in [*before, *resumed.infos]) == 2 * SIZE
        assert resumed.updates == pytest.approx(expected_rates(resumed.infos, before, **limits)), name
        assert resumed.updates[0] == whole.updates[ends.index(batches) + 1]
        assert resumed.after == 0
    assert resumed.updates == whole.updates[-len(resumed.updates) :], "from an epoch's end the batches are the same"


def test_a_run_resumed_for_longer_follows_the_new_end(tmp_path: Path) -> None:
    fit(SampleLRSchedule(), callbacks=checkpoints(tmp_path), max_epochs=1, enable_checkpointing=True)
    resumed = fit(SampleLRSchedule(), resume=tmp_path / "endepoch=0.ckpt", max_epochs=2)
    assert resumed.updates[0] == LR * lr_factor(0.5), "not the rate at the end of the checkpoint"
    assert resumed.after == 0


def test_one_callback_serves_two_trainers() -> None:
    schedule = SampleLRSchedule(total_samples=2 * SIZE)
    assert fit(schedule, max_epochs=2).updates == fit(schedule, max_epochs=2).updates


def test_several_optimizers_groups_and_tensor_rates() -> None:
    class Manual(BigramModel):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(self.loss(batch["input_ids"], batch["labels"]))
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()

        def configure_optimizers(self) -> Any:
            embedding = torch.optim.SGD(self.embedding.parameters(), torch.tensor(0.4))
            head = torch.optim.SGD([{"params": [self.head.weight]}, {"params": [self.head.bias], "lr": 0.2}], lr=0.8)
            return [embedding, head]

    seen: list[list[float]] = []

    class Watch(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
            seen.append([float(group["lr"]) for optimizer in trainer.optimizers for group in optimizer.param_groups])

    rates = fit(SampleLRSchedule(minimum=0.5), module=Manual(), callbacks=[Watch()], max_epochs=2)
    for row, share in zip(seen, [0.0, *rates.shares], strict=False):
        factor = lr_factor(share / 2, minimum=0.5)
        assert row == pytest.approx([0.4 * factor, 0.8 * factor, 0.2 * factor])
    assert rates.after == pytest.approx(0.2)


def test_the_rate_that_is_logged_is_that_of_the_update(tmp_path: Path) -> None:
    monitor = LearningRateMonitor(logging_interval="step")
    rates = fit(SampleLRSchedule(), callbacks=[monitor], logger=CSVLogger(tmp_path), log_every_n_steps=1, max_epochs=1)
    assert monitor.lrs["lr-SGD"] == rates.updates


def test_a_module_with_a_scheduler_is_refused() -> None:
    class Scheduled(BigramModel):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), 0.1)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 10)]

    with pytest.raises(ValueError, match="has a learning rate scheduler, StepLR, and the callback SampleLRSchedule is"):
        fit(SampleLRSchedule(), module=Scheduled(), max_epochs=1)


def test_training_without_an_end_is_refused() -> None:
    with pytest.raises(ValueError, match="max_epochs=-1 and max_steps=-1: pass either to the Trainer, or"):
        fit(SampleLRSchedule(), max_epochs=-1)


def test_epochs_of_unknown_size_are_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("odb_libra_lightning.odb.loader.ODBLoader.samples_per_epoch", None)
    with pytest.raises(ValueError, match="nobody knows the size of an epoch of an iterable dataset: pass max_steps"):
        fit(SampleLRSchedule(), max_epochs=2)
    assert fit(SampleLRSchedule(), max_epochs=2, max_steps=10).after == 0
    assert fit(SampleLRSchedule(), max_epochs=2, limit_train_batches=5).after == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"warmup": 500}, "warmup is a share of training"),
        ({"decay": "cos"}, "decay must be one of"),
        ({"total_samples": 0}, "total_samples must be at least 1 or None, got 0"),
        ({"total_tokens": -5}, "total_tokens must be at least 1 or None, got -5"),
    ],
)
def test_arguments_that_cannot_work_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SampleLRSchedule(**arguments)
