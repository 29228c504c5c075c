"""Monitors of time: waiting for data, and ranks that others wait for."""

from __future__ import annotations

import time
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from typing_extensions import override

from odb_libra_lightning.callbacks.monitor import Monitor
from odb_libra_lightning.callbacks.totals import Totals
from odb_libra_lightning.odb.batch_info import BatchInfo


class DataWaitMonitor(Monitor):
    """Logs `odb/data_wait_fraction`: the share of time that the training processes wait for the loader.

    Time is taken by the loader, over all ranks, from one batch given out to the next; what happens between two epochs
    is left out, the wait for an epoch's first batch is not.
    """

    @override
    def summarize(self, trainer: L.Trainer, totals: Totals, last: BatchInfo, updates: int) -> dict[str, float]:
        times = torch.tensor([totals.waited_s, totals.elapsed_s], dtype=torch.float32)
        waited, elapsed = _gather(trainer, times).sum(dim=0).tolist()
        return {"odb/data_wait_fraction": waited / elapsed if elapsed else 0.0}


class StragglerMonitor(Monitor):
    """Logs how long the slowest rank takes for its own part of a step, against the mean rank.

    A step is timed from its batch to the start of its backward pass: the part in which plain data parallelism does not
    wait for other ranks (sharded strategies do, and so does DDP where it broadcasts buffers). `straggler/max_s` is the
    slowest rank's time, `straggler/mean_s` the mean rank's, both means over the steps of the interval, and
    `straggler/ratio` their quotient; 1 is perfect balance. On a GPU the times are taken with CUDA events, without
    waiting for the device at each step.
    """

    def __init__(self) -> None:
        super().__init__()
        self._spans: list[tuple[_Mark, _Mark]] = []
        self._begin: _Mark | None = None

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._begin = _Mark(pl_module.device)

    @override
    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: torch.Tensor) -> None:
        if self._begin is not None:
            self._spans.append((self._begin, _Mark(pl_module.device)))
            self._begin = None  # a step with several backward passes is timed to the first

    @override
    def summarize(self, trainer: L.Trainer, totals: Totals, last: BatchInfo, updates: int) -> dict[str, float]:
        times = torch.tensor([begin.seconds_to(end) for begin, end in self._spans], dtype=torch.float32)
        self._spans.clear()
        if not len(times):
            return {}
        by_rank = _gather(trainer, times)
        slowest = by_rank.max(dim=0).values.mean().item()
        mean = by_rank.mean().item()
        return {
            "straggler/max_s": slowest,
            "straggler/mean_s": mean,
            "straggler/ratio": slowest / mean if mean else 1.0,
        }


class _Mark:
    """A moment on a device's own clock."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(device))
        self._time = time.perf_counter()

    def seconds_to(self, later: _Mark) -> float:
        if self._event is None or later._event is None:
            return later._time - self._time
        later._event.synchronize()
        return float(self._event.elapsed_time(later._event)) / 1000


def _gather(trainer: L.Trainer, values: torch.Tensor) -> torch.Tensor:
    """`[k]` of every rank as `[W, k]`, on the CPU."""
    if trainer.world_size == 1:
        return values[None]
    values = values.to(trainer.strategy.root_device)
    everyone = [torch.empty_like(values) for _ in range(trainer.world_size)]
    dist.all_gather(everyone, values)
    return torch.stack(everyone).cpu()
