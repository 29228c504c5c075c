"""What of a loss is weighted: all that `training_step` returns, or what it weighs itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from odb_libra_lightning import ODBDataModule
from odb_libra_lightning.callbacks import TokenLossScaling, ZeroWeightSteps, batch_info
from tests.launch import run_ranks
from tests.modules import quiet_trainer

TOKENS = [1, 3, 2, 6]
MAIN = [4.0, 1.0, 5.0, 2.0]
AUXILIARY = [1.0, 2.0, 3.0, 4.0]


class Given:
    """Samples with so many labels, and given values of a main and an auxiliary loss."""

    def __len__(self) -> int:
        return len(TOKENS)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        values = torch.tensor([MAIN[index], AUXILIARY[index]], dtype=torch.float64)
        return {"input_ids": torch.arange(1), "labels": torch.ones(TOKENS[index]), "values": values}


def first(samples: list[Any]) -> Any:
    return {name: value[None] for name, value in samples[0].items()}


class TwoLosses(L.LightningModule):
    """The gradients of its two parameters are the data-parallel main loss and the auxiliary one."""

    def __init__(self, *, weighs: bool) -> None:
        super().__init__()
        self.scales = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.weighs = weighs
        self.gradients: list[list[float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, torch.Tensor]:
        main, auxiliary = (self.scales * batch["values"][0]).unbind()
        if self.weighs:
            main = main * batch_info(self.trainer, batch_idx).loss_weight
        return {"loss": main + auxiliary, "auxiliary": auxiliary.detach()}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert self.scales.grad is not None
        self.gradients.append(self.scales.grad.tolist())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.0)


def fit_both() -> Any:
    results = []
    for weighs, callback in ((False, TokenLossScaling()), (True, ZeroWeightSteps())):
        module = TwoLosses(weighs=weighs)
        trainer = quiet_trainer(
            devices=2, strategy="ddp", max_epochs=1, accumulate_grad_batches=2, callbacks=[callback]
        )
        data = ODBDataModule(Given(), first, l_max=1, num_workers=0, shuffle=False, causal_shift=False)
        trainer.fit(module, datamodule=data)
        results.append(module.gradients)
    return results


def test_all_that_is_returned_is_weighted_or_what_the_module_weighs(tmp_path: Path) -> None:
    def mean_by_tokens(values: list[float]) -> float:
        return sum(n * v for n, v in zip(TOKENS, values, strict=True)) / sum(TOKENS)

    for all_weighted, own in run_ranks(fit_both, 2, tmp_path):
        assert all_weighted == [pytest.approx([mean_by_tokens(MAIN), mean_by_tokens(AUXILIARY)])]
        assert own == [pytest.approx([mean_by_tokens(MAIN), sum(AUXILIARY) / 4])]


class TwoPasses(TwoLosses):
    """Goes backward twice through the same loss."""

    def __init__(self) -> None:
        super().__init__(weighs=False)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = (self.scales * batch["values"][0]).sum()
        self.manual_backward(loss, retain_graph=True)
        self.manual_backward(loss)
        assert self.scales.grad is not None
        self.gradients.append((self.scales.grad / batch["values"][0]).tolist())
        self.scales.grad = None


def test_a_second_backward_pass_is_weighted_once() -> None:
    module = TwoPasses()
    data = ODBDataModule(Given(), first, l_max=1, num_workers=0, causal_shift=False, loss_scaling="sample")
    weights: list[float] = []

    class Doubles(TokenLossScaling):
        def _factor(self, info: Any) -> float:
            weights.append(3.0)
            return 3.0

    quiet_trainer(max_epochs=1, callbacks=[Doubles()]).fit(module, datamodule=data)
    assert len(weights) == 8
    assert module.gradients == [[6.0, 6.0]] * 4
