"""How a Lightning trainer counts, for the loader that it iterates."""

from __future__ import annotations

import math

import lightning as L
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from odb_libra_lightning.odb.training_loader import TrainerClock


def trainer_clock(trainer: L.Trainer) -> TrainerClock:
    """The clock of a trainer now: at the begin of a pass, or where it writes a checkpoint."""
    return TrainerClock(
        accumulation=_accumulation(trainer),
        limit=_limit(trainer),
        next_step=_next_step(trainer),
    )


def _limit(trainer: L.Trainer) -> int | None:
    """Batches of an epoch where the trainer was given a limit; as a share only once it knows the loader's length."""
    limit = trainer.limit_train_batches
    if limit == 1.0 and not isinstance(limit, int):
        return None
    if isinstance(limit, int):
        return limit
    return None if math.isinf(trainer.num_training_batches) else int(trainer.num_training_batches)


def epochs_done(trainer: L.Trainer) -> int:
    """Epochs that a trainer is through with; `current_epoch` lags behind where it goes on from the end of one."""
    return int(trainer.fit_loop.epoch_progress.current.processed)  # type: ignore[attr-defined]


def _accumulation(trainer: L.Trainer) -> int:
    """Micro-batches of an accumulation window in the epoch that begins.

    The trainer draws the first batch of training before its scheduler, if it has one, sets the number.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, GradientAccumulationScheduler):
            return int(callback.get_accumulate_grad_batches(epochs_done(trainer)))
    return int(trainer.accumulate_grad_batches)


def _next_step(trainer: L.Trainer) -> int:
    """The number of the next batch after a resume from here.

    Within an epoch the trainer counts on; it repeats a step that a checkpoint was written in. After a checkpoint of an
    epoch's last step it counts on as well, into the next epoch, since nobody told it that the epoch is over; after one
    of an epoch's end it begins with 0.
    """
    batches = trainer.fit_loop.epoch_loop.batch_progress
    done = int(batches.current.processed)  # type: ignore[attr-defined]
    at_the_end = batches.is_last_batch and batches.current.completed == batches.current.ready
    return 0 if at_the_end or done >= trainer.num_training_batches else done
