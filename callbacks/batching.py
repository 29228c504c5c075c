"""Monitors of what the batches hold: padding, and work per update."""

from __future__ import annotations

import lightning as L
from typing_extensions import override

from odb_libra_lightning.callbacks.monitor import Monitor
from odb_libra_lightning.odb.batch_info import BatchInfo
from odb_libra_lightning.odb.padding import padding_ratio


class PaddingMonitor(Monitor):
    """Logs `odb/padding_ratio`: the share of padding in the tokens that the model computes on, all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self._real = self._padded = 0

    @override
    def observe(self, info: BatchInfo) -> None:
        self._real += info.global_tokens
        self._padded += info.global_padded_tokens

    @override
    def summarize(self, trainer: L.Trainer, updates: int) -> dict[str, float]:
        ratio = padding_ratio(self._real, self._padded)
        self._real = self._padded = 0
        return {"odb/padding_ratio": ratio}


class SamplesPerUpdateMonitor(Monitor):
    """Logs the work per optimizer update, and what aligning the ranks costs.

    `odb/samples_per_update` and `odb/tokens_per_update` are means over the updates of the interval, summed over
    ranks. `odb/zero_weight_steps` is the number of steps that ranks took without data of their own in the interval.
    `odb/round_ms` and `odb/round_bytes` are the time that the rank spent in exchanges with the others, and what it
    received in them, per grouping round of the epoch so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self._clear()

    def _clear(self) -> None:
        self._samples = self._seen_tokens = self._zero_weight_steps = 0

    @override
    def observe(self, info: BatchInfo) -> None:
        self._samples += info.global_samples
        self._seen_tokens += info.global_tokens
        self._zero_weight_steps += info.idle_ranks
        self._exchange = (info.exchange_s, info.exchange_bytes, info.round + 1)

    @override
    def summarize(self, trainer: L.Trainer, updates: int) -> dict[str, float]:
        seconds, received, rounds = self._exchange
        values = {
            "odb/samples_per_update": self._samples / updates,
            "odb/tokens_per_update": self._seen_tokens / updates,
            "odb/zero_weight_steps": float(self._zero_weight_steps),
            "odb/round_ms": 1000 * seconds / rounds,
            "odb/round_bytes": received / rounds,
        }
        self._clear()
        return values
