"""A value that is logged per sample has the mean over the samples, whatever the shares of the ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from odb_libra_lightning import ODBDataModule
from tests.launch import run_ranks
from tests.modules import BigramModel, quiet_trainer
from tests.samples import Documents, pad


class Logs(BigramModel):
    """Logs the mean of the samples' numbers, of each batch."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self._log("train/number", batch)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._log("val/number", batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._log("test/number", batch)

    def _log(self, name: str, batch: Any) -> None:
        numbers = batch["input_ids"][:, 0].double()
        self.log(name, numbers.mean(), on_step=False, on_epoch=True, sync_dist=True, batch_size=len(numbers))


def fit_and_test(sizes: list[int]) -> list[dict[str, float]]:
    results = []
    for size in sizes:
        data = ODBDataModule(
            Documents(40), pad, l_max=900, val_dataset=Documents(size), test_dataset=Documents(size), num_workers=0
        )
        trainer = quiet_trainer(devices=2, strategy="ddp", max_epochs=2)
        trainer.fit(Logs(), datamodule=data)
        found = {name: float(value) for name, value in trainer.callback_metrics.items()}
        trainer.test(Logs(), datamodule=data, verbose=False)
        results.append({**found, "test/number": float(trainer.callback_metrics["test/number"])})
    return results


def test_the_mean_of_an_epoch_is_that_of_its_samples(tmp_path: Path) -> None:
    sizes = [3, 33]
    for rank in run_ranks(fit_and_test, 2, tmp_path, sizes=sizes):
        for size, means in zip(sizes, rank, strict=True):
            assert means["val/number"] == pytest.approx((size - 1) / 2)
            assert means["test/number"] == pytest.approx((size - 1) / 2)
            assert means["train/number"] == pytest.approx(39 / 2)
