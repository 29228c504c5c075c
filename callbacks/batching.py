"""Monitors of what the batches hold: padding, and work per update."""

from __future__ import annotations

import lightning as L
from typing_extensions import override

from odb_libra_lightning.callbacks.monitor import Monitor
from odb_libra_lightning.callbacks.totals import Totals
from odb_libra_lightning.odb.batch_info import BatchInfo


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
