"""DeepSpeed ZeRO-1, 2 and 3, in float32, which is its widest: against one process in float64."""

from __future__ import annotations

import importlib.util
import multiprocessing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.callbacks.test_loss_scaling import LR, Masked, largest_difference, replay
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

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")

STAGES = (1, 2, 3)
# Float32 has 24 bits: weights between 2 and 4 are exact to 2.4e-7, and a run makes some 40 updates.
TOLERANCE = 5e-6


class Bigram(BigramModel):
    def __init__(self, momentum: float) -> None:
        super().__init__(LR)
        self.momentum = momentum

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), LR, momentum=self.momentum)

    def loss(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return token_mean(self.head(self.embedding(input_ids)), labels)

    def weights(self) -> list[float]:
        import deepspeed

        parameters = list(self.parameters())
        with deepspeed.zero.GatheredParameters(parameters, enabled=hasattr(parameters[0], "ds_id")):
            return super().weights()


def fit(dataset: Any, *, world_size: int, stage: int, momentum: float = 0.0, **options: Any) -> dict[str, Any]:
    """Train under ZeRO; stage 0 stands for DDP."""
    from tests.strategies.deepspeed_cpu import CPUDeepSpeedStrategy

    strategy = CPUDeepSpeedStrategy(stage=stage) if stage else "ddp"
    return fit_recorded(Bigram(momentum), dataset, devices=world_size, strategy=strategy, **options)


def fit_every_stage() -> Any:
    masked = Masked(SIZE, longest=60)
    clip = partial(fit, masked, world_size=2, accumulate_grad_batches=3, gradient_clip_val=0.05)
    every = {
        "stages": [fit_all(partial(fit, world_size=2, stage=stage)) for stage in STAGES],
        "clipped": [clip(stage=stage) for stage in (0, *STAGES)],
        "collate_process": fit(masked, world_size=2, stage=2, data={"num_workers": 1}),
    }
    return {**every, "left": [str(process) for process in multiprocessing.active_children()]}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each of two ranks recorded."""
    return run_ranks(fit_every_stage, 2, tmp_path_factory.mktemp("deepspeed"))


@pytest.mark.parametrize("stage", STAGES)
def test_weights_equal_one_process_on_the_token_mean(runs: list[Any], stage: int) -> None:
    for window, *ranks in zip(WINDOWS, *(run["stages"][stage - 1]["masked"] for run in runs), strict=True):
        expected = replay(ranks, SIZE, window)
        assert largest_difference(expected, BigramModel(LR).weights()) > 1e-3
        for rank in ranks:
            assert largest_difference(rank["weights"], expected) < TOLERANCE


@pytest.mark.parametrize("stage", STAGES)
def test_ranks_without_data_leave_the_mean_exact(runs: list[Any], stage: int) -> None:
    for window, *ranks in zip(WINDOWS, *(run["stages"][stage - 1]["uneven"] for run in runs), strict=True):
        assert not all(indices for rank in ranks for indices in rank["indices"]), "no rank ran out of data"
        expected = replay(in_original_numbers(ranks), EVEN_SIZE, window)
        for rank in ranks:
            assert largest_difference(rank["weights"], expected) < TOLERANCE


@pytest.mark.parametrize("stage", STAGES)
def test_without_a_label_the_weights_stay(runs: list[Any], stage: int) -> None:
    """The module's own loss is 0/0 on every rank, and so would its gradient be."""
    for run in runs:
        assert run["stages"][stage - 1]["nothing"]["weights"] == BigramModel(LR).float().weights()


def test_clipping_and_updates_are_those_of_ddp(runs: list[Any]) -> None:
    """The engine's norm is that of the token mean, and a window that an epoch's end cuts is an update there, too."""
    for run in runs:
        ddp, *stages = run["clipped"]
        unclipped = run["stages"][0]["masked"][WINDOWS.index(3)]
        assert largest_difference(ddp["weights"], unclipped["weights"]) > 1e-3
        for stage in stages:
            assert largest_difference(stage["weights"], ddp["weights"]) < TOLERANCE
            assert stage["updates"] == ddp["updates"]


def test_a_loader_that_is_asked_for_twice_leaves_no_process(runs: list[Any]) -> None:
    """Lightning asks the datamodule once more, to read a batch size off the loader."""
    ranks = [run["collate_process"] for run in runs]
    expected = replay(ranks, SIZE, 1)
    for run in runs:
        assert run["left"] == []
        assert largest_difference(run["collate_process"]["weights"], expected) < TOLERANCE


def fit_windows(world_size: int) -> Any:
    masked = Masked(SIZE, longest=60)
    runs = [(stage, window) for stage in STAGES for window in WINDOWS]
    return [fit(masked, world_size=world_size, stage=stage, accumulate_grad_batches=window) for stage, window in runs]


@pytest.mark.full
def test_four_ranks_equal_one_process_on_the_token_mean(tmp_path: Path) -> None:
    results = run_ranks(fit_windows, 4, tmp_path, timeout=170, world_size=4)
    for window, *ranks in zip(WINDOWS * len(STAGES), *results, strict=True):
        expected = replay(ranks, SIZE, window)
        for rank in ranks:
            assert largest_difference(rank["weights"], expected) < TOLERANCE


def resume(folder: str) -> Any:
    return [fit_and_resume(partial(fit, world_size=2, stage=stage), f"{folder}/{stage}") for stage in STAGES]


@pytest.mark.full
def test_a_run_resumed_at_an_epoch_s_end_is_the_unbroken_run(tmp_path: Path) -> None:
    for rank in run_ranks(resume, 2, tmp_path, folder=str(tmp_path / "checkpoints")):
        for run in rank:
            whole, resumed = run["whole"], run["resumed"]
            rest = len(resumed["indices"])
            assert 0 < rest < len(whole["indices"])
            assert resumed["indices"] == whole["indices"][-rest:]
            assert resumed["weights"] == whole["weights"]
