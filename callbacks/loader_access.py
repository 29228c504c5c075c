"""How callbacks find the loader that a trainer trains on, and the facts about its current batch."""

from __future__ import annotations

from functools import partial

import lightning as L

from odb_libra_lightning.callbacks.trainer_clock import epochs_done, trainer_clock
from odb_libra_lightning.odb.batch_info import BatchInfo
from odb_libra_lightning.odb.training_loader import TrainingLoader


def training_loader(trainer: L.Trainer) -> TrainingLoader:
    """The trainer's loader, which must be one of this package.

    Raises:
        RuntimeError: if it trains on a loader of another kind.
    """
    loader = trainer.train_dataloader
    if not isinstance(loader, TrainingLoader):
        raise RuntimeError(
            "the callbacks of odb_libra_lightning need a loader of this package, and the trainer has a "
            f"{type(loader).__name__}: train with ODBDataModule, ODBDataModule.wrap(your_datamodule, l_max=...) or "
            "PackedDataModule, or remove the callbacks"
        )
    return loader


def follow_trainer(loader: TrainingLoader, trainer: L.Trainer) -> None:
    """Have a loader count as a trainer does, and be told by it which batches have been trained on."""
    loader.follow(trainer, partial(trainer_clock, trainer), epoch=epochs_done(trainer))


def batch_info(trainer: L.Trainer, batch_idx: int) -> BatchInfo:
    """Facts about the batch that the trainer is at; it has drawn later ones already.

    Raises:
        RuntimeError: if the loader counts otherwise than the trainer.
    """
    loader = training_loader(trainer)
    try:
        return loader.info_at(batch_idx)
    except LookupError as error:
        raise RuntimeError(
            f"the trainer is at batch {batch_idx} of its epoch, and the loader has given out others ({error}). It was "
            "not told where training goes on: the checkpoint has no state of the loader. Resume from one that was "
            "written with it, or from a checkpoint of an epoch's end"
        ) from error
