"""What the datamodules share: a training loader that follows its trainer, weighs losses exactly and can be resumed."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import lightning as L
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from odb_libra_lightning.callbacks.epoch_means import ExactEpochMeans
from odb_libra_lightning.callbacks.loader_access import follow_trainer
from odb_libra_lightning.callbacks.loss_scaling import TokenLossScaling, ZeroWeightSteps
from odb_libra_lightning.callbacks.trainer_clock import epochs_done
from odb_libra_lightning.odb.training_loader import TrainingLoader
from odb_libra_lightning.strategies.gloo_exit import destroy_gloo_at_exit

Loader = TypeVar("Loader", bound=TrainingLoader)


class TrainingDataModule(L.LightningDataModule, Generic[Loader]):
    """Base of the datamodules; `train_dataloader` of a subclass builds a loader and hands it to `_take`."""

    _name = "the datamodule"  # in what it says

    def __init__(self) -> None:
        super().__init__()
        self._loader: Loader | None = None
        self._trained_by: L.Trainer | None = None
        self._resumed: dict[str, Any] | None = None  # the loader's state in a checkpoint, until there is a loader

    @property
    def loader(self) -> Loader:
        """The loader of the current run.

        Raises:
            LookupError: before the trainer has asked for it.
        """
        if self._loader is None:
            raise LookupError("there is no training loader yet: the trainer asks for it when training begins")
        return self._loader

    @override
    def state_dict(self) -> dict[str, Any]:
        # Lightning saves and restores a loader's state too, but drops it where the loader is asked for early.
        return {} if self._loader is None else {"loader": self._loader.state_dict()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.trainer is not None and self.trainer.state.fn != TrainerFn.FITTING:
            return  # a checkpoint to evaluate says nothing about where training goes on
        self._resumed = state_dict.get("loader")
        if self._resumed is not None and self._loader is not None and self._trained_by is self.trainer:
            self._loader.load_state_dict(self._resumed)

    @override
    def teardown(self, stage: str) -> None:
        if self._loader is not None:
            self._loader.close()

    @override
    def on_exception(self, exception: BaseException) -> None:
        if self._loader is not None:
            self._loader.close()

    def _take(self, loader: Loader, trainer: L.Trainer) -> Loader:
        """Make a new loader the trainer's, from where training stands."""
        if self._loader is not None:
            self._loader.close()
        follow_trainer(loader, trainer)
        if self._resumed is not None:
            loader.load_state_dict(self._resumed)
            self._resumed = None
        elif self._loader is not None and self._trained_by is trainer:  # it trains on, or asks once more
            loader.position.follow(self._loader.position)
        else:
            loader.set_epoch(epochs_done(trainer))
        self._loader, self._trained_by = loader, trainer
        _weigh_losses(trainer, loader, self._name)
        average_exactly(trainer)
        destroy_gloo_at_exit()
        return loader


def data_parallel_rank(trainer: L.Trainer) -> tuple[int, int]:
    """Rank and number of data-parallel replicas, as the strategy counts them."""
    ranks = trainer.distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1}
    return int(ranks["rank"]), int(ranks["num_replicas"])


def average_exactly(trainer: L.Trainer) -> None:
    """Add the callback for ranks of unequal shares, unless the trainer has it."""
    if trainer.world_size > 1 and not any(isinstance(callback, ExactEpochMeans) for callback in trainer.callbacks):  # type: ignore[attr-defined]
        add_callback(trainer, ExactEpochMeans())


def add_callback(trainer: L.Trainer, callback: L.Callback) -> None:
    """Before those that write checkpoints, and behind all others, which Lightning may be calling just now."""
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    place = next((i for i, other in enumerate(callbacks) if isinstance(other, Checkpoint)), len(callbacks))
    callbacks.insert(place, callback)


def _weigh_losses(trainer: L.Trainer, loader: TrainingLoader, datamodule: str) -> None:
    """Add the callback that applies the loss weights, unless the trainer has one."""
    needed = ZeroWeightSteps if loader.loss_scaling == "none" else TokenLossScaling
    if any(isinstance(callback, ZeroWeightSteps) for callback in trainer.callbacks):  # type: ignore[attr-defined]
        return
    callback = needed()
    callback.idle_without_odb = True
    add_callback(trainer, callback)
    rank_zero_info(
        f"{datamodule} adds the callback {needed.__name__}: losses are weighted by {loader.loss_scaling}"
        if needed is TokenLossScaling
        else f"{datamodule} adds the callback ZeroWeightSteps: losses are not scaled, stand-in batches bear none"
    )
