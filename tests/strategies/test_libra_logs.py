"""What a module logs, hooks that change a batch, and positions that are not the batch's, under context parallelism."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor

from odb_libra_lightning.data.packed_datamodule import PackedDataModule
from tests.launch import run_ranks
from tests.modules import quiet_trainer
from tests.strategies.dense_decoder import IGNORED, VOCABULARY, largest_gap
from tests.strategies.libra_runs import CoreDecoder
from tests.strategies.tiny_models import MODELS

# A prompt without loss and an answer: the first process's rows bear no label.
PROMPT, ANSWER = 12, 4


def documents(count: int, *, prompts: bool) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(count):
        ids = torch.randint(2, VOCABULARY, (PROMPT + ANSWER,), generator=generator)
        labels = ids.clone()
        labels[:PROMPT] = IGNORED if prompts else labels[:PROMPT]
        found.append({"input_ids": ids, "labels": labels})
    return found


class Logging(CoreDecoder):
    """Logs its loss as people do."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=1)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        each = self.token_loss(batch)
        self.log("val_loss", each.mean(), sync_dist=True, batch_size=1)
        self.log("val_token_loss", each.mean(), sync_dist=True, batch_size=len(each))


def logged(context_parallel: int) -> dict[str, float]:
    from odb_libra_lightning.strategies import LibraStrategy

    strategy = LibraStrategy(context_parallel=context_parallel, pool_size=1)
    trainer = quiet_trainer(devices=2, strategy=strategy, max_epochs=1)
    texts = documents(4, prompts=True)
    data = PackedDataModule(texts, PROMPT + ANSWER, val_documents=texts, shuffle=False, num_workers=0)
    trainer.fit(Logging(lr=1e-9), datamodule=data)
    return {name: float(trainer.callback_metrics[name]) for name in ("train_loss", "val_loss", "val_token_loss")}


def test_rows_without_a_label_have_no_part_in_logged_means(tmp_path: Path) -> None:
    (tmp_path / "cut").mkdir()
    (tmp_path / "whole").mkdir()
    cut = run_ranks(logged, 2, tmp_path / "cut", context_parallel=2)
    whole = run_ranks(logged, 2, tmp_path / "whole", context_parallel=1)
    # All labels of a pack are on one process, so the mean of its rows is the pack's.
    for rank in cut:
        for name, value in whole[0].items():
            assert math.isclose(rank[name], value, rel_tol=1e-6), (name, rank, whole[0])


class Masking(CoreDecoder):
    """Hides random labels before a batch is moved, in each process others."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        generator = torch.Generator().manual_seed(self.global_rank + 2 * self.global_step)
        hidden = torch.rand(batch["labels"].shape, generator=generator) < 0.5
        return {**batch, "labels": batch["labels"].masked_fill(hidden, IGNORED)} if self.trainer.training else batch


def masked_weights(context_parallel: int, world_size: int) -> dict[str, list[float]]:
    from odb_libra_lightning.strategies import LibraStrategy

    strategy = LibraStrategy(context_parallel=context_parallel, pool_size=1) if world_size > 1 else "auto"
    trainer = quiet_trainer(devices=world_size, strategy=strategy, max_epochs=1)
    module = Masking()
    data = PackedDataModule(documents(3, prompts=False), PROMPT + ANSWER, shuffle=False, num_workers=0)
    trainer.fit(module, datamodule=data)
    return module.weights()


def test_a_batch_that_a_hook_changed_is_the_first_process_s(tmp_path: Path) -> None:
    ranks = run_ranks(masked_weights, 2, tmp_path, context_parallel=2, world_size=2)
    alone = masked_weights(1, 1)  # whose hook draws what rank 0's does
    for rank in ranks:
        assert largest_gap(rank, alone) < 1e-10


class OwnPositions(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = MODELS["llama"].build()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        rows = batch["input_ids"].shape[1]
        positions = torch.arange(rows)[None]
        loss: Tensor = self.model(batch["input_ids"], position_ids=positions, labels=batch["labels"]).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def refused() -> str:
    from odb_libra_lightning.strategies import LibraStrategy

    trainer = quiet_trainer(devices=2, strategy=LibraStrategy(context_parallel=2, pool_timeout=20), max_epochs=1)
    data = PackedDataModule(documents(2, prompts=False), PROMPT + ANSWER, num_workers=0)
    try:
        trainer.fit(OwnPositions(), datamodule=data)
    except Exception as error:
        return str(error)
    return "trained"


def test_positions_that_are_not_the_batch_s_are_refused(tmp_path: Path) -> None:
    says = run_ranks(refused, 2, tmp_path)
    assert any("was called with other position_ids than the batch's" in each for each in says), says
