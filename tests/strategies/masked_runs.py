"""Training on partly masked documents under any strategy, recorded so that one process can replay it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn import functional as F
from torch.utils.data import Subset

from odb_libra_lightning import ODBDataModule
from tests.callbacks.test_loss_scaling import Masked, Recorder
from tests.modules import BigramModel, quiet_trainer
from tests.samples import pad

SIZE = 45  # of which two or four ranks repeat a few
EVEN_SIZE = 46
WINDOWS = (1, 3)


class NothingToLearn(Masked):
    """No label bears loss: the module's own mean is 0/0 in every batch."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        sample = super().__getitem__(index)
        return {**sample, "labels": torch.full_like(sample["labels"], -100)}


def token_mean(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean loss of the next token, masked by hand: of no label it is 0/0, and so is its gradient.

    The gradient of PyTorch's own `ignore_index` is 0 there.
    """
    targets = labels[:, 1:].flatten()
    losses = F.cross_entropy(logits[:, :-1].flatten(0, 1), targets.clamp(min=0), reduction="none")
    bears_loss = targets != -100
    return (losses * bears_loss).sum() / bears_loss.sum()


def fit_recorded(
    module: BigramModel, dataset: Any, *, data: dict[str, Any] | None = None, resume: str | None = None, **trainer: Any
) -> dict[str, Any]:
    """Train, and tell which samples made each batch, its weight, and the number of updates."""
    recorder = Recorder()
    settings = {"l_max": 150, "num_workers": 0, "buffer_size": 16, **(data or {})}
    callbacks = [recorder, *trainer.pop("callbacks", [])]
    fitted = quiet_trainer(**{"max_epochs": 2, **trainer, "callbacks": callbacks})
    fitted.fit(module, datamodule=ODBDataModule(dataset, pad, **settings), ckpt_path=resume)
    return {
        "indices": recorder.indices,
        "loss_weights": recorder.weights,
        "updates": fitted.global_step,
        "weights": module.weights(),
    }


def fit_all(fit: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """Every training that a strategy is held to: `fit(dataset, **options)` trains under it."""
    masked = Masked(SIZE, longest=60)
    uneven = Subset(Masked(EVEN_SIZE, longest=60), uneven_order())
    without_pacing = {"shuffle": False, "pacing": False, "buffer_size": 5}
    return {
        "masked": [fit(masked, accumulate_grad_batches=window) for window in WINDOWS],
        "uneven": [fit(uneven, accumulate_grad_batches=window, data=without_pacing) for window in WINDOWS],
        "nothing": fit(NothingToLearn(12), accumulate_grad_batches=2),
    }


def uneven_order() -> list[int]:
    """Short and long documents in turn: drawn in this order, one of two ranks gets the short ones."""
    dataset, half = Masked(EVEN_SIZE, longest=60), EVEN_SIZE // 2
    by_length = sorted(range(EVEN_SIZE), key=dataset.length)
    return [i for pair in zip(by_length[:half], by_length[half:], strict=True) for i in pair]


def in_original_numbers(ranks: list[Any]) -> list[Any]:
    """The record of a run in `uneven_order`, in the numbers of the whole dataset."""
    order = uneven_order()
    return [{**rank, "indices": [[order[i] for i in step] for step in rank["indices"]]} for rank in ranks]


def fit_and_resume(fit: Callable[..., dict[str, Any]], folder: str) -> dict[str, Any]:
    """Three epochs, and the last two of them again from the checkpoint of the first one's end."""

    def options() -> dict[str, Any]:
        ends = ModelCheckpoint(folder, filename="end{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
        return {
            "max_epochs": 3,
            "enable_checkpointing": True,
            "accumulate_grad_batches": 2,
            "callbacks": [ends],
            "momentum": 0.5,
        }

    masked = Masked(SIZE, longest=60)
    whole = fit(masked, **options())
    return {"whole": whole, "resumed": fit(masked, **options(), resume=f"{folder}/endepoch=0.ckpt")}
