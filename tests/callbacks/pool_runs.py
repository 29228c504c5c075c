"""Runs whose strategy says that it has pools: facts and shards are made up, the rest is Lightning's."""

from __future__ import annotations

import time
from collections import deque
from types import SimpleNamespace
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.nn import functional as F

from odb_libra_lightning import ODBDataModule
from odb_libra_lightning.callbacks import batch_info, monitoring
from odb_libra_lightning.data.packed_datamodule import PackedDataModule
from odb_libra_lightning.libra.active_attention import core_attention
from odb_libra_lightning.libra.device_mark import DeviceMark
from odb_libra_lightning.libra.kernel_times import KernelTimes
from odb_libra_lightning.libra.process_groups import RankLayout
from odb_libra_lightning.strategies import LibraStrategy
from odb_libra_lightning.strategies.micro_batch_facts import MicroBatchFacts
from tests.modules import BigramModel, quiet_trainer
from tests.samples import Documents, pad


def pool_facts(pool: int, step: int) -> tuple[int, float, int]:
    """Load, imbalance and bytes that the made-up plan of a pool has in a micro-step."""
    return 10**15 + (step * 7 + pool * 5) % 11 * 10**13 + 1, (step + 3 * pool) % 5 / 100, 10**10 + 1000 * step + pool


def rank_seconds(rank: int, step: int) -> tuple[float, float, float]:
    """Seconds of planning, waiting and the kernel, made up."""
    return 0.001 * (1 + rank + step % 3), 1e-6 * (1 + rank), 0.5 + 0.25 * ((3 * step + 2 * rank) % 4)


class At(DeviceMark):
    """A moment at so many seconds."""

    def __init__(self, seconds: float) -> None:
        self._event, self._time = None, seconds

    @staticmethod
    def times(seconds: float) -> KernelTimes:
        """Of a kernel that took so long."""
        times = KernelTimes()
        times.add(At(0.0), At(seconds))
        return times


class PooledDDP(DDPStrategy):
    """DDP with a session; a micro-batch's kernel time is complete once its backward pass is through."""

    def __init__(self, context_parallel: int, pool_size: int) -> None:
        super().__init__()
        self.degrees = {"context_parallel": context_parallel, "pool_size": pool_size}
        old = SimpleNamespace()  # of an earlier fit
        self.session = SimpleNamespace(facts=deque([old, old], maxlen=3), loss_share=1.0, steps=0)

    def setup_environment(self) -> None:
        super().setup_environment()
        self.session.layout = RankLayout(world_size=self.world_size, **self.degrees)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        layout = RankLayout(world_size=self.world_size, **self.degrees)
        return {"num_replicas": layout.num_replicas, "rank": layout.replica_of(self.global_rank)}

    def backward(self, closure_loss: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        session = self.session
        load, imbalance, moved = pool_facts(session.layout.pool_of(self.global_rank), session.steps)
        planning_s, waited_s, kernel_s = rank_seconds(self.global_rank, session.steps)
        times = KernelTimes()
        session.facts.append(
            MicroBatchFacts(
                micro_batch=session.steps,
                pool_load=load,
                imbalance=imbalance,
                bytes_moved=moved,
                planning_s=planning_s,
                waited_s=waited_s,
                kernel=times,
            )
        )
        session.steps += 1
        share = session.loss_share
        closure_loss.register_hook(lambda gradient: gradient * share)
        result = super().backward(closure_loss, *args, **kwargs)
        times.add(At(0.0), At(kernel_s))
        return result


class Shards(BigramModel):
    """Its loss is the mean over this rank's columns of the labels; NaN, without a gradient, where there are none.

    Attributes:
        counted: of each micro-batch its epoch, and sum and number of the losses of this rank's labels.
    """

    def __init__(self) -> None:
        super().__init__(lr=0.5)
        self.counted: list[tuple[int, float, int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        session = getattr(self.trainer.strategy, "session", None)
        size, part = 1, 0
        if session is not None:
            size, part = session.layout.context_parallel, session.layout.cp_rank_of(self.global_rank)
        labels = batch["labels"][:, 1:]
        columns = torch.arange(labels.shape[1])
        own = (columns >= part * len(columns) // size) & (columns < (part + 1) * len(columns) // size)
        mine = labels.masked_fill(~own, -100)
        logits = self.head(self.embedding(batch["input_ids"]))[:, :-1]
        losses = F.cross_entropy(logits.flatten(0, 1), mine.flatten(), ignore_index=-100, reduction="none")
        count, total = int((mine != -100).sum()), int((labels != -100).sum())
        if session is not None:
            session.loss_share = size * count / total if total else 0.0
        stand_in = batch_info(self.trainer, batch_idx).loss_weight == 0
        real = not stand_in
        self.counted.append((self.trainer.current_epoch, float(losses.sum().detach()) * real, count * real))
        return losses.sum() / count if count else losses.sum() * 0 + float("nan")


class MaskedDocuments(Documents):
    """Every third document bears no loss; of the others, all but a few tokens at the end of some."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        sample = super().__getitem__(index)
        if index % 3 == 0:
            sample["labels"][:] = -100
        elif index % 3 == 1:
            sample["labels"][: -min(2, len(sample["labels"]) - 1)] = -100
        return sample


class LoggedRows(L.Callback):
    """What reached the trainer after each update that was logged."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, float]] = {}

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        every = trainer.log_every_n_steps
        if trainer.global_step and trainer.global_step % every == 0 and trainer.global_step not in self.rows:
            self.rows[trainer.global_step] = {key: float(value) for key, value in trainer.callback_metrics.items()}


def fit_pools(
    degrees: dict[str, int] | None,
    devices: int,
    accumulation: int,
    interval: int,
    loss_scaling: str = "token",
) -> dict[str, Any]:
    """What was logged in a run, and what its module counted; `degrees` of None: plain DDP."""
    module, logged = Shards(), LoggedRows()
    strategy = "ddp" if degrees is None else PooledDDP(**degrees)
    data = ODBDataModule(MaskedDocuments(70), pad, l_max=700, num_workers=0, loss_scaling=loss_scaling, buffer_size=20)
    begin = time.perf_counter()
    quiet_trainer(
        devices=devices,
        strategy=strategy,
        max_epochs=2,
        accumulate_grad_batches=accumulation,
        log_every_n_steps=interval,
        callbacks=[*monitoring(progress_bar=False), logged],
    ).fit(module, datamodule=data)
    wall_s = time.perf_counter() - begin
    return {"rows": list(logged.rows.items()), "counted": module.counted, "wall_s": wall_s}


class Attends(BigramModel):
    """Has a layer of attention, within documents."""

    def __init__(self) -> None:
        super().__init__(lr=0.5)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        hidden = self.embedding(batch["input_ids"])
        heads = hidden.unflatten(2, (2, 4))
        attended = core_attention(heads, heads, heads, position_ids=batch["position_ids"])
        logits = self.head(hidden + attended.flatten(2))
        labels = batch["labels"][:, 1:].flatten()
        losses = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels, ignore_index=-100, reduction="none")
        return losses.sum() / (labels != -100).sum()


def fit_packs(options: dict[str, Any] | None, devices: int, accumulation: int) -> list[tuple[int, dict[str, float]]]:
    """What was logged in a run on packed documents, four packs an update; `options` of None: plain DDP."""
    logged = LoggedRows()
    documents = MaskedDocuments(40, 60)
    data = PackedDataModule([documents[index] for index in range(40)], 96, num_workers=0)
    quiet_trainer(
        devices=devices,
        strategy="ddp" if options is None else LibraStrategy(**options),
        max_epochs=1,
        accumulate_grad_batches=accumulation,
        log_every_n_steps=2,
        callbacks=[*monitoring(progress_bar=False), logged],
    ).fit(Attends(), datamodule=data)
    return list(logged.rows.items())
