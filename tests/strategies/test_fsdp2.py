"""FSDP2 (`ModelParallelStrategy`): parameters are DTensors, and gradients are scattered within the backward pass."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import FSDPModule, fully_shard

from tests.callbacks.test_loss_scaling import LR, largest_difference, replay
from tests.launch import run_ranks
from tests.modules import BigramModel
from tests.strategies.masked_runs import (
    EVEN_SIZE,
    SIZE,
    WINDOWS,
    fit_all,
    fit_and_resume,
    fit_recorded,
    in_original_numbers,
    token_mean,
)


class Sharded(BigramModel):
    """The same model as one network: the embedding is freed between its uses, the head stays whole until the end."""

    def __init__(self, momentum: float) -> None:
        super().__init__(LR)
        self.momentum = momentum  # what an optimizer's state is made of; a checkpoint without any cannot be read
        self.network = torch.nn.Sequential(self.embedding, self.head)
        del self.embedding, self.head

    def configure_model(self) -> None:
        if not isinstance(self.network, FSDPModule):
            for part in (self.network[0], self.network):
                fully_shard(part, mesh=self.device_mesh["data_parallel"])

    def loss(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return token_mean(self.network(input_ids), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), LR, momentum=self.momentum)

    def weights(self) -> list[float]:
        return torch.cat([p.detach().full_tensor().flatten() for p in self.parameters()]).tolist()


def fit(
    dataset: Any, *, world_size: int, one_file: bool = False, momentum: float = 0.0, **options: Any
) -> dict[str, Any]:
    strategy = ModelParallelStrategy(world_size, 1, save_distributed_checkpoint=not one_file)
    return fit_recorded(Sharded(momentum), dataset, devices=world_size, strategy=strategy, **options)


def fit_all_sharded(world_size: int) -> Any:
    return fit_all(partial(fit, world_size=world_size))


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.full)], ids=lambda ranks: f"{ranks}_ranks")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each rank recorded."""
    folder = tmp_path_factory.mktemp("fsdp2")
    return run_ranks(fit_all_sharded, request.param, folder, world_size=request.param)


def test_weights_equal_one_process_on_the_token_mean(runs: list[Any]) -> None:
    for window, *ranks in zip(WINDOWS, *(run["masked"] for run in runs), strict=True):
        expected = replay(ranks, SIZE, window)
        assert largest_difference(expected, BigramModel(LR).weights()) > 1e-3
        for rank in ranks:
            assert largest_difference(rank["weights"], expected) < 1e-10


def test_ranks_without_data_leave_the_mean_exact(runs: list[Any]) -> None:
    for window, *ranks in zip(WINDOWS, *(run["uneven"] for run in runs), strict=True):
        assert not all(indices for rank in ranks for indices in rank["indices"]), "no rank ran out of data"
        expected = replay(in_original_numbers(ranks), EVEN_SIZE, window)
        for rank in ranks:
            assert largest_difference(rank["weights"], expected) < 1e-10


def test_without_a_label_the_weights_stay(runs: list[Any]) -> None:
    """The module's own loss is 0/0 on every rank, and so would its gradient be."""
    for run in runs:
        assert run["nothing"]["weights"] == BigramModel(LR).weights()


def resume(folder: str, one_file: bool) -> Any:
    return fit_and_resume(partial(fit, world_size=2, one_file=one_file), folder)


@pytest.mark.parametrize("one_file", [False, pytest.param(True, marks=pytest.mark.full)], ids=["shards", "one_file"])
def test_a_run_resumed_at_an_epoch_s_end_is_the_unbroken_run(one_file: bool, tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoints")
    for rank in run_ranks(resume, 2, tmp_path, folder=folder, one_file=one_file):
        whole, resumed = rank["whole"], rank["resumed"]
        rest = len(resumed["indices"])
        assert 0 < rest < len(whole["indices"])
        assert resumed["indices"] == whole["indices"][-rest:]
        assert resumed["weights"] == whole["weights"]
        assert resumed["updates"] == whole["updates"]
