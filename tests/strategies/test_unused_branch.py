"""A model of two branches, on batches of which some have no image: a rank's gradients are then fewer than another's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import torch

from odb_libra_lightning import ODBDataModule
from odb_libra_lightning.callbacks.loader_access import batch_info
from odb_libra_lightning.strategies.ddp_reduction import check_reduction_finished
from tests.callbacks.test_loss_scaling import largest_difference
from tests.launch import run_ranks, start_ranks
from tests.modules import quiet_trainer

LR, SIZE = 0.1, 24


class Captions:
    """Every second sample has an image, so that of two ranks only the second sees any, without shuffling."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        sample = {"tokens": torch.randn(2 + index % 5, 4, generator=generator, dtype=torch.float64)}
        if index % 2:
            sample["image"] = torch.randn(4, generator=generator, dtype=torch.float64)
        return sample


def length(sample: dict[str, torch.Tensor]) -> int:
    return len(sample["tokens"])


def token_count(batch: list[dict[str, torch.Tensor]]) -> int:
    return sum(length(sample) for sample in batch)


class TwoBranches(L.LightningModule):
    """Mean over tokens of a token's score; an image is added to its sample's tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.text = torch.nn.Linear(4, 4, dtype=torch.float64)
        self.vision = torch.nn.Linear(4, 4, dtype=torch.float64)
        self.indices: list[list[int]] = []

    def forward(self, batch: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        scores = []
        for sample in batch:
            hidden = self.text(sample["tokens"])
            if "image" in sample:
                hidden = hidden + self.vision(sample["image"])
            scores.append(hidden.tanh().pow(2).mean(dim=1))
        return torch.cat(scores).mean()

    def training_step(self, batch: list[dict[str, torch.Tensor]], batch_idx: int) -> torch.Tensor:
        self.indices.append(list(batch_info(self.trainer, batch_idx).indices))
        loss: torch.Tensor = self(batch)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), LR)

    def weights(self) -> list[float]:
        return torch.cat([p.detach().flatten() for p in self.parameters()]).tolist()


class ChecksReduction(L.Callback):
    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        check_reduction_finished(trainer.strategy)


def fit(strategy: str) -> Any:
    module = TwoBranches()
    data = ODBDataModule(
        Captions(), list, l_max=12, num_workers=0, shuffle=False, length_fn=length, loss_tokens=token_count
    )
    quiet_trainer(devices=2, strategy=strategy, max_epochs=2, callbacks=[ChecksReduction()]).fit(
        module, datamodule=data
    )
    return {"indices": module.indices, "weights": module.weights()}


def test_unused_parameters_may_differ_between_ranks(tmp_path: Path) -> None:
    ranks = run_ranks(fit, 2, tmp_path, strategy="ddp_find_unused_parameters_true")
    images = [[any(i % 2 for i in step) for step in rank["indices"]] for rank in ranks]
    assert not any(images[0])
    assert all(images[1])
    module, dataset = TwoBranches(), Captions()
    optimizer = module.configure_optimizers()
    for step in zip(*(rank["indices"] for rank in ranks), strict=True):
        optimizer.zero_grad()
        module([dataset[i] for rank in step for i in rank]).backward()
        optimizer.step()
    for rank in ranks:
        assert largest_difference(rank["weights"], module.weights()) < 1e-10


def test_plain_ddp_ends_in_an_error_that_names_the_remedy(tmp_path: Path) -> None:
    text_only, with_images = start_ranks(fit, 2, tmp_path, timeout=60, strategy="ddp")
    assert text_only.code == 1
    assert "strategy='ddp_find_unused_parameters_true'" in text_only.output
    assert with_images.code == 1, "it sees that the other rank is gone"
