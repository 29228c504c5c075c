"""A `training_step` that returns a dict, with an auxiliary term in its loss: all of that loss is weighted."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch

from odb_libra_lightning import ODBDataModule
from odb_libra_lightning.callbacks.loader_access import batch_info
from tests.modules import quiet_trainer

COUNTS = (3, 1)  # labels of the two batches, which are one window


class OneSampleBatches:
    def __len__(self) -> int:
        return len(COUNTS)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {
            "input_ids": torch.zeros(5, dtype=torch.long),
            "labels": torch.arange(5).where(torch.arange(5) < COUNTS[index], torch.tensor(-100)),
        }


class Auxiliary(L.LightningModule):
    """The gradient of `main` is the mean of the main loss, that of `auxiliary` of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.auxiliary = (torch.nn.Parameter(torch.ones((), dtype=torch.float64)) for _ in range(2))
        self.weights: list[float] = []
        self.gradients: list[tuple[float, float]] = []
        self.logged: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, torch.Tensor]:
        count = int((batch["labels"] != -100).sum())
        self.weights.append(batch_info(self.trainer, batch_idx).loss_weight)
        auxiliary = 10.0 * count * self.auxiliary
        self.log("auxiliary", auxiliary, on_step=True, batch_size=1)
        return {"loss": float(count) * self.main + auxiliary, "auxiliary": auxiliary}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.logged.append(float(self.trainer.callback_metrics["auxiliary"]))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert self.main.grad is not None
        assert self.auxiliary.grad is not None
        self.gradients.append((float(self.main.grad), float(self.auxiliary.grad)))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.0)


def test_all_of_the_returned_loss_is_weighted_and_no_logged_value() -> None:
    module = Auxiliary()
    data = ODBDataModule(OneSampleBatches(), l_max=5, num_workers=0, causal_shift=False, shuffle=False)
    trainer = quiet_trainer(devices=1, max_epochs=1, accumulate_grad_batches=2)
    trainer.fit(module, datamodule=data)
    assert sorted(module.weights) == [0.5, 1.5]
    # The batch of 3 labels has the losses 3 and 30, the other 1 and 10: (3 * 3 + 1 * 1) / 4, and no plain mean.
    assert module.gradients == [(pytest.approx(2.5), pytest.approx(25.0))]
    assert sorted(module.logged) == [10.0, 30.0]
