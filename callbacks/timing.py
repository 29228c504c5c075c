"""Monitors of time: waiting for data, and ranks that others wait for."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from typing_extensions import override

from odb_libra_lightning.callbacks.across_ranks import gather
from odb_libra_lightning.callbacks.monitor import Monitor
from odb_libra_lightning.callbacks.pool_facts import FactsReader, pool_session
from odb_libra_lightning.callbacks.totals import Totals
from odb_libra_lightning.libra.device_mark import DeviceMark
from odb_libra_lightning.libra.kernel_times import KernelTimes
from odb_libra_lightning.odb.batch_info import BatchInfo

POOLS_SHOWN = 16
"""Pools of which `StragglerMonitor` logs each, at the most."""


class DataWaitMonitor(Monitor):
    """Logs `odb/data_wait_fraction`: the share of time that the training processes wait for the loader.

    Time is taken by the loader, over all ranks, from one batch given out to the next; what happens between two epochs
    is left out, the wait for an epoch's first batch is not.
    """

    @override
    def summarize(self, trainer: L.Trainer, totals: Totals, last: BatchInfo, updates: int) -> dict[str, float]:
        times = torch.tensor([totals.waited_s, totals.elapsed_s], dtype=torch.float64)
        waited, elapsed = gather(trainer, times).sum(dim=0).tolist()
        return {"odb/data_wait_fraction": waited / elapsed if elapsed else 0.0}


class StragglerMonitor(Monitor):
    """Logs how long the slowest rank takes for its own part of a step, against the mean rank.

    A step is timed from its batch to the start of its backward pass: the part in which plain data parallelism does not
    wait for other ranks (sharded strategies do, and so does DDP where it broadcasts buffers). Under a strategy with
    Libra's pools workers wait for one another in every layer; there it is the time in the attention kernel alone, of
    all layers, forward and backward. On a GPU the times are taken with CUDA events, without waiting for the device at
    each step.

    `straggler/max_s` is the slowest rank's time, `straggler/mean_s` the mean rank's, both means over the steps of the
    interval, and `straggler/ratio` their quotient; 1 is perfect balance. Under pools also the same within each pool:
    `straggler/pool_max_s` is the longest that the slowest worker of a pool takes, the mean over steps,
    `straggler/pool_ratio` the largest ratio within a pool, and `straggler/pools/<k>` the ratio within pool `k`, where
    there are at most 16.
    """

    def __init__(self) -> None:
        super().__init__()
        self._spans: list[tuple[DeviceMark, DeviceMark]] = []
        self._kernels: list[KernelTimes] = []
        self._begin: DeviceMark | None = None
        self._reader = FactsReader()

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._reader.begin(trainer)
        self._spans.clear()
        self._kernels.clear()

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._begin = DeviceMark(pl_module.device) if pool_session(trainer) is None else None

    @override
    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: torch.Tensor) -> None:
        if self._begin is not None:
            self._spans.append((self._begin, DeviceMark(pl_module.device)))
            self._begin = None  # a step with several backward passes is timed to the first

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._kernels += [facts.kernel for facts in self._reader.new(trainer)]
        for kernel in self._kernels:
            kernel.settle()  # so that events do not pile up
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    @override
    def summarize(self, trainer: L.Trainer, totals: Totals, last: BatchInfo, updates: int) -> dict[str, float]:
        times = [begin.seconds_to(end) for begin, end in self._spans] + [kernel.seconds() for kernel in self._kernels]
        self._spans.clear()
        self._kernels.clear()
        if not times:
            return {}
        by_rank = gather(trainer, torch.tensor(times, dtype=torch.float64))
        slowest, mean, ratio = _spread(by_rank)
        values = {"straggler/max_s": slowest, "straggler/mean_s": mean, "straggler/ratio": ratio}
        if (session := pool_session(trainer)) is not None:
            pools = [_spread(pool) for pool in torch.chunk(by_rank, session.layout.num_pools)]
            ratios = [ratio for _, _, ratio in pools]
            values |= {
                "straggler/pool_max_s": max(slowest for slowest, _, _ in pools),
                "straggler/pool_ratio": max(ratios),
            }
            if len(pools) <= POOLS_SHOWN:
                values |= {f"straggler/pools/{pool}": ratio for pool, ratio in enumerate(ratios)}
        return values


def _spread(times: torch.Tensor) -> tuple[float, float, float]:
    """Slowest and mean of ranks, means over steps, and their quotient, from `[ranks, steps]`."""
    slowest, mean = times.max(dim=0).values.mean().item(), times.mean().item()
    return slowest, mean, slowest / mean if mean else 1.0
