"""Training over ranks, against one process that computes the token mean over the same samples itself."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.nn import functional as F

from odb_libra_lightning import ODBDataModule
from odb_libra_lightning.callbacks import TokenLossScaling
from odb_libra_lightning.callbacks.loader_access import batch_info
from tests.launch import run_ranks
from tests.modules import BigramModel, quiet_trainer
from tests.samples import Documents, pad

LR = 0.5


class Masked(Documents):
    """A prompt of each document bears no loss; of every fourth document nothing does."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        sample = super().__getitem__(index)
        tokens = (torch.arange(self.length(index)) * 31 + index * 7) % 509
        tokens[0] = index
        labels = tokens.clone()
        labels[: self.length(index) // 3 + 1] = -100
        if index % 4 == 0:
            labels[:] = -100
        return {**sample, "input_ids": tokens, "labels": labels}


class Recorder(L.Callback):
    def __init__(self) -> None:
        self.indices: list[list[int]] = []
        self.weights: list[float] = []

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        info = batch_info(trainer, batch_idx)
        self.indices.append(list(info.indices))
        self.weights.append(info.loss_weight)


def fit_masked(devices: int, runs: list[dict[str, Any]]) -> Any:
    """Several trainings, one after the other in the same processes."""
    results = []
    for run in runs:
        recorder, module = Recorder(), BigramModel(LR)
        accumulation = run.pop("accumulation")
        data = ODBDataModule(Masked(run.pop("size"), longest=60), pad, num_workers=0, buffer_size=16, **run)
        quiet_trainer(
            devices=devices,
            strategy="ddp",
            max_epochs=2,
            accumulate_grad_batches=accumulation,
            callbacks=[recorder],
        ).fit(module, datamodule=data)
        results.append(
            {
                "indices": recorder.indices,
                "loss_weights": recorder.weights,
                "weights": module.weights(),
                "losses": module.losses,
            }
        )
    return results


def replay(ranks: list[Any], size: int, accumulation: int, *, by: str = "token") -> list[float]:
    """Weights after the same updates, each on the mean over its window, in one process."""
    module, dataset = BigramModel(LR), Masked(size, longest=60)
    optimizer = module.configure_optimizers()
    steps = list(zip(*(rank["indices"] for rank in ranks), strict=True))
    half = len(steps) // 2
    while sum(len(i) for step in steps[:half] for i in step) < sum(len(i) for step in steps for i in step) / 2:
        half += 1
    for epoch in (steps[:half], steps[half:]):
        for first in range(0, len(epoch), accumulation):
            optimizer.zero_grad()
            batches = [b for step in epoch[first : first + accumulation] for b in step if b]
            total = torch.zeros((), dtype=torch.float64)
            count = 0
            for batch in batches:
                padded = pad([dataset[i] for i in batch])
                logits = module.head(module.embedding(padded["input_ids"]))[:, :-1].flatten(0, 1)
                labels = padded["labels"][:, 1:].flatten()
                tokens = int((labels != -100).sum())
                loss = F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
                total = total + (loss if by == "token" else loss * len(batch) / max(tokens, 1))
                count += tokens if by == "token" else len(batch) * (tokens > 0)
            if count:
                (total / count).backward()
                optimizer.step()
    return module.weights()


def largest_difference(a: list[float], b: list[float]) -> float:
    return float((torch.tensor(a, dtype=torch.float64) - torch.tensor(b, dtype=torch.float64)).abs().max())


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(4, marks=pytest.mark.full)])
def test_weights_equal_one_process_on_the_token_mean(world_size: int, tmp_path: Path) -> None:
    size = 45  # of which two or four ranks repeat a few
    runs = [
        {"accumulation": accumulation, "size": size, "l_max": 150, "mode": mode}
        for accumulation in (1, 3, 4)
        for mode in ("join", "non_join")
    ]
    results = run_ranks(fit_masked, world_size, tmp_path, devices=world_size, runs=runs)
    for run, *ranks in zip(runs, *results, strict=True):
        expected = replay(ranks, size, run["accumulation"])
        assert largest_difference(expected, BigramModel(LR).weights()) > 1e-3
        for rank in ranks:
            assert largest_difference(rank["weights"], expected) < 1e-10
            assert all(torch.isfinite(torch.tensor(rank["losses"]))), "fully masked batches run on a stand-in"
        assert any(weight == 0.0 for rank in ranks for weight in rank["loss_weights"]), "some batches bear no loss"


def test_sample_scaling_equals_one_process_on_the_sample_weighted_mean(tmp_path: Path) -> None:
    run = {"accumulation": 2, "size": 23, "l_max": 400, "loss_scaling": "sample"}
    results = run_ranks(fit_masked, 2, tmp_path, devices=2, runs=[run])
    ranks = [result[0] for result in results]
    assert all(torch.isfinite(torch.tensor(loss)) for rank in ranks for loss in rank["losses"])
    assert largest_difference(ranks[0]["weights"], replay(ranks, 23, 2, by="sample")) < 1e-10


class Given:
    """Two samples with given logits and labels, one a rank; every position of the loss is the sample's value."""

    def __init__(self, labels: list[list[int]], values: list[float]) -> None:
        self.labels, self.values = labels, values

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {
            "input_ids": torch.arange(len(self.labels[index])),
            "labels": torch.tensor(self.labels[index]),
            "value": torch.tensor(self.values[index], dtype=torch.float64),
        }


def first(samples: list[Any]) -> Any:
    return {name: value[None] for name, value in samples[0].items()}


class MeanOfValues(L.LightningModule):
    """The gradient of its one parameter is the data-parallel loss."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones((), dtype=torch.float64))
        self.losses: list[float] = []
        self.gradients: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        bears_loss = batch["labels"] != -100
        loss = (self.scale * batch["value"] * bears_loss).sum() / bears_loss.sum()
        self.losses.append(float(loss.detach()))
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert self.scale.grad is not None
        self.gradients.append(float(self.scale.grad))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.0)


def fit_given(runs: list[dict[str, Any]]) -> Any:
    results = []
    for run in runs:
        module = MeanOfValues()
        data = ODBDataModule(
            Given(run["labels"], run["values"]),
            first,
            l_max=1,
            num_workers=0,
            shuffle=False,
            causal_shift=False,
            loss_scaling=run["loss_scaling"],
        )
        quiet_trainer(devices=2, strategy="ddp", max_epochs=1).fit(module, datamodule=data)
        results.append({"losses": module.losses, "gradients": module.gradients})
    return results


def test_one_label_beside_nine_weighs_a_tenth(tmp_path: Path) -> None:
    labels, values = [[1] + [-100] * 8, [1] * 9], [4.0, 1.0]
    runs = [{"labels": labels, "values": values, "loss_scaling": mode} for mode in ("token", "sample", "none")]
    for rank in run_ranks(fit_given, 2, tmp_path, runs=runs):
        assert [result["gradients"] for result in rank] == [[pytest.approx(1.3)], [2.5], [2.5]]


def test_one_rank_fully_masked_leaves_the_other_s_mean_and_no_nan(tmp_path: Path) -> None:
    """The module's own loss of a masked batch would be 0/0; nothing of it may reach the other rank."""
    run = {
        "labels": [[-100] * 4, [1] * 4, [-100] * 4, [1] * 4],
        "values": [4.0, 3.0, 9.0, 5.0],
        "loss_scaling": "token",
    }
    for (result,) in run_ranks(fit_given, 2, tmp_path, runs=[run]):
        assert sorted(result["gradients"]) == [3.0, 5.0]
        assert all(torch.isfinite(torch.tensor(result["losses"])))


def fit_all_masked() -> Any:
    module = MeanOfValues()
    data = ODBDataModule(Given([[-100] * 4] * 4, [1.0] * 4), first, l_max=1, num_workers=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quiet_trainer(devices=2, strategy="ddp", max_epochs=1).fit(module, datamodule=data)
    warned = [str(w.message) for w in caught if "no label bears loss" in str(w.message)]
    return {"gradients": module.gradients, "warned": len(warned)}


def test_all_masked_is_a_zero_gradient_and_a_warning(tmp_path: Path) -> None:
    """The module's own loss is 0/0 on every rank, and so would its gradient be."""
    ranks = run_ranks(fit_all_masked, 2, tmp_path)
    for rank in ranks:
        assert rank["gradients"] == [0.0, 0.0]
    assert ranks[0]["warned"] > 0


def test_the_callback_works_without_the_datamodule() -> None:
    from odb_libra_lightning import ODBLoader

    recorder, module = Recorder(), BigramModel(LR)
    loader = ODBLoader(Masked(30, longest=60), pad, l_max=150, num_workers=0, accumulation=3)
    quiet_trainer(devices=1, max_epochs=2, accumulate_grad_batches=3, callbacks=[TokenLossScaling(), recorder]).fit(
        module, train_dataloaders=loader
    )
    ranks = [{"indices": recorder.indices}]
    assert largest_difference(module.weights(), replay(ranks, 30, 3)) < 1e-10
