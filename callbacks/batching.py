"""Monitors of what the batches hold: padding, work per update, and steps of an epoch."""

from __future__ import annotations

import math
from collections.abc import Sized
from typing import Any

import lightning as L
from typing_extensions import override

from odb_libra_lightning.callbacks.loader_access import batch_info, training_loader
from odb_libra_lightning.callbacks.monitor import Monitor
from odb_libra_lightning.callbacks.totals import Totals
from odb_libra_lightning.odb.batch_info import BatchInfo
from odb_libra_lightning.odb.progress import Spread, estimate_epoch


class PaddingMonitor(Monitor):
    """Logs `odb/padding_ratio`: the share of padding in the tokens that the model computes on, all ranks."""

    @override
    def summarize(self, trainer: L.Trainer, totals: Totals, last: BatchInfo, updates: int) -> dict[str, float]:
        return {"odb/padding_ratio": totals.padding_ratio}


class SamplesPerUpdateMonitor(Monitor):
    """Logs the work per optimizer update, and what aligning the ranks costs.

    `odb/samples_per_update` and `odb/tokens_per_update` are means over the updates of the interval, summed over
    ranks. `odb/zero_weight_steps` is the number of steps that ranks took without data of their own in the interval.
    `odb/round_ms` and `odb/round_bytes` are the time that the rank spent in exchanges with the others, and what it
    received in them, per grouping round of the epoch so far.
    """

    @override
    def summarize(self, trainer: L.Trainer, totals: Totals, last: BatchInfo, updates: int) -> dict[str, float]:
        rounds = last.round + 1
        return {
            "odb/samples_per_update": totals.samples / updates,
            "odb/tokens_per_update": totals.tokens / updates,
            "odb/zero_weight_steps": float(totals.zero_weight_steps),
            "odb/round_ms": 1000 * last.exchange_s / rounds,
            "odb/round_bytes": last.exchange_bytes / rounds,
        }


class StepsPerEpochMonitor(Monitor):
    """Logs how many steps (batches of a rank) the current epoch will have had, as far as they can be known.

    `odb/steps_per_epoch` is the estimate and `odb/steps_per_epoch_error` its standard error, which ends at 0. Nothing
    is logged before two steps have shown how much they differ, nor where the size of the epoch is unknown.
    """

    def __init__(self) -> None:
        super().__init__()
        self._spread = Spread()
        self._first = 0  # number of the epoch's first step; not 0 where a trainer counts on into the next epoch

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        info = batch_info(trainer, batch_idx)
        self._spread.add(info.global_samples)
        if info.samples_done - info.samples_dropped == info.global_samples:
            self._first = batch_idx
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    @override
    def summarize(self, trainer: L.Trainer, totals: Totals, last: BatchInfo, updates: int) -> dict[str, float]:
        loader = training_loader(trainer)
        if isinstance(loader, Sized):
            return {"odb/steps_per_epoch": float(len(loader)), "odb/steps_per_epoch_error": 0.0}
        if last.samples_total is None:
            return {}
        estimate = estimate_epoch(
            samples_done=last.samples_done,
            samples_total=last.samples_total,
            steps_done=last.batch_idx - self._first + 1,
            spread=self._spread.value,
        )
        if math.isinf(estimate.error):
            return {}
        return {"odb/steps_per_epoch": estimate.steps, "odb/steps_per_epoch_error": estimate.error}
