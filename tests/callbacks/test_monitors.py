"""What the monitors log, against figures counted from the batches themselves."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from odb_libra_lightning import ODBDataModule, ODBLoader
from odb_libra_lightning.callbacks import (
    DataWaitMonitor,
    PaddingMonitor,
    RunSummary,
    SampleProgressBar,
    SamplesPerUpdateMonitor,
    StragglerMonitor,
    monitoring,
)
from odb_libra_lightning.callbacks.loader_access import batch_info
from odb_libra_lightning.callbacks.totals import Totals
from tests.launch import run_ranks
from tests.modules import BigramModel, quiet_trainer
from tests.samples import Documents, pad

KEYS = {
    "odb/padding_ratio",
    "odb/samples_per_update",
    "odb/tokens_per_update",
    "odb/data_wait_fraction",
    "odb/zero_weight_steps",
    "odb/round_ms",
    "odb/round_bytes",
    "straggler/max_s",
    "straggler/mean_s",
    "straggler/ratio",
    "train/token_loss",
    "progress/samples",
    "progress/tokens",
}


class Count(BigramModel):
    """Counts its own batches, and takes `delay` seconds longer on rank 1."""

    def __init__(self, delay: float = 0.0) -> None:
        super().__init__()
        self.delay = delay
        self.batches: list[tuple[int, int, int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_rank == 1:
            time.sleep(self.delay)
        ids = batch["input_ids"]
        self.batches.append((len(ids), int((batch["labels"] != -100).sum()), ids.numel()))
        return super().training_step(batch, batch_idx)


class Logged(L.Callback):
    """What reached the trainer after each update."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.rows.append({key: float(value) for key, value in trainer.callback_metrics.items()})


def fit_monitored(delay: float, accumulation: int, interval: int) -> Any:
    module, logged = Count(delay), Logged()
    data = ODBDataModule(Documents(60), pad, l_max=700, num_workers=1)
    quiet_trainer(
        devices=2,
        strategy="ddp",
        max_epochs=2,
        accumulate_grad_batches=accumulation,
        log_every_n_steps=interval,
        callbacks=[*monitoring(progress_bar=False), logged],
    ).fit(module, datamodule=data)
    return {"batches": module.batches, "rows": logged.rows}


def test_figures_are_those_of_all_ranks_over_the_interval(tmp_path: Path) -> None:
    accumulation, interval = 2, 3
    ranks = run_ranks(fit_monitored, 2, tmp_path, delay=0.05, accumulation=accumulation, interval=interval)
    batches = list(zip(ranks[0]["batches"], ranks[1]["batches"], strict=True))
    number = accumulation * interval - 1
    assert number < len(batches) // 2, "the first interval lies within the first epoch"
    first = [batch for step in batches[: number + 1] for batch in step]
    samples, tokens, padded = (sum(column) for column in zip(*first, strict=True))
    for rank in ranks:
        row = rank["rows"][number]
        assert set(row) >= KEYS
        assert row["odb/padding_ratio"] == pytest.approx(1 - tokens / padded)
        assert row["odb/samples_per_update"] == pytest.approx(samples / interval)
        assert row["odb/tokens_per_update"] == pytest.approx(tokens / interval)
        assert row["odb/zero_weight_steps"] == 0
        assert row["progress/samples"] == samples
        assert row["progress/tokens"] == tokens
        assert 0 <= row["odb/data_wait_fraction"] <= 1
        assert row["odb/round_ms"] > 0
        assert row["odb/round_bytes"] > 0
        assert row["straggler/max_s"] >= 0.05
        assert row["straggler/ratio"] == pytest.approx(row["straggler/max_s"] / row["straggler/mean_s"])
        assert row["straggler/mean_s"] >= 0.025
    earlier = ranks[0]["rows"][number - 1]
    assert not KEYS & set(earlier), "nothing is logged before the interval is full"
    assert ranks[0]["rows"][-1]["progress/samples"] > 60, "the second epoch counts on"


@pytest.mark.parametrize(
    "monitor", [PaddingMonitor, SamplesPerUpdateMonitor, DataWaitMonitor, StragglerMonitor], ids=lambda m: m.__name__
)
def test_each_monitor_works_alone(monitor: Any) -> None:
    logged = Logged()
    quiet_trainer(devices=1, max_epochs=1, log_every_n_steps=1, callbacks=[monitor(), logged]).fit(
        BigramModel(), datamodule=ODBDataModule(Documents(20), pad, l_max=500, num_workers=0)
    )
    assert {"progress/samples", "progress/tokens"} < set(logged.rows[-1])
    assert logged.rows[-1]["progress/samples"] == 20


def test_consumed_tokens_survive_a_checkpoint() -> None:
    monitor = PaddingMonitor()
    quiet_trainer(devices=1, max_epochs=1, callbacks=[monitor]).fit(
        BigramModel(), datamodule=ODBDataModule(Documents(20), pad, l_max=500, num_workers=0)
    )
    resumed = PaddingMonitor()
    resumed.load_state_dict(monitor.state_dict())
    assert resumed.state_dict() == {"samples": 20, "tokens": sum(Documents(20).length(i) for i in range(20))}


def test_the_wait_is_a_share_of_the_loader_s_own_times() -> None:
    loader = ODBLoader(Documents(30), pad, l_max=500, num_workers=0)
    totals, infos = Totals(), []
    for _ in loader:
        infos.append(loader.info)
        totals.add(loader.info)
    assert infos[0].elapsed_s == infos[0].wait_s > 0
    assert all(info.elapsed_s >= info.wait_s for info in infos)
    waited, elapsed = sum(i.wait_s for i in infos), sum(i.elapsed_s for i in infos)
    values = DataWaitMonitor().summarize(quiet_trainer(devices=1), totals, infos[-1], updates=len(infos))
    assert values == {"odb/data_wait_fraction": pytest.approx(waited / elapsed, rel=1e-5)}


def test_the_bar_counts_samples_of_a_known_total(capsys: pytest.CaptureFixture[str]) -> None:
    totals: list[tuple[int, int]] = []

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, index: int) -> None:
            bar = trainer.progress_bar_callback
            assert isinstance(bar, SampleProgressBar)
            totals.append((bar.train_progress_bar.n, int(bar.train_progress_bar.total)))
            assert bar.train_progress_bar.n == batch_info(trainer, index).samples_done

    trainer = quiet_trainer(devices=1, max_epochs=2, enable_progress_bar=True, callbacks=[SampleProgressBar(), Watch()])
    trainer.fit(BigramModel(), datamodule=ODBDataModule(Documents(25), pad, l_max=500, num_workers=0))
    assert {total for _, total in totals} == {25}
    assert [done for done, _ in totals].count(25) == 2
    output = capsys.readouterr().out
    assert "25/25" in output
    assert "tokens/s=" in output
    assert "padding=" in output


def test_the_bar_lives_with_validation_and_its_sanity_check(capsys: pytest.CaptureFixture[str]) -> None:
    module = BigramModel()
    trainer = quiet_trainer(
        devices=1, max_epochs=2, enable_progress_bar=True, num_sanity_val_steps=2, callbacks=monitoring()
    )
    data = ODBDataModule(Documents(25), pad, l_max=500, num_workers=0, val_dataset=Documents(20))
    trainer.fit(module, datamodule=data)
    assert len(module.evaluated) == 16 + 2 * 20
    assert "25/25" in capsys.readouterr().out


def test_the_summary_compares_with_fixed_batches_of_the_same_mean_size(capsys: pytest.CaptureFixture[str]) -> None:
    lengths = [Documents(40).length(i) for i in range(40)]
    quiet_trainer(devices=1, max_epochs=1, callbacks=[RunSummary()]).fit(
        BigramModel(), datamodule=ODBDataModule(Documents(40), pad, l_max=800, num_workers=0)
    )
    output = capsys.readouterr().out
    assert "Training summary" in output
    assert f"{sum(lengths):,}" in output
    assert "padding ratio of fixed batches of" in output
    assert "Dashboard" not in output, "there is no logger, so nothing to show"
