"""A progress bar over something whose total is known: samples."""

from __future__ import annotations

import time
from collections.abc import Sized
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from typing_extensions import override

from odb_libra_lightning.callbacks.loader_access import batch_info, training_loader
from odb_libra_lightning.callbacks.totals import Totals
from odb_libra_lightning.odb.batch_info import BatchInfo


class SampleProgressBar(TQDMProgressBar):
    """Lightning's bar, counting samples of all ranks instead of batches, of which nobody knows the number.

    Shows samples done of the epoch's total, time left, samples/s, steps done of those expected, tokens/s, and the
    padding ratio of the epoch.
    """

    def __init__(self, refresh_rate: int = 1, process_position: int = 0, leave: bool = False) -> None:
        super().__init__(refresh_rate, process_position, leave)
        self._begin = time.perf_counter()
        self._totals = Totals()
        self._steps = ""

    @override
    def init_train_tqdm(self) -> Tqdm:
        bar = super().init_train_tqdm()
        bar.unit = " samples"
        return bar

    @override
    def on_train_start(self, trainer: L.Trainer, *args: Any) -> None:
        super().on_train_start(trainer, *args)
        # The trainer does not say that an epoch starts where it goes on within one.
        self.train_progress_bar.set_description(f"Epoch {trainer.current_epoch}", refresh=False)
        self._begin_epoch(trainer)

    @override
    def on_train_epoch_start(self, trainer: L.Trainer, *args: Any) -> None:
        super().on_train_epoch_start(trainer, *args)
        self._begin_epoch(trainer)

    def _begin_epoch(self, trainer: L.Trainer) -> None:
        loader = training_loader(trainer)
        self.train_progress_bar.total = loader.samples_per_epoch
        self.train_progress_bar.initial = loader.samples_done
        self._begin = time.perf_counter()
        self._totals = Totals()

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        info = batch_info(trainer, batch_idx)
        self._totals.add(info)
        loader = training_loader(trainer)
        self._steps = _steps(info, len(loader) if isinstance(loader, Sized) else None)
        bar = self.train_progress_bar
        last = info.samples_done == info.samples_total
        if self.is_enabled and (last or (batch_idx + 1) % self.refresh_rate == 0):
            bar.n = info.samples_done
            bar.set_postfix(self.get_metrics(trainer, pl_module))

    @override
    def get_metrics(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, Any]:
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        rate = self._totals.tokens / (time.perf_counter() - self._begin)
        return {
            "steps": self._steps,
            "tokens/s": f"{rate:,.0f}",
            "padding": f"{self._totals.padding_ratio:.1%}",
            **metrics,
        }


def _steps(info: BatchInfo, known: int | None) -> str:
    """Steps of the epoch done, and how many there will be: as is known, or if they go on as they did."""
    done = info.batch_idx + 1
    if known is not None:
        return f"{done}/{known}"
    total = info.samples_total
    if not total or not info.samples_done:
        return str(done)
    return f"{done}/{'~' * (info.samples_done < total)}{done * total / info.samples_done:.0f}"
