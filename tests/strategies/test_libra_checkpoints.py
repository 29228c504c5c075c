"""A checkpoint of a run with Libra is a plain one, and a run goes on from it with other degrees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from tests.launch import run_ranks
from tests.modules import quiet_trainer
from tests.strategies.dense_decoder import DenseDecoder, Pack, Trained, largest_gap, train_alone, unpadded
from tests.strategies.libra_runs import Case, as_arguments, decoder_of, record_of, run_in_turn, trainer_of, windows_of
from tests.strategies.packs import Listed, alone

# Every update is of four packs, and Lightning's sampler deals the same four to it whatever the number of replicas.
PACKS, EPOCHS = 12, 3
SAVED = Case(dp=2, cp=2, pool=2, accumulate=2, count=PACKS, epochs=EPOCHS)
RESUMED = {
    4: [
        Case(dp=4, cp=1, pool=4, accumulate=1, count=PACKS, epochs=EPOCHS),
        Case(dp=1, cp=4, accumulate=4, count=PACKS, epochs=EPOCHS, options={"attention": "ring"}),
    ],
    2: [
        Case(dp=1, cp=2, accumulate=4, count=PACKS, epochs=EPOCHS),
        Case(dp=2, cp=1, pool=1, accumulate=2, count=PACKS, epochs=EPOCHS),
    ],
}


def fit_all(cases: list[dict[str, Any]], folder: str, checkpoint: str | None = None) -> list[Any]:
    """Train from a checkpoint, or from the start with one at each epoch's end."""
    found = []
    for case in (Case(**each) for each in cases):
        ends = ModelCheckpoint(folder, filename="end{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
        callbacks = [] if checkpoint else [ends]
        module, trainer = decoder_of(case), trainer_of(case, callbacks=callbacks, enable_checkpointing=not checkpoint)
        loader = DataLoader(Listed(case.make_packs()), collate_fn=alone)
        trainer.fit(module, train_dataloaders=loader, ckpt_path=checkpoint)
        found.append(record_of(module, trainer))
    return found


CHECKPOINT = "endepoch=0.ckpt"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, list[Any]], Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    calls = {
        "unbroken": (fit_all, {"cases": as_arguments([SAVED]), "folder": str(folder)}),
        "resumed": (fit_all, resume(RESUMED[4], folder)),
    }
    return run_in_turn(4, folder, calls), folder


def resume(cases: list[Case], folder: Path) -> dict[str, Any]:
    return {"cases": as_arguments(cases), "folder": str(folder), "checkpoint": str(folder / CHECKPOINT)}


@pytest.fixture(scope="module")
def unbroken(recorded: Any) -> tuple[list[Any], Trained, Path]:
    results, folder = recorded
    ranks = [rank[0] for rank in results["unbroken"]]
    windows = windows_of(SAVED, ranks, SAVED.make_packs())
    expected = train_alone(windows, packs_a_window=4)
    for rank in ranks:
        assert largest_gap(rank["weights"], expected.weights) < 1e-10
    return ranks, expected, folder / CHECKPOINT


def check_resumed(ranks: list[list[Any]], expected: Trained) -> None:
    for rank in ranks:
        for run in rank:
            assert len(run["packs"]) == EPOCHS - 1
            assert largest_gap(run["weights"], expected.weights) < 1e-10


def test_a_run_goes_on_with_other_degrees(recorded: Any, unbroken: Any) -> None:
    check_resumed(recorded[0]["resumed"], unbroken[1])


@pytest.mark.full
def test_a_run_goes_on_with_other_processes(unbroken: Any, tmp_path: Path) -> None:
    _, expected, checkpoint = unbroken
    check_resumed(run_ranks(fit_all, 2, tmp_path, **resume(RESUMED[2], checkpoint.parent)), expected)


def test_a_checkpoint_is_read_without_the_package(unbroken: Any) -> None:
    ranks, _, checkpoint = unbroken
    saved = torch.load(checkpoint, weights_only=True)["state_dict"]
    module = DenseDecoder.load_from_checkpoint(checkpoint, weights_only=True)
    assert module.weights() == {name: values.flatten().tolist() for name, values in saved.items()}
    windows = windows_of(SAVED, ranks, SAVED.make_packs())
    after_an_epoch = train_alone(windows[:3], packs_a_window=4)
    assert largest_gap(module.weights(), after_an_epoch.weights) < 1e-10


class OneProcess(DenseDecoder):
    """Trains on the packs of the epoch that it is in, in the order in which the ranks together did."""

    def __init__(self, packs: list[Pack]) -> None:
        super().__init__()
        self.all_packs = packs

    def train_dataloader(self) -> Any:
        first = self.current_epoch * PACKS
        return DataLoader(Listed([unpadded(each) for each in self.all_packs[first : first + PACKS]]), collate_fn=alone)


def test_one_process_goes_on_without_the_strategy(unbroken: Any) -> None:
    ranks, expected, checkpoint = unbroken
    packs = [pack for window in windows_of(SAVED, ranks, SAVED.make_packs()) for pack in window]
    module = OneProcess(packs)
    trainer = quiet_trainer(
        devices=1, max_epochs=EPOCHS, accumulate_grad_batches=4, reload_dataloaders_every_n_epochs=1
    )
    trainer.fit(module, ckpt_path=checkpoint)
    assert largest_gap(module.weights(), expected.weights) < 1e-10
