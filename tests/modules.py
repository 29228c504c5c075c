"""Small LightningModules that tests share. They know nothing of this package."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch.nn import functional as F

VOCABULARY = 512


class BigramModel(L.LightningModule):
    """Predicts each token from the one before, in float64; plain SGD, so that gradients show in the weights.

    Attributes:
        seen: samples of each training batch (`Documents` puts the sample's number first).
        losses: local mean loss of each training batch.
        evaluated: samples of all validation batches.
    """

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(VOCABULARY, 8, dtype=torch.float64)
        self.head = torch.nn.Linear(8, VOCABULARY, dtype=torch.float64)
        self.lr = lr
        self.seen: list[list[int]] = []
        self.losses: list[float] = []
        self.evaluated: list[int] = []
        self.validations = 0

    def loss(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.embedding(input_ids))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch["input_ids"], batch["labels"])
        self.seen.append([int(row[0]) for row in batch["input_ids"]])
        self.losses.append(float(loss.detach()))
        self.log("train/loss", loss, batch_size=1)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.evaluated.extend(int(row[0]) for row in batch["input_ids"])

    def on_validation_end(self) -> None:
        self.validations += 1

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), self.lr)

    def weights(self) -> list[float]:
        """All parameters in one list."""
        return torch.cat([p.detach().flatten() for p in self.parameters()]).tolist()


def quiet_trainer(**settings: Any) -> L.Trainer:
    """A trainer on the CPU that writes nothing."""
    silent = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    return L.Trainer(**{**silent, **settings})
