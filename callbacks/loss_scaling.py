"""Exact losses under data parallelism, without a line of the user's module changed."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from odb_libra_lightning.callbacks.epoch_length import renew_epoch_length
from odb_libra_lightning.callbacks.loader_access import batch_info, follow_trainer, training_loader
from odb_libra_lightning.odb.batch_info import BatchInfo
from odb_libra_lightning.odb.training_loader import TrainingLoader
from odb_libra_lightning.strategies.ddp_reduction import check_reduction_finished
from odb_libra_lightning.strategies.gradient_scaling import scale_gradient


def _given_loader(trainer: L.Trainer) -> TrainingLoader | None:
    """The loader that `fit` was given as it is, without a datamodule."""
    given = trainer.fit_loop._data_source.instance
    return given if isinstance(given, TrainingLoader) else None


class ZeroWeightSteps(L.Callback):
    """Takes the gradient away from stand-in batches, which a rank without data trains on to keep step.

    The factor is applied to the gradient where it enters the loss, in a hook on the loss tensor, so it works
    with every strategy that calls backward through Lightning, under any precision, and whatever the user's
    `training_step` returns or logs stays as it is.

    Give it to the trainer in place of `TokenLossScaling` where a part of the loss is not to be weighted by tokens, and
    weigh the rest in `training_step`:

    Example:
        >>> def training_step(self, batch, batch_idx):
        ...     loss, auxiliary = self.losses(batch)
        ...     return loss * batch_info(self.trainer, batch_idx).loss_weight + 0.01 * auxiliary
    """

    def __init__(self) -> None:
        self._info: BatchInfo | None = None
        self._scaling: Any = None  # handle of the hook on the loss of the last backward pass
        self._zeroed: list[Any] = []  # handles of the hooks in a step of weight 0
        self.idle_without_odb = False  # set by the datamodule that adds the callback: other loaders are no mistake then

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit" and (loader := _given_loader(trainer)) is not None:
            follow_trainer(loader, trainer)

    @override
    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        # The trainer restores a loader's state itself, but not at the end of an epoch, nor where it is asked for early.
        states = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {}).get("combined_loader")
        if states and (loader := _given_loader(trainer)) is not None:
            loader.load_state_dict(states[0])

    @override
    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        renew_epoch_length(trainer)

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._free_hooks()
        self._info = None
        if self.idle_without_odb and not isinstance(trainer.train_dataloader, TrainingLoader):
            return
        if not training_loader(trainer).follows(trainer):
            raise RuntimeError(
                "the loader does not know how this trainer counts, so its windows and checkpoints would be wrong: "
                "give it to trainer.fit(train_dataloaders=...), or its data to ODBDataModule or PackedDataModule, and "
                "not to a train_dataloader() hook"
            )
        info = batch_info(trainer, batch_idx)
        if info.accumulation != trainer.accumulate_grad_batches:
            raise RuntimeError(
                f"the batches are weighted for accumulate_grad_batches={info.accumulation}, and the trainer "
                f"accumulates {trainer.accumulate_grad_batches}: change it between epochs, by a "
                "GradientAccumulationScheduler"
            )
        if info.accumulation > 1 and trainer.strategy.handles_gradient_accumulation:
            raise RuntimeError(
                f"{type(trainer.strategy).__name__} divides by accumulate_grad_batches={info.accumulation} twice, and "
                "does not end a window with the epoch: take ODBDeepSpeedStrategy, of "
                "odb_libra_lightning.strategies.deepspeed, which takes the same arguments"
            )
        self._info = info

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._free_hooks()
        if self._info is not None:
            training_loader(trainer).mark_trained(batch_idx)

    @override
    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._free_hooks()

    def _factor(self, info: BatchInfo) -> float:
        """Factor on the gradient of a batch's loss."""
        return float(info.loss_weight != 0.0)

    def _free_hooks(self) -> None:
        while self._zeroed:
            self._zeroed.pop().remove()

    @override
    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: torch.Tensor) -> None:
        if self._info is None or not loss.requires_grad:
            return
        if self._scaling is not None:  # of an earlier backward pass of the step, perhaps on the same tensor
            self._scaling.remove()
        self._scaling, *zeroed = scale_gradient(loss, self._factor(self._info))
        self._zeroed += zeroed

    @override
    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._info is not None:
            check_reduction_finished(trainer.strategy)


class TokenLossScaling(ZeroWeightSteps):
    """Makes data-parallel training equal to one process on the whole batch, to rounding.

    Each rank's local mean loss counts as much as the loss-bearing tokens behind it, over all ranks and over all
    micro-batches of an accumulation window (under `loss_scaling="sample"`: as much as its samples). The whole of
    the returned loss is scaled, auxiliary terms included.

    `ODBDataModule` adds this callback where it is missing.
    """

    @override
    def _factor(self, info: BatchInfo) -> float:
        return info.loss_weight

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        if self._info is not None and self._info.window_loss_tokens == 0:
            rank_zero_warn(
                "no label bears loss in a batch, nor in its accumulation window, on any rank: the update has a zero "
                "gradient. Are labels masked as you mean them to be? Where the loss does not shift them by one, pass "
                "causal_shift=False"
            )
