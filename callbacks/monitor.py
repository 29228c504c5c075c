"""What all monitors share: they observe each batch and log once in the trainer's logging interval."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import lightning as L
from typing_extensions import override

from odb_libra_lightning.callbacks.loader_access import batch_info
from odb_libra_lightning.callbacks.totals import Totals
from odb_libra_lightning.callbacks.windowed import Windowed
from odb_libra_lightning.odb.batch_info import BatchInfo
from odb_libra_lightning.odb.progress import Consumed


class Monitor(L.Callback, ABC):
    """Logs figures over all ranks every `trainer.log_every_n_steps` updates, together with the x axes.

    The x axes are `progress/samples` and `progress/tokens`: samples and tokens consumed by all ranks since the
    start of training. Figures go through `LightningModule.log_dict`, so they reach every logger, in the same row
    as what the module logs, and `trainer.callback_metrics`.
    """

    def __init__(self) -> None:
        self._interval = Totals()
        self._updates_logged = 0
        self._consumed = Windowed(Consumed())

    @abstractmethod
    def summarize(self, trainer: L.Trainer, totals: Totals, last: BatchInfo, updates: int) -> dict[str, float]:
        """Figures for one interval.

        Called on all ranks at the same update, so it may gather.

        Args:
            trainer: the trainer.
            totals: sums over the batches of the interval.
            last: the last of them.
            updates: optimizer updates in the interval.
        """

    def on_bar(self, trainer: L.Trainer) -> bool:
        """Whether the figures are shown on the progress bar, too."""
        return False

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._consumed.begin(trainer)

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._interval = Totals()
        self._updates_logged = trainer.global_step

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        info = batch_info(trainer, batch_idx)
        self._consumed.advance(self._consumed.now.plus(info.global_samples, info.global_tokens), info)
        self._interval.add(info)
        every = max(trainer.log_every_n_steps, 1)  # type: ignore[attr-defined]
        if trainer.global_step // every > self._updates_logged // every:
            updates = trainer.global_step - self._updates_logged
            values = self.summarize(trainer, self._interval, info, updates)
            self._interval = Totals()
            self._updates_logged = trainer.global_step
            consumed = self._consumed.now
            axes = {"progress/samples": float(consumed.samples), "progress/tokens": float(consumed.tokens)}
            pl_module.log_dict(values, prog_bar=self.on_bar(trainer), on_step=True, on_epoch=False, batch_size=1)
            pl_module.log_dict(axes, on_step=True, on_epoch=False, batch_size=1)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"samples": self._consumed.settled.samples, "tokens": self._consumed.settled.tokens}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._consumed.set(Consumed(**state_dict))
