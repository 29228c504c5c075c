from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import wandb
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from wandb.proto.wandb_internal_pb2 import Record

from odb_libra_lightning import ODBDataModule
from odb_libra_lightning.callbacks import monitoring
from odb_libra_lightning.callbacks.panels import DashboardPanels, custom_scalars_layout
from tests.modules import BigramModel, quiet_trainer
from tests.samples import Documents, pad

KEYS = [
    "odb/padding_ratio",
    "odb/samples_per_update",
    "odb/tokens_per_update",
    "odb/steps_per_epoch",
    "odb/data_wait_fraction",
    "odb/zero_weight_steps",
    "odb/round_ms",
    "odb/round_bytes",
    "straggler/max_s",
    "straggler/mean_s",
    "straggler/ratio",
    "straggler/pool_max_s",
    "straggler/pool_ratio",
    "straggler/pools/",
    "libra/pool_imbalance",
    "libra/tile_imbalance",
    "libra/bytes_moved",
    "libra/plan_ms",
    "libra/plan_wait_fraction",
    "train/loss",
    "train/token_loss",
]
POOLS = "straggler/pools/"


class LogEachStep(L.Callback):
    """Log as the monitors do (one call with its x axis), and then a loss alone, as a module may."""

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        step = trainer.global_step
        for logger in trainer.loggers:
            logger.log_metrics({"odb/padding_ratio": 0.25, "progress/samples": 8 * step}, step=step)
            logger.log_metrics({"train/loss": 1.0 / step}, step=step)


def fit(tmp_path: Path, *loggers: Logger, steps: int = 3) -> None:
    trainer = L.Trainer(
        default_root_dir=tmp_path,
        accelerator="cpu",
        max_steps=steps,
        limit_val_batches=0,
        logger=list(loggers),
        callbacks=[DashboardPanels(), LogEachStep()],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(BoringModel())


def wandb_records(path: Path) -> Iterator[Record]:
    """Read the log of an offline run: LevelDB's log format after a header of 7 bytes."""
    log, position, record = path.read_bytes(), 7, b""
    while position + 7 <= len(log):
        if 32_768 - position % 32_768 < 7:  # too little left in this block for another header
            position += 32_768 - position % 32_768
            continue
        _checksum, length, kind = struct.unpack_from("<IHB", log, position)
        record += log[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last piece of one
            yield Record.FromString(record)
            record = b""


def test_every_logged_key_has_one_chart_in_a_fixed_order() -> None:
    layout = custom_scalars_layout()

    assert list(layout) == ["Batching", "Waiting", "Stragglers", "Libra", "Training"]
    charts = [chart for category in layout.values() for chart in category.values()]
    assert charts == [["Multiline", [key]] for key in KEYS]


def test_tensorboard_run_holds_the_layout(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, name="run", version="0")

    fit(tmp_path, logger)

    events = EventAccumulator(logger.log_dir).Reload()
    (event,) = events.Tensors("custom_scalars__config__")
    layout = Layout.FromString(event.tensor_proto.string_val[0])
    assert [list(chart.multiline.tag) for group in layout.category for chart in group.chart] == [[key] for key in KEYS]
    assert [scalar.step for scalar in events.Scalars("odb/padding_ratio")] == [1, 2, 3]


def test_wandb_draws_every_key_over_samples_whatever_lightning_defined_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = WandbLogger(save_dir=tmp_path, offline=True)

    fit(tmp_path, logger)
    wandb.finish()

    (log,) = tmp_path.rglob("*.wandb")
    records = list(wandb_records(log))
    metrics = [record.metric for record in records if record.WhichOneof("record_type") == "metric"]
    names = [key for key in KEYS if key != POOLS] + [f"{POOLS}{pool}" for pool in range(16)]
    assert {m.name: m.step_metric for m in metrics if m.step_metric and m.name} == dict.fromkeys(
        names, "progress/samples"
    )
    # Lightning's `*` is still the only glob: a second one would compete with it.
    assert [m.glob_name for m in metrics if m.glob_name] == ["*"]
    # W&B itself puts the x axis beside a loss that was logged without it.
    rows = [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]
    assert [row["progress/samples"] for row in rows if "train/loss" in row] == [8, 16, 24]
    assert [row["progress/samples"] for row in rows if "odb/padding_ratio" in row] == [8, 16, 24]


def test_other_loggers_are_left_alone(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)

    fit(tmp_path, logger, steps=1)

    header = Path(logger.experiment.metrics_file_path).read_text().splitlines()[0]
    assert set(header.split(",")) == {"odb/padding_ratio", "progress/samples", "step", "train/loss"}


def test_only_rank_zero_registers(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    trainer: Any = SimpleNamespace(is_global_zero=False, loggers=[logger])

    DashboardPanels().on_fit_start(trainer, BoringModel())

    assert list(tmp_path.iterdir()) == []


def test_a_resumed_run_goes_on_in_one_wandb_run_over_one_axis(tmp_path: Path) -> None:
    def run(folder: str, ckpt: Path | None) -> Path:
        logger = WandbLogger(save_dir=tmp_path / folder, mode="offline", id="onerun", resume="allow")
        checkpoint = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, every_n_train_steps=3)
        callbacks = [*monitoring(progress_bar=False), checkpoint]
        trainer = quiet_trainer(
            max_epochs=1, logger=logger, log_every_n_steps=1, enable_checkpointing=True, callbacks=callbacks
        )
        data = ODBDataModule(Documents(40), pad, l_max=900, num_workers=0, buffer_size=16)
        trainer.fit(BigramModel(), datamodule=data, ckpt_path=ckpt)
        wandb.finish()
        (path,) = (tmp_path / folder).glob("wandb/offline-run-*/run-onerun.wandb")
        return path

    first, second = (
        [
            float(item.value_json)
            for record in wandb_records(path)
            for item in record.history.item
            if (item.key or "/".join(item.nested_key)) == "progress/samples"
        ]
        for path in (run("first", None), run("second", tmp_path / "step=3.ckpt"))
    )
    assert first[-1] == second[-1] == 40
    assert second == sorted(second)
    assert second[0] > first[2], "it goes on where the checkpoint was written"
