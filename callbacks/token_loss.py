"""The loss that a run descends, exact over ranks of unequal shares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning as L
import torch
from typing_extensions import override

from odb_libra_lightning.callbacks.across_ranks import gather
from odb_libra_lightning.callbacks.loader_access import batch_info
from odb_libra_lightning.callbacks.monitor import Monitor
from odb_libra_lightning.callbacks.pool_facts import pool_session
from odb_libra_lightning.callbacks.totals import Totals
from odb_libra_lightning.odb.batch_info import BatchInfo


class TokenLossMonitor(Monitor):
    """Logs `train/token_loss`: the mean loss over all loss-bearing tokens of an update, all ranks and micro-batches.

    What a module logs as `train/loss` is one rank's mean over one micro-batch; ranks and micro-batches with few labels
    weigh in it as much as others. Here each loss that `training_step` returns, a mean over the labels of its batch,
    weighs as many as these are, under every `loss_scaling`. So curves of runs on the same data lie on one another,
    whatever their ranks, accumulation, batching and strategy. Auxiliary terms that a module adds to its loss are in
    it. A loss that bears no label is left out, NaN or not.

    It is logged once an interval, as the mean over its updates; those without any label are left out. Losses stay on
    their device until then, and are added up in float64.
    """

    def __init__(self) -> None:
        super().__init__()
        self._clear()

    @override
    def on_bar(self, trainer: L.Trainer) -> bool:
        # A module's own loss is that of one process's rows there, and of no label where these are a prompt.
        return pool_session(trainer) is not None

    def _clear(self) -> None:
        self._losses: list[torch.Tensor] = []  # as they enter backward, so divided by the micro-batches of an update
        self._factors: list[float] = []
        self._updates = 0

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._clear()

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        info = batch_info(trainer, batch_idx)
        factor = _share_of_rank(trainer) * info.loss_tokens
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else None
        if factor and loss is not None:
            self._losses.append(loss.detach().reshape(()))
            self._factors.append(factor * info.accumulation / info.window_loss_tokens)
        self._updates += info.ends_window and info.window_loss_tokens > 0
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    @override
    def summarize(self, trainer: L.Trainer, totals: Totals, last: BatchInfo, updates: int) -> dict[str, float]:
        updates = self._updates
        local = torch.zeros(1, dtype=torch.float64)
        if self._losses:
            losses = torch.stack(self._losses).cpu().double()
            local += losses @ torch.tensor(self._factors, dtype=torch.float64)
        self._clear()
        if not updates:
            return {}
        return {"train/token_loss": float(gather(trainer, local).sum()) / updates}


def _share_of_rank(trainer: L.Trainer) -> float:
    """Share of this rank's loss in the mean over its replica's batch."""
    session = pool_session(trainer)
    return 1.0 if session is None else session.loss_share / session.layout.context_parallel
