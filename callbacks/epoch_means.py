"""Means over an epoch that are the means over its samples, where ranks have unequal shares."""

from __future__ import annotations

from typing import Any

import lightning as L
from typing_extensions import override


class ExactEpochMeans(L.Callback):
    """Makes `self.log(..., on_epoch=True, sync_dist=True)` the mean over the samples of all ranks.

    Lightning sums `value * batch_size` and `batch_size` on each rank and divides the means of the two over the ranks.
    The second is of whole numbers, and its mean is cut to one: right only where all ranks have had equally many
    samples, which a sampler that repeats some sees to. Here evaluation repeats none, so the count is kept as a float.

    `ODBDataModule` adds this callback where there are several ranks.
    """

    def _keep_floats(self, trainer: L.Trainer) -> None:
        for metric in (trainer._results or {}).values():
            count = getattr(metric, "cumulated_batch_size", None)
            if count is not None and not count.is_floating_point():
                metric.cumulated_batch_size = count.to(metric.value.dtype)
                metric._defaults["cumulated_batch_size"] = metric._defaults["cumulated_batch_size"].to(
                    metric.value.dtype
                )

    @override
    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self._keep_floats(trainer)

    @override
    def on_train_epoch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self._keep_floats(trainer)

    @override
    def on_validation_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self._keep_floats(trainer)

    @override
    def on_validation_epoch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self._keep_floats(trainer)

    @override
    def on_test_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self._keep_floats(trainer)

    @override
    def on_test_epoch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self._keep_floats(trainer)
