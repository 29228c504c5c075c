"""Monitor of Libra's balance: attention work of pools, of the workers in them, and what the plans cost."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from typing_extensions import override

from odb_libra_lightning.callbacks.across_ranks import gather
from odb_libra_lightning.callbacks.monitor import Monitor
from odb_libra_lightning.callbacks.pool_facts import FactsReader, pool_session
from odb_libra_lightning.callbacks.totals import Totals
from odb_libra_lightning.odb.batch_info import BatchInfo
from odb_libra_lightning.strategies.micro_batch_facts import MicroBatchFacts

_COLUMNS = 5  # numbers of a micro-batch that ranks tell one another


@dataclass
class LibraTotals:
    """Sums over micro-steps, in each of which every rank trains on one micro-batch.

    Attributes:
        micro_steps: their number.
        pool_imbalance: attention load of the busiest pool over the mean pool's, minus 1.
        tile_imbalance: load of a pool's busiest worker over its mean worker's, minus 1; the mean over pools.
        bytes_moved: bytes that all plans move, in one forward pass of one layer. NaN, like `tile_imbalance`, where
            attention follows no plan of tiles.
        planning_s: seconds that a rank's planning thread took, the mean over ranks.
        waited_s: seconds that a rank waited for its plan, the mean over ranks.
        elapsed_s: seconds of training, the mean over ranks.
    """

    micro_steps: int = 0
    pool_imbalance: float = 0.0
    tile_imbalance: float = 0.0
    bytes_moved: float = 0.0
    planning_s: float = 0.0
    waited_s: float = 0.0
    elapsed_s: float = 0.0

    def add(self, other: LibraTotals) -> None:
        """Add further micro-steps."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def figures(self, updates: int) -> dict[str, float]:
        """What is logged of them."""
        if not self.micro_steps:
            return {}
        figures = {
            "libra/pool_imbalance": self.pool_imbalance / self.micro_steps,
            "libra/tile_imbalance": self.tile_imbalance / self.micro_steps,
            "libra/bytes_moved": self.bytes_moved / max(updates, 1),
            "libra/plan_ms": 1000 * self.planning_s / self.micro_steps,
            "libra/plan_wait_fraction": self.waited_s / self.elapsed_s if self.elapsed_s else 0.0,
        }
        return {key: value for key, value in figures.items() if not math.isnan(value)}

    def rows(self, updates: int) -> list[tuple[str, str]]:
        """Lines for a summary: a name and a figure."""
        if not self.micro_steps:
            return []
        figures = self.figures(updates)
        lines = {
            "libra/pool_imbalance": ("attention work of the busiest pool", "{:.2%} above the mean pool", 1.0),
            "libra/tile_imbalance": ("attention work of a pool's busiest worker", "{:.2%} above the mean worker", 1.0),
            "libra/bytes_moved": ("moved for attention, per update", "{:,.2f} MiB a layer, forward", 2.0**20),
            "libra/plan_wait_fraction": ("waiting for plans", "{:.1%} of the time", 1.0),
        }
        return [(name, text.format(figures[key] / unit)) for key, (name, text, unit) in lines.items() if key in figures]


def facts_row(facts: MicroBatchFacts) -> tuple[float, ...]:
    """What ranks tell one another of a micro-batch, see `totals_over_ranks`."""
    planned = (math.nan if number is None else number for number in (facts.imbalance, facts.bytes_moved))
    return (facts.pool_load, *planned, facts.planning_s, facts.waited_s)


def totals_over_ranks(facts: torch.Tensor, elapsed_s: torch.Tensor, *, num_workers: int) -> LibraTotals:
    """Sums over micro-steps from the facts of all ranks.

    Args:
        facts: `[ranks, micro-steps, 5]`, float64: load and imbalance of the rank's pool, bytes that its plan moves,
            seconds of planning and of waiting. The first three are the same on all ranks of a pool. NaN: none.
        elapsed_s: seconds of training on each rank, `[ranks]`.
        num_workers: ranks of a pool, which stand in a row.
    """
    load, imbalance, moved = facts[::num_workers, :, :3].unbind(-1)  # each [pools, micro-steps]
    planning_s, waited_s = facts.mean(0).sum(0)[3:].tolist()
    return LibraTotals(
        micro_steps=facts.shape[1],
        pool_imbalance=float((load.max(0).values / load.mean(0) - 1).sum()),
        tile_imbalance=float(imbalance.mean(0).sum()),
        bytes_moved=float(moved.sum()),
        planning_s=planning_s,
        waited_s=waited_s,
        elapsed_s=float(elapsed_s.mean()),
    )


class LibraMonitor(Monitor):
    """Logs how even Libra makes attention, and what its plans cost; nothing under a strategy without pools.

    Means over the micro-steps of the interval, unless said otherwise:

    - `libra/pool_imbalance`: attention load (query-key pairs) of the busiest pool over that of the mean pool, minus 1;
      0 is perfect. What placing sequences in pools has left over.
    - `libra/tile_imbalance`: the same of the workers in a pool, the mean over all pools. What placing tiles has left
      over; it is planned load, and `straggler/pool_ratio` is what the clock makes of it.
    - `libra/bytes_moved`: bytes that the plans of all pools and micro-batches of an update move between workers: what
      all of them receive in *one forward pass of one layer*. Layers, backward passes and recomputation are not
      multiplied in.
    - `libra/plan_ms`: milliseconds that a planning thread takes, the mean over ranks, beside training.
    - `libra/plan_wait_fraction`: share of the interval's time that training processes wait for plans. On a GPU the
      process may wait while the device still has work.

    Attention that stays in a replica (Ulysses, ring) follows no plan of tiles, and has no `libra/tile_imbalance` and no
    `libra/bytes_moved`.

    Attributes:
        run: the same over the whole run; complete at its end.
    """

    def __init__(self) -> None:
        super().__init__()
        self.run = LibraTotals()
        self._reader = FactsReader()
        self._begin(0.0)

    def _begin(self, now: float) -> None:
        self._rows: list[tuple[float, ...]] = []
        self._elapsed_s = 0.0
        self._since = now

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self.run = LibraTotals()
        self._reader.begin(trainer)
        self._begin(time.perf_counter())

    @override
    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._since = time.perf_counter()  # what happens between epochs is left out

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        for facts in self._reader.new(trainer):
            self._rows.append(facts_row(facts))
        now = time.perf_counter()
        self._elapsed_s, self._since = self._elapsed_s + now - self._since, now
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    @override
    def summarize(self, trainer: L.Trainer, totals: Totals, last: BatchInfo, updates: int) -> dict[str, float]:
        return self._settle(trainer).figures(updates)

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._settle(trainer)

    def _settle(self, trainer: L.Trainer) -> LibraTotals:
        """Sums over all ranks since the last call; a collective."""
        session = pool_session(trainer)
        if session is None or not self._rows:
            return LibraTotals()
        mine = [number for row in self._rows for number in row]
        everyone = gather(trainer, torch.tensor([*mine, self._elapsed_s], dtype=torch.float64))
        facts = everyone[:, :-1].reshape(len(everyone), -1, _COLUMNS)
        sums = totals_over_ranks(facts, everyone[:, -1], num_workers=session.layout.num_workers)
        self.run.add(sums)
        self._begin(self._since)
        return sums
