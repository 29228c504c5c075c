"""Setting up a context-parallel run: settings that cannot work, late ranks, one process that trains again."""

from __future__ import annotations

import dataclasses
import random
import re
import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from torch.utils.data import DataLoader

from odb_libra_lightning.libra.active_attention import active
from odb_libra_lightning.strategies import LibraFSDPStrategy, LibraStrategy
from tests.launch import run_ranks
from tests.strategies.dense_decoder import Decoder, DenseDecoder, train_alone
from tests.strategies.libra_runs import (
    Case,
    CoreDecoder,
    check,
    check_updates,
    decoder_of,
    fit_case,
    record_of,
    run_in_turn,
    trainer_of,
    windows_of,
)
from tests.strategies.packs import Listed, alone, mixed

# Settings for two processes, and what the error must name: what was asked for, and what would fit.
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"cp": 3}, r"context_parallel=3 does not divide world_size=2.*\b1 or 2 would fit"),
    ({"cp": 4}, r"context_parallel=4 does not divide world_size=2.*\b1 or 2 would fit"),
    ({"cp": 1, "pool": 3}, r"pool_size=3 does not divide the 2 replicas.*\b1 or 2 would fit"),
    ({"cp": 2, "pool": 2}, r"pool_size=2 does not divide the 1 replicas?.*\b1 would fit"),
    ({"cp": 1, "pool": 1, "options": {"attention": "distca"}}, r"distca.*pool_size=1.*2"),
]
AT_ONCE: list[tuple[dict[str, Any], str]] = [
    ({"context_parallel": 0}, "context_parallel"),
    ({"pool_size": 0}, "pool_size"),
    ({"block_size": 0}, "block_size"),
    ({"block_size": 2.5}, "block_size"),
    ({"head_shards": -1}, "head_shards"),
    ({"attention": "flash"}, "flash.*distca.*libra.*ring.*ulysses"),
    ({"placement": "anywhere"}, "anywhere.*home_first"),
    ({"sequence_placement": "vsrp"}, "vsrp.*vrsp"),
    ({"tau": -0.1}, "tau"),
    ({"tau": float("nan")}, "tau"),
    ({"remember": "all"}, "all.*keep.*refetch"),
]


@pytest.mark.parametrize("strategy", [LibraStrategy, LibraFSDPStrategy])
@pytest.mark.parametrize(("settings", "names"), AT_ONCE, ids=str)
def test_a_setting_that_cannot_work_is_refused_when_it_is_given(strategy: Any, settings: Any, names: str) -> None:
    with pytest.raises(ValueError, match=names):
        strategy(**settings)


def refused() -> list[str]:
    said = []
    for settings, _ in REFUSED:
        case = Case(dp=2 // settings["cp"] or 1, **settings)
        trainer = trainer_of(case, devices=2)
        with pytest.raises(ValueError, match=r".") as error:
            trainer.fit(CoreDecoder(), train_dataloaders=DataLoader(Listed(mixed(2)), collate_fn=alone))
        said.append(str(error.value))
    assert active() is None
    return said


def test_degrees_that_do_not_fit_the_processes_are_refused_with_those_that_do(recorded: dict[str, list[Any]]) -> None:
    for rank in recorded["refused"]:
        for said, (_, names) in zip(rank, REFUSED, strict=True):
            assert re.search(names, said), said


class Late(CoreDecoder):
    """Each process is late in its own way, before the groups are made and after."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.rng = rng

    def wait(self) -> None:
        time.sleep(self.rng.random() * 0.4)

    def prepare_data(self) -> None:
        self.wait()

    def setup(self, stage: str) -> None:
        self.wait()

    def configure_model(self) -> None:
        self.wait()

    def on_train_start(self) -> None:
        self.wait()


def fit_late(times: int) -> Any:
    found = []
    for number in range(times):
        case = Case(dp=4, cp=1, pool=2, count=4) if number % 2 else Case(dp=2, cp=2, pool=1, count=4)
        rng = random.Random(time.time_ns())
        time.sleep(rng.random() * 0.4)
        found.append(fit_case(case, module=Late(rng), name=f"{number}"))
    return found


@pytest.mark.parametrize("times", [1, pytest.param(20, marks=[pytest.mark.full, pytest.mark.timeout(600)])])
def test_ranks_that_come_late_to_two_pools(times: int, tmp_path: Path) -> None:
    ranks = run_ranks(fit_late, 4, tmp_path, times=times, timeout=60 + 20 * times)
    for number, run in enumerate(zip(*ranks, strict=True)):
        check(Case(dp=4, cp=1, count=4) if number % 2 else Case(dp=2, cp=2, count=4), run)


AGAIN = Case(dp=1, cp=2, count=4)


def fit_twice() -> Any:
    """One trainer goes on for an epoch; then another trains the module, and then plain Lightning does."""
    module, trainer = decoder_of(AGAIN), trainer_of(AGAIN)
    loader = DataLoader(Listed(AGAIN.make_packs()), collate_fn=alone)
    trainer.fit(module, train_dataloaders=loader)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, train_dataloaders=loader)
    trainer_of(AGAIN).fit(module, train_dataloaders=loader)
    assert active() is None
    return {**record_of(module, trainer), "updates": len(module.gradients)}


def test_one_process_trains_again_with_the_same_trainer_and_another(recorded: dict[str, list[Any]]) -> None:
    ranks = recorded["twice"]
    thrice = dataclasses.replace(AGAIN, epochs=3)
    windows = windows_of(thrice, ranks, AGAIN.make_packs())
    module: Decoder = DenseDecoder()
    fits = [train_alone(windows[at : at + 4], packs_a_window=1, module=module) for at in (0, 4, 8)]
    fits[-1].gradients = [gradients for fit in fits for gradients in fit.gradients]
    fits[-1].norms = [norm for fit in fits for norm in fit.norms]
    check_updates(ranks, fits[-1])


class Recurrent(L.LightningModule):
    """Mixes rows without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = DenseDecoder()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.dense.token_loss(batch).mean()

    def configure_optimizers(self) -> Any:
        return self.dense.configure_optimizers()


def fit_without_attention() -> str:
    trainer = trainer_of(AGAIN)
    with pytest.raises(RuntimeError) as error:
        trainer.fit(Recurrent(), train_dataloaders=DataLoader(Listed(AGAIN.make_packs()), collate_fn=alone))
    return str(error.value)


def test_a_module_that_attends_by_itself_is_refused(recorded: dict[str, list[Any]]) -> None:
    for rank, said in enumerate(recorded["without_attention"]):
        assert f"rank {rank}" in said
        assert "core_attention" in said


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    calls = {"refused": (refused, {}), "without_attention": (fit_without_attention, {}), "twice": (fit_twice, {})}
    return run_in_turn(2, tmp_path_factory.mktemp("setup"), calls)
