"""Validation by samples, for training whose steps hold unequal numbers of them."""

from __future__ import annotations

import sys
from typing import Any

import lightning as L
from typing_extensions import override

from odb_libra_lightning.callbacks.loader_access import batch_info
from odb_libra_lightning.callbacks.windowed import Windowed

_NOW = 1  # every batch is a multiple of 1,
_NEVER = sys.maxsize  # and none of this; infinity would validate at the end of each epoch


class ValidateEverySamples(L.Callback):
    """Validates each time so many samples were trained on, over all ranks and across epochs.

    Validation follows the batch that reaches the next multiple of `samples`; nothing else triggers it, the end of an
    epoch neither. It goes through `Trainer.val_check_batch`, the trainer's number of batches from one validation to
    the next, so callbacks, loggers and hooks see ordinary validation. All ranks validate after the same step, since
    they know each other's samples. A resumed run counts on.

    `ModelCheckpoint` and `EarlyStopping` look at the trainer's arguments, where this does not show, and act at the end
    of epochs: give them `save_on_train_epoch_end=False` and `check_on_train_epoch_end=False`.

    Example:
        >>> trainer = L.Trainer(max_epochs=3, callbacks=[ValidateEverySamples(50_000)], logger=False)

    Args:
        samples: samples from one validation to the next, all ranks.

    Raises:
        ValueError: if `samples` is below 1; when training begins, if there is nothing to validate on or the trainer has
            another interval.
    """

    def __init__(self, samples: int) -> None:
        if samples < 1:
            raise ValueError(f"samples must be at least 1, got {samples}")
        self.samples = samples
        self._consumed = Windowed(0)

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._consumed.begin(trainer)

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return  # a run that tries everything once has set its own interval
        if not trainer.enable_validation:
            raise ValueError(
                f"{type(self).__name__} has nothing to validate on: the module needs a validation_step, the datamodule "
                f"a validation set, and limit_val_batches={trainer.limit_val_batches} must not be 0"
            )
        if trainer.val_check_interval != 1.0 or trainer.check_val_every_n_epoch not in (1, None):
            raise ValueError(
                f"{type(self).__name__}({self.samples}) and the trainer's val_check_interval="
                f"{trainer.val_check_interval} and check_val_every_n_epoch={trainer.check_val_every_n_epoch} are two "
                "intervals: leave the trainer's at their defaults, or remove the callback"
            )
        trainer.val_check_batch = _NEVER

    @override
    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]
            trainer.val_check_batch = _NEVER  # reloading the loaders has reset it

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        before = self._consumed.now
        info = batch_info(trainer, batch_idx)
        self._consumed.advance(before + info.global_samples, info)
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]
            due = self._consumed.now // self.samples > before // self.samples
            trainer.val_check_batch = _NOW if due else _NEVER

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"samples": self._consumed.settled}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._consumed.set(state_dict["samples"])
