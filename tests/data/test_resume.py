"""Training that is broken off and taken up again trains on what is left, each sample once."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from odb_libra_lightning import ODBDataModule, ODBLoader
from odb_libra_lightning.callbacks import TokenLossScaling
from odb_libra_lightning.callbacks.loader_access import batch_info
from tests.launch import run_ranks
from tests.modules import BigramModel, quiet_trainer
from tests.samples import Documents, identities, pad


class Seen(L.Callback):
    """The samples of each step, of this rank, by epoch of the loader."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, list[int]]] = []
        self.updates = 0

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        info = batch_info(trainer, batch_idx)
        self.steps.append((info.epoch, list(info.indices)))
        self.updates = trainer.global_step


class AsksForSteps(BigramModel):
    """Reads the number of steps where many modules do, for a schedule."""

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


def fit(
    folder: str, *, resume: str | None = None, asks: bool = False, accumulation: int = 1, **settings: Any
) -> list[tuple[int, list[int]]]:
    seen = Seen()
    trainer = quiet_trainer(
        devices=int(os.environ["WORLD_SIZE"]),
        strategy="ddp",
        max_epochs=3,
        accumulate_grad_batches=accumulation,
        enable_checkpointing=True,
        callbacks=[
            seen,
            ModelCheckpoint(
                folder, filename="{step}", save_top_k=-1, every_n_train_steps=1, save_on_train_epoch_end=False
            ),
            ModelCheckpoint(folder, filename="end{epoch}", save_top_k=-1, save_on_train_epoch_end=True),
        ],
    )
    data = ODBDataModule(Documents(50), pad, **{"l_max": 900, "num_workers": 0, "buffer_size": 16, **settings})
    trainer.fit(AsksForSteps() if asks else BigramModel(), datamodule=data, ckpt_path=resume)
    return seen.steps


def fit_and_resume(folder: str, runs: list[dict[str, Any]], **settings: Any) -> Any:
    """A whole run, and what runs from its checkpoints see; each checkpoint is named by its number of updates."""
    whole = fit(folder, **settings)
    resumed = []
    for number, run in enumerate(runs):
        name, changed = run["from"], {k: v for k, v in run.items() if k != "from"}
        resumed.append(fit(f"{folder}/{number}", resume=f"{folder}/{name}.ckpt", **{**settings, **changed}))
    return {"whole": whole, "resumed": resumed}


def of_epoch(steps: list[Any], epoch: int) -> Counter[int]:
    return Counter(identity for number, indices in steps if number == epoch for identity in indices)


STOPS = [1, 2, 3, 5, 8, 9]


@pytest.mark.parametrize("asks", [pytest.param(False, marks=pytest.mark.full), True])
def test_each_rank_goes_on_with_what_it_has_left(asks: bool, tmp_path: Path) -> None:
    runs = [{"from": f"step={stop}"} for stop in STOPS] + [{"from": "endepoch=0"}, {"from": "endepoch=1"}]
    for rank in run_ranks(fit_and_resume, 2, tmp_path, folder=str(tmp_path / "checkpoints"), runs=runs, asks=asks):
        whole = rank["whole"]
        ends = [sum(epoch <= last for epoch, _ in whole) for last in (0, 1)]
        for run, resumed in zip([*STOPS, *ends], rank["resumed"], strict=True):
            for epoch in range(3):
                before = of_epoch(whole[:run], epoch)
                assert before + of_epoch(resumed, epoch) == of_epoch(whole, epoch), f"epoch {epoch}, stopped at {run}"


@pytest.mark.parametrize(
    "changed",
    [
        {"num_workers": 2, "buffer_size": 40, "l_max": 500},
        {"mode": "non_join"},
        pytest.param({"pacing": False}, marks=pytest.mark.full),
    ],
)
def test_workers_buffer_budget_and_mode_may_change(changed: dict[str, Any], tmp_path: Path) -> None:
    runs = [{"from": "step=3", **changed}]
    ranks = run_ranks(fit_and_resume, 2, tmp_path, folder=str(tmp_path / "checkpoints"), runs=runs)
    for epoch in range(3):
        before = sum((of_epoch(rank["whole"][:3], epoch) for rank in ranks), Counter())
        after = sum((of_epoch(rank["resumed"][0], epoch) for rank in ranks), Counter())
        assert before + after == Counter(range(50))


def test_an_accumulation_window_that_a_stop_cuts_is_trained_on_again(tmp_path: Path) -> None:
    """Its gradient is lost with the process; the trainer counts on within the window, and so must the loader."""
    folder = tmp_path / "checkpoints"
    settings = {"num_workers": 0, "buffer_size": 16, "l_max": 500}

    class StopsWithin(Seen):
        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            super().on_train_batch_end(trainer, *args)
            if len(self.steps) == 5:
                trainer.save_checkpoint(folder / "cut.ckpt")
                trainer.should_stop = True

    def run(callback: Seen, ckpt: Any = None) -> None:
        trainer = quiet_trainer(max_epochs=1, accumulate_grad_batches=3, callbacks=[TokenLossScaling(), callback])
        trainer.fit(BigramModel(), datamodule=ODBDataModule(Documents(50), pad, **settings), ckpt_path=ckpt)

    first, second = StopsWithin(), Seen()
    run(first)
    run(second, folder / "cut.ckpt")
    assert of_epoch(first.steps[:3], 0) + of_epoch(second.steps, 0) == Counter(range(50))


def fit_on_other_ranks(folder: str, resume: str) -> Any:
    return fit(folder + "/resumed", resume=f"{folder}/{resume}.ckpt")


@pytest.mark.parametrize(
    ("first", "then"), [(2, 1), *(pytest.param(*ranks, marks=pytest.mark.full) for ranks in ((1, 2), (2, 3)))]
)
def test_what_is_left_is_shared_out_over_another_number_of_ranks(first: int, then: int, tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoints")
    stop = 4
    begun = run_ranks(fit_and_resume, first, tmp_path, folder=folder, runs=[])
    before = sum((of_epoch(rank["whole"][:stop], 0) for rank in begun), Counter())
    resumed = run_ranks(fit_on_other_ranks, then, tmp_path, folder=folder, resume=f"step={stop}")
    after = sum((of_epoch(steps, 0) for steps in resumed), Counter())
    assert set(before) | set(after) == set(range(50))
    assert not set(before) & set(after), "what is trained on is not drawn again"
    assert after.total() - len(after) == -len(after) % then, "but for what makes shares equal"
    assert sum((of_epoch(steps, 1) for steps in resumed), Counter()).total() == 50 + -50 % then


def test_a_checkpoint_of_an_epoch_s_last_step_goes_on_with_the_next_epoch_in_whole_windows(tmp_path: Path) -> None:
    def fit_once(resume: Path | None = None) -> tuple[BigramModel, Seen]:
        module, seen = BigramModel(), Seen()
        steps = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, every_n_train_steps=1)
        trainer = quiet_trainer(
            devices=1, max_epochs=3, accumulate_grad_batches=2, enable_checkpointing=True, callbacks=[steps, seen]
        )
        trainer.fit(module, datamodule=ODBDataModule(Documents(31), pad, l_max=900, num_workers=0), ckpt_path=resume)
        return module, seen

    _, whole = fit_once()
    per_epoch = sum(epoch == 0 for epoch, _ in whole.steps)
    _, resumed = fit_once(tmp_path / f"step={-(-per_epoch // 2)}.ckpt")
    assert resumed.steps == whole.steps[per_epoch:]


def test_stopping_at_a_number_of_steps_and_going_on_by_epochs_loses_nothing() -> None:
    seen, module = Seen(), BigramModel()
    data = ODBDataModule(Documents(50), pad, l_max=900, num_workers=0, buffer_size=16)
    trainer = quiet_trainer(max_steps=3, max_epochs=2, callbacks=[seen])
    trainer.fit(module, datamodule=data)
    assert len(seen.steps) == 3
    trainer.fit_loop.epoch_loop.max_steps = -1
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, datamodule=data)
    assert of_epoch(seen.steps, 0) == Counter(range(50))


class SavesWithin(L.Callback):
    """Writes a checkpoint in the middle of a step, as a handler of a signal or of an exception does."""

    def __init__(self, path: Path, hook: str, last: bool) -> None:
        self.path, self.hook, self.last = path, hook, last

    def _save(self, trainer: L.Trainer, hook: str) -> None:
        batches = trainer.fit_loop.epoch_loop.batch_progress
        if hook == self.hook and (batches.is_last_batch if self.last else batches.current.ready == 4):
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        self._save(trainer, "on_train_batch_start")

    def on_before_backward(self, trainer: L.Trainer, *args: Any) -> None:
        self._save(trainer, "on_before_backward")

    def on_before_zero_grad(self, trainer: L.Trainer, *args: Any) -> None:
        self._save(trainer, "on_before_zero_grad")


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_before_backward", "on_before_zero_grad"])
def test_a_checkpoint_written_within_a_step_repeats_that_step(hook: str, last: bool, tmp_path: Path) -> None:
    def run(callbacks: list[L.Callback], ckpt: Path | None = None) -> Seen:
        seen = Seen()
        trainer = quiet_trainer(max_epochs=2, callbacks=[seen, *callbacks])
        data = ODBDataModule(Documents(50), pad, l_max=900, num_workers=0, buffer_size=16)
        trainer.fit(BigramModel(), datamodule=data, ckpt_path=ckpt)
        return seen

    first = run([SavesWithin(tmp_path / "within.ckpt", hook, last)])
    second = run([], tmp_path / "within.ckpt")
    assert of_epoch(first.steps[: -1 if last else 3], 0) + of_epoch(second.steps, 0) == Counter(range(50))
    assert of_epoch(second.steps, 1) == Counter(range(50))


def test_evaluating_a_checkpoint_does_not_move_training(tmp_path: Path) -> None:
    path = tmp_path / "some.ckpt"
    data = ODBDataModule(Documents(50), pad, l_max=900, val_dataset=Documents(4), num_workers=0, buffer_size=16)
    seen = Seen()
    trainer = quiet_trainer(max_steps=3, callbacks=[seen])
    trainer.fit(BigramModel(), datamodule=data)
    trainer.save_checkpoint(path)
    quiet_trainer().validate(BigramModel(), datamodule=data, ckpt_path=path, weights_only=False)
    fresh = Seen()
    quiet_trainer(max_epochs=1, callbacks=[fresh]).fit(BigramModel(), datamodule=data)
    assert of_epoch(fresh.steps, 0) == Counter(range(50))


@pytest.mark.parametrize("limit", [3, 5])
def test_a_smaller_limit_than_where_training_stands_begins_the_next_epoch(limit: int, tmp_path: Path) -> None:
    def run(callbacks: list[L.Callback], ckpt: Path | None = None, **settings: Any) -> Seen:
        seen = Seen()
        trainer = quiet_trainer(
            max_epochs=2, callbacks=[seen, *callbacks], enable_checkpointing=bool(callbacks), **settings
        )
        data = ODBDataModule(Documents(50), pad, l_max=500, num_workers=0, buffer_size=16)
        trainer.fit(BigramModel(), datamodule=data, ckpt_path=ckpt)
        return seen

    run([ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, every_n_train_steps=5)], max_steps=5)
    second = run([], tmp_path / "step=5.ckpt", limit_train_batches=limit)
    assert [epoch for epoch, _ in second.steps] == [1] * limit


@pytest.mark.parametrize(
    "name",
    [
        "step=3",
        pytest.param("step=7", marks=pytest.mark.full),
        "endepoch=0",
        pytest.param("endepoch=1", marks=pytest.mark.full),
    ],
)
def test_a_loader_given_to_fit_itself_resumes_as_well(name: str, tmp_path: Path) -> None:
    def fit_once(resume: Path | None = None) -> Seen:
        seen = Seen()
        checkpoints = [
            ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, every_n_train_steps=1),
            ModelCheckpoint(tmp_path, filename="end{epoch}", save_top_k=-1, save_on_train_epoch_end=True),
        ]
        trainer = quiet_trainer(
            max_epochs=3,
            accumulate_grad_batches=2,
            enable_checkpointing=True,
            callbacks=[TokenLossScaling(), seen, *checkpoints],
        )
        trainer.fit(BigramModel(), train_dataloaders=loader(50, l_max=900, accumulation=1), ckpt_path=resume)
        return seen

    whole = fit_once()
    resumed = fit_once(tmp_path / f"{name}.ckpt")
    ends = {f"endepoch={last}": sum(epoch <= last for epoch, _ in whole.steps) for last in (0, 1)}
    stop = ends.get(name) or 2 * int(name[5:])
    for epoch in range(3):
        assert of_epoch(whole.steps[:stop], epoch) + of_epoch(resumed.steps, epoch) == Counter(range(50))


def test_a_loader_given_to_another_trainer_begins_anew() -> None:
    given = loader(50, l_max=900)
    for _ in range(2):
        seen = Seen()
        quiet_trainer(max_steps=4, callbacks=[TokenLossScaling(), seen]).fit(BigramModel(), train_dataloaders=given)
        assert [epoch for epoch, _ in seen.steps] == [0] * 4


def loader(size: int = 60, **settings: Any) -> ODBLoader:
    return ODBLoader(Documents(size), pad, **{"l_max": 600, "num_workers": 0, "buffer_size": 16, **settings})


@pytest.mark.parametrize("mode", ["join", "non_join"])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_plain_loop_resumes_after_every_batch(mode: str, accumulation: int) -> None:
    settings = {"mode": mode, "accumulation": accumulation}
    whole = loader(**settings)
    batches = [[identities(batch) for batch in whole] for _ in range(2)]
    for stop in range(1, len(batches[1])):
        broken = loader(**settings)
        list(broken)
        for number, _ in enumerate(broken, 1):
            if number == stop:
                state = broken.state_dict()
                break
        full = stop - stop % accumulation
        assert (state["epoch"], state["steps"]) == (1, full)
        resumed = loader(**settings)
        resumed.load_state_dict(state)
        rest = [identities(batch) for batch in resumed]
        done = Counter(i for batch in batches[1][:full] for i in batch)
        assert done + Counter(i for batch in rest for i in batch) == Counter(range(60))
        assert resumed.info.samples_done == resumed.info.samples_total == 60
        again = [identities(batch) for batch in resumed]
        assert Counter(i for batch in again for i in batch) == Counter(range(60))
        assert resumed.info.epoch == 2


def test_a_state_is_not_forgotten_before_something_is_trained_on() -> None:
    first = loader()
    next(iter(first))
    state = first.state_dict()
    other = loader(l_max=700)
    other.load_state_dict(state)
    assert other.state_dict()["done"].tolist() == state["done"].tolist()


def test_resuming_reads_nothing_again() -> None:
    read: list[int] = []

    class Counting(Documents):
        def __getitem__(self, index: int) -> Any:
            read.append(index)
            return super().__getitem__(index)

    first = ODBLoader(Counting(300), pad, l_max=600, num_workers=0, buffer_size=16)
    seen: list[int] = []
    for batch in first:
        seen += identities(batch)
        if len(seen) > 200:
            break
    resumed = ODBLoader(Counting(300), pad, l_max=600, num_workers=0, buffer_size=16)
    resumed.load_state_dict(first.state_dict())
    read.clear()
    list(resumed)
    assert sorted(read) == sorted(set(range(300)) - set(seen))


@pytest.mark.parametrize(
    ("changed", "says"),
    [({"size": 61}, "a dataset of so many samples=60"), ({"seed": 3}, "seed=0"), ({"shuffle": False}, "shuffle=True")],
)
def test_a_state_within_an_epoch_is_refused_by_another_order(changed: dict[str, Any], says: str) -> None:
    first = loader()
    next(iter(first))
    state = first.state_dict()
    with pytest.raises(ValueError, match=says):
        loader(**changed).load_state_dict(state)


def test_a_checkpoint_of_an_epoch_s_end_allows_other_settings() -> None:
    first = loader(20)
    list(first)
    second = loader(21, l_max=300, seed=5)
    second.load_state_dict(first.state_dict())
    list(second)
    assert second.info.epoch == 1


def test_something_else_than_a_state_is_refused() -> None:
    with pytest.raises(ValueError, match="no state of a loader"):
        loader().load_state_dict({"epoch": 1, "batches": 3})
