"""How callbacks find the loader that a trainer trains on, and the facts about its current batch."""

from __future__ import annotations

import lightning as L

from odb_libra_lightning.odb.batch_info import BatchInfo
from odb_libra_lightning.odb.loader import ODBLoader


def training_loader(trainer: L.Trainer) -> ODBLoader:
    """The trainer's online loader.

    Raises:
        RuntimeError: if it trains on a loader of another kind.
    """
    loader = trainer.train_dataloader
    if not isinstance(loader, ODBLoader):
        raise RuntimeError(
            f"the callbacks of odb_libra_lightning need an ODBLoader, and the trainer has a {type(loader).__name__}: "
            "train with ODBDataModule, or ODBDataModule.wrap(your_datamodule, l_max=...), or remove the callbacks"
        )
    return loader


def batch_info(trainer: L.Trainer, batch_idx: int) -> BatchInfo:
    """Facts about the batch that the trainer is at; it has drawn later ones already."""
    return training_loader(trainer).info_at(batch_idx)
