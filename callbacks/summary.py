"""A short table at the end of a run."""

from __future__ import annotations

import os
import random
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.loggers import TensorBoardLogger
from rich.console import Console
from rich.table import Table
from typing_extensions import override

from odb_libra_lightning.callbacks.libra_monitor import LibraMonitor
from odb_libra_lightning.callbacks.loader_access import batch_info, training_loader
from odb_libra_lightning.callbacks.totals import Totals
from odb_libra_lightning.odb.padding import fixed_batch_padded_tokens, padding_ratio

# Lengths that are kept for the comparison with fixed batches.
_MOST_LENGTHS = 100_000


class RunSummary(L.Callback):
    """Prints what a run consumed and what batching made of it, on rank 0.

    The comparison is with batches of a fixed size in random order: the same samples (those of rank 0, of which the
    first 100,000) at the same mean number of samples a batch.
    """

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._totals = Totals()
        self._steps = 0
        self._lengths: list[int] = []
        self._dropped: dict[int, int] = {}  # by epoch
        self._exchange_s: dict[int, float] = {}  # by epoch
        self._begin = time.perf_counter()
        self._first_update = trainer.global_step

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        info = batch_info(trainer, batch_idx)
        self._totals.add(info)
        self._steps += 1
        if self._steps == 1:
            self._begin -= info.wait_s  # the trainer draws the first batch before it says that training starts
        self._dropped[info.epoch] = info.samples_dropped
        self._exchange_s[info.epoch] = info.exchange_s
        self._lengths.extend(info.lengths[: _MOST_LENGTHS - len(self._lengths)])

    @override
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        account = training_loader(trainer).account
        if account is not None:  # it knows of samples that were dropped after the last step, too
            self._dropped[account.epoch] = account.dropped

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.is_global_zero or not self._steps:
            return
        totals = self._totals
        elapsed = time.perf_counter() - self._begin
        updates = trainer.global_step - self._first_update
        replicas = int((trainer.distributed_sampler_kwargs or {"num_replicas": 1})["num_replicas"])
        batch_size = round(totals.samples / (self._steps * replicas))
        table = Table(title="Training summary", show_header=False, title_justify="left")
        table.add_row("samples", f"{totals.samples:,}")
        if dropped := sum(self._dropped.values()):
            table.add_row("samples dropped", f"{dropped:,}")
        table.add_row("tokens", f"{totals.tokens:,}  ({totals.tokens / elapsed:,.0f}/s)")
        table.add_row("padding ratio", f"{totals.padding_ratio:.1%}")
        if batch_size > 1:
            fixed = self._fixed_padding_ratio(batch_size)
            table.add_row(f"padding ratio of fixed batches of {batch_size}", f"{fixed:.1%}")
        table.add_row("updates", f"{updates:,}")
        table.add_row("samples per update", f"{totals.samples / max(updates, 1):,.1f}")
        table.add_row("zero-weight steps", f"{totals.zero_weight_steps / (self._steps * replicas):.2%}")
        table.add_row("waiting for data", f"{totals.waited_s / elapsed:.1%} of {elapsed:,.0f} s")
        if trainer.world_size > 1:
            table.add_row("exchanges, beside training", f"{sum(self._exchange_s.values()) / elapsed:.1%} of the time")
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, LibraMonitor):
                for row in callback.run.rows(updates):
                    table.add_row(*row)
        console = Console()
        console.print(table)
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                command = shutil.which("odb-libra") or Path(sys.executable).with_name("odb-libra")
                folder = Path(logger.save_dir)
                console.print(f"Dashboard: {_short(Path(command))} dashboard {_short(folder)}", soft_wrap=True)

    def _fixed_padding_ratio(self, batch_size: int) -> float:
        lengths = list(self._lengths)
        random.Random(0).shuffle(lengths)
        return padding_ratio(sum(lengths), fixed_batch_padded_tokens(lengths, batch_size))


def _short(path: Path) -> str:
    """The path from here, where that is shorter."""
    return min(str(path), os.path.relpath(path), key=len)
