"""Learning rates for training whose number of steps nobody knows: they follow the samples."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import lightning as L
import torch
from typing_extensions import override

from odb_libra_lightning.callbacks.loader_access import batch_info, training_loader
from odb_libra_lightning.callbacks.trainer_clock import epochs_done
from odb_libra_lightning.callbacks.windowed import Windowed
from odb_libra_lightning.odb.progress import Consumed, Decay, Limits, check_shape, epoch_share, lr_factor


class SampleLRSchedule(L.Callback):
    """Sets the learning rate of each update by the share of training that is done.

    Before each update the rate of every parameter group is `initial_lr * lr_factor(progress)`, where `initial_lr` is
    the rate that the module gave it. Progress is the largest of epochs done (with the share of the current epoch's
    samples, or of `limit_train_batches`) over `max_epochs`, `global_step` over `max_steps`, and samples and tokens
    trained on over `total_samples` and `total_tokens`. So the rate is at its minimum after the last update, whichever
    of them ends training. The totals themselves do not end it.

    Works with any LightningModule whose `configure_optimizers` returns optimizers alone, and goes on exactly where a
    checkpoint was written.

    Example:
        >>> schedule = SampleLRSchedule(warmup=0.03, decay="cosine", minimum=0.1)
        >>> trainer = L.Trainer(max_epochs=3, callbacks=[schedule], logger=False)

    Args:
        warmup: share of training in which the rate rises from 0.
        decay: `"cosine"`, `"linear"` or `"constant"`.
        minimum: share of the initial rate that is left at the end.
        total_samples: samples, over all ranks and epochs, after which the rate is at its minimum.
        total_tokens: the same in tokens, without padding.

    Raises:
        ValueError: for a value out of its range; when training begins, if nothing says where it ends, or if the module
            has a learning rate scheduler of its own.
    """

    def __init__(
        self,
        *,
        warmup: float = 0.0,
        decay: Decay = "cosine",
        minimum: float = 0.0,
        total_samples: int | None = None,
        total_tokens: int | None = None,
    ) -> None:
        check_shape(warmup=warmup, decay=decay, minimum=minimum)
        for name, total in {"total_samples": total_samples, "total_tokens": total_tokens}.items():
            if total is not None and total < 1:
                raise ValueError(f"{name} must be at least 1 or None, got {total}")
        self.warmup = warmup
        self.decay: Decay = decay
        self.minimum = minimum
        self.total_samples = total_samples
        self.total_tokens = total_tokens
        self._done = Windowed(Consumed())

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._done.begin(trainer)

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.lr_scheduler_configs:
            scheduler = type(trainer.lr_scheduler_configs[0].scheduler).__name__
            raise ValueError(
                f"the module has a learning rate scheduler, {scheduler}, and the callback {type(self).__name__} is "
                "another: return the optimizer alone from configure_optimizers, or remove the callback"
            )
        self._check_end(trainer)
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                group.setdefault("initial_lr", float(group["lr"]))  # where torch's own schedulers keep it
        # A checkpoint of an epoch's end may have been written before the epoch counted as done.
        self._done.now = replace(self._done.now, epochs=max(self._done.now.epochs, float(epochs_done(trainer))))
        self._set_rates(trainer)

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        info = batch_info(trainer, batch_idx)
        share = epoch_share(
            info.samples_done, info.samples_total, steps_done=info.batch_idx + 1, steps_limit=_steps_limit(trainer)
        )
        done = self._done.now.plus(info.global_samples, info.global_tokens)
        self._done.advance(replace(done, epochs=info.epoch + share), info)
        if trainer.global_step != done.updates:
            self._set_rates(trainer)

    @override
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # Samples may have been dropped after the last step, and an epoch of unknown size has no share before its end.
        self._done.set(replace(self._done.now, epochs=float(epochs_done(trainer))))
        self._set_rates(trainer)

    def _check_end(self, trainer: L.Trainer) -> None:
        limits = self._limits(trainer)
        if limits == Limits():
            raise ValueError(
                f"{type(self).__name__} needs to know where training ends, and the trainer has max_epochs="
                f"{trainer.max_epochs} and max_steps={trainer.max_steps}: pass either to the Trainer, or total_samples "
                "or total_tokens to the callback"
            )
        by_epochs_alone = limits == Limits(epochs=limits.epochs) and _steps_limit(trainer) is None
        if by_epochs_alone and training_loader(trainer).samples_per_epoch is None:
            raise ValueError(
                f"max_epochs={limits.epochs} does not tell {type(self).__name__} where training ends: nobody knows "
                "the size of an epoch of an iterable dataset: pass max_steps to the Trainer, or total_samples or "
                "total_tokens to the callback"
            )

    def _limits(self, trainer: L.Trainer) -> Limits:
        epochs, updates = trainer.max_epochs, trainer.max_steps
        return Limits(
            epochs=None if epochs is None or epochs < 0 else epochs,
            updates=None if updates < 0 else updates,
            samples=self.total_samples,
            tokens=self.total_tokens,
        )

    def _set_rates(self, trainer: L.Trainer) -> None:
        self._done.now = replace(self._done.now, updates=trainer.global_step)
        progress = self._limits(trainer).progress(self._done.now)
        factor = lr_factor(progress, warmup=self.warmup, decay=self.decay, minimum=self.minimum)
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                rate = float(group["initial_lr"]) * factor
                if isinstance(group["lr"], torch.Tensor):  # compiled optimizers hold on to the tensor
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate

    @override
    def state_dict(self) -> dict[str, Any]:
        settled = self._done.settled
        return {"epochs": settled.epochs, "samples": settled.samples, "tokens": settled.tokens}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._done.set(Consumed(**state_dict))


def _steps_limit(trainer: L.Trainer) -> int | None:
    limit = trainer.num_training_batches
    return None if math.isinf(limit) else int(limit)
