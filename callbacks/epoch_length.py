"""The trainer's number of batches of an epoch, where epochs have unequal numbers."""

from __future__ import annotations

import lightning as L
from lightning.fabric.utilities.data import sized_len

from odb_libra_lightning.odb.training_loader import TrainingLoader


def renew_epoch_length(trainer: L.Trainer) -> None:
    """Have a trainer count the batches of the epoch that begins, and validate after as large a share of them.

    It counts them when it gets the loader, and keeps the number. An epoch that went on from a checkpoint of another
    number of replicas has more batches, or fewer, than those after it.
    """
    loader, loop = trainer.train_dataloader, trainer.fit_loop
    if not isinstance(loader, TrainingLoader) or (length := sized_len(loader)) is None:
        return
    limit, interval, before = trainer.limit_train_batches, trainer.val_check_interval, loop.max_batches
    batches = min(length, limit) if isinstance(limit, int) else int(length * limit)
    if batches == before or loop._combined_loader is None:
        return
    loop._combined_loader.limits = [batches]
    loop.max_batches = batches
    if isinstance(interval, float) and trainer.val_check_batch == max(1, int(before * interval)):
        trainer.val_check_batch = max(1, int(batches * interval))
