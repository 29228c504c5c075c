"""PackedDataModule under the real Trainer: exact gradients, lengths, windows and resumption, on one and two ranks."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy

from odb_libra_lightning import PackedDataModule
from odb_libra_lightning.callbacks import RunSummary, SampleProgressBar, TokenLossScaling
from odb_libra_lightning.callbacks.loader_access import batch_info
from odb_libra_lightning.data.documents import open_documents
from odb_libra_lightning.data.packed_loader import PackedLoader
from odb_libra_lightning.data.window_log import check_step_equivalence
from odb_libra_lightning.strategies import LibraStrategy
from tests.data.packed_documents import Numbered, SmallIds
from tests.launch import run_ranks, start_ranks
from tests.modules import BigramModel, quiet_trainer

SIZE, ROWS = 38, 64  # 19 packed sequences


class Seen(L.Callback):
    """Packed sequences of each step, of this rank, by epoch of the loader."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, list[int]]] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        info = batch_info(trainer, batch_idx)
        self.steps.append((info.epoch, list(info.indices)))


def fit(
    folder: str,
    *,
    accumulation: int,
    resume: str | None = None,
    epochs: int = 2,
    callbacks: list[L.Callback] | None = None,
    trainer_settings: dict[str, Any] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    seen, module = Seen(), BigramModel()
    trainer = quiet_trainer(
        devices=int(os.environ.get("WORLD_SIZE", "1")),
        strategy="ddp" if "WORLD_SIZE" in os.environ else "auto",
        max_epochs=epochs,
        accumulate_grad_batches=accumulation,
        enable_checkpointing=True,
        callbacks=[
            seen,
            ModelCheckpoint(
                folder, filename="{step}", save_top_k=-1, every_n_train_steps=1, save_on_train_epoch_end=False
            ),
            *(callbacks or []),
        ],
        **(trainer_settings or {}),
    )
    data = PackedDataModule(SmallIds(SIZE, masked=True), ROWS, **{"num_workers": 0, **settings})
    trainer.fit(module, datamodule=data, ckpt_path=resume)
    return {
        "steps": seen.steps,
        "weights": module.weights(),
        "updates": trainer.global_step,
        "batches": trainer.num_training_batches,
        "expected_updates": trainer.estimated_stepping_batches,
        "evaluated": module.evaluated,
    }


def fit_and_resume(folder: str, stops: list[int], **settings: Any) -> Any:
    log = {"window_log": f"{folder}/whole.jsonl"}
    whole = fit(folder, **log, **settings)
    resumed = [
        fit(f"{folder}/{stop}", resume=f"{folder}/step={stop}.ckpt", window_log=f"{folder}/{stop}.jsonl", **settings)
        for stop in stops
    ]
    return {"whole": whole, "resumed": resumed}


@pytest.mark.parametrize(
    ("world_size", "accumulation"),
    [pytest.param(1, 1, marks=pytest.mark.full), (1, 3), pytest.param(2, 1, marks=pytest.mark.full), (2, 3)],
)
def test_a_run_that_goes_on_has_the_weights_of_one_that_was_not_broken_off(
    world_size: int, accumulation: int, tmp_path: Path
) -> None:
    """To the last bit, from the middle of an epoch, from its last step, and from the next epoch."""
    sequences = len(PackedLoader(open_documents(Numbered(SIZE)), ROWS))
    micro_steps = -(-sequences // world_size)
    updates = -(-micro_steps // accumulation)
    assert sequences % (world_size * accumulation) or accumulation * world_size == 1, "the last window is short"
    stops = [1, updates, updates + 1] if world_size == 1 else [updates - 1]
    folder = str(tmp_path / "run")
    settings = {"folder": folder, "stops": stops, "accumulation": accumulation}
    ranks = run_ranks(fit_and_resume, world_size, tmp_path, **settings)
    whole = [rank["whole"] for rank in ranks]
    assert all(run["batches"] == micro_steps for run in whole)
    assert all(run["updates"] == run["expected_updates"] == 2 * updates for run in whole)
    for epoch in range(2):
        seen = Counter(n for run in whole for number, indices in run["steps"] if number == epoch for n in indices)
        assert seen == Counter(range(sequences))
    for rank in ranks:
        for stop, resumed in zip(stops, rank["resumed"], strict=True):
            trained = min(stop * accumulation, micro_steps) if stop <= updates else None
            after = rank["whole"]["steps"][trained if trained is not None else -len(resumed["steps"]) :]
            assert resumed["steps"] == after, f"stopped after update {stop}"
            assert resumed["weights"] == rank["whole"]["weights"], f"stopped after update {stop}"
    for stop in stops:
        assert check_step_equivalence(f"{folder}/whole.jsonl", f"{folder}/{stop}.jsonl") == 2 * updates - stop


def test_two_ranks_train_as_one_does_on_the_same_steps(tmp_path: Path) -> None:
    alone = fit(str(tmp_path / "one"), accumulation=6, window_log=tmp_path / "one.jsonl")
    settings = {"folder": str(tmp_path / "two"), "accumulation": 3, "window_log": str(tmp_path / "two.jsonl")}
    for rank in run_ranks(fit, 2, tmp_path, **settings):
        assert rank["weights"] == pytest.approx(alone["weights"], rel=0, abs=1e-12)
    assert check_step_equivalence(tmp_path / "one.jsonl", tmp_path / "two.jsonl") == alone["updates"]


@pytest.mark.full
@pytest.mark.parametrize(("first", "then"), [(2, 1), (1, 2)])
def test_what_is_left_is_trained_on_by_another_number_of_ranks(first: int, then: int, tmp_path: Path) -> None:
    """And the epochs after it are whole, though the trainer counted the batches of the first one alone."""
    folder = str(tmp_path / "run")
    begun = run_ranks(fit, first, tmp_path, folder=folder, accumulation=1, epochs=1)
    before = Counter(n for rank in begun for _, indices in rank["steps"][:4] for n in indices)
    settings = {"folder": folder + "/on", "accumulation": 1, "resume": f"{folder}/step=4.ckpt", "epochs": 3}
    resumed = run_ranks(fit, then, tmp_path, **settings)
    everything = Counter(range(len(PackedLoader(open_documents(Numbered(SIZE)), ROWS))))
    for epoch in range(3):
        after = Counter(n for rank in resumed for number, indices in rank["steps"] if number == epoch for n in indices)
        assert after + (before if epoch == 0 else Counter()) == everything


def test_the_exact_mean_over_tokens_reaches_the_optimizer() -> None:
    """One full-batch step, against the gradient of the loss over all documents one by one."""
    module = BigramModel(lr=1.0)
    start = [p.detach().clone() for p in module.parameters()]
    trainer = quiet_trainer(max_epochs=1, accumulate_grad_batches=1000)
    trainer.fit(module, datamodule=PackedDataModule(SmallIds(SIZE, masked=True), ROWS, num_workers=0))
    assert trainer.global_step == 1
    reference, losses, count = BigramModel(), [], 0
    documents = SmallIds(SIZE, masked=True)
    for number in range(SIZE):
        ids, labels = documents[number]["input_ids"][None], documents[number]["labels"][None]
        if bearing := int((labels[:, 1:] != -100).sum()):
            losses.append(reference.loss(ids, labels) * bearing)
            count += bearing
    (torch.stack(losses).sum() / count).backward()
    for before, after, parameter in zip(start, module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(before - after.detach(), parameter.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("limit", [5, 0.5])
def test_a_limit_ends_the_epoch_and_its_last_window(limit: Any, tmp_path: Path) -> None:
    run = fit(str(tmp_path), accumulation=3, trainer_settings={"limit_train_batches": limit})
    batches = 5 if limit == 5 else len(PackedLoader(open_documents(Numbered(SIZE)), ROWS)) // 2
    assert [epoch for epoch, _ in run["steps"]] == [0] * batches + [1] * batches
    assert run["updates"] == 2 * -(-batches // 3)


def test_monitors_bar_and_summary_take_the_loader(tmp_path: Path, capsys: Any) -> None:
    callbacks = [TokenLossScaling(), SampleProgressBar(), RunSummary()]
    trainer = quiet_trainer(max_epochs=1, callbacks=callbacks, enable_progress_bar=True)
    trainer.fit(BigramModel(), datamodule=PackedDataModule(SmallIds(SIZE), ROWS, num_workers=0))
    assert callbacks[1].train_progress_bar.total == trainer.num_training_batches
    assert "padding ratio" in capsys.readouterr().out


def evaluate() -> Any:
    class Collects(BigramModel):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.evaluated += batch["input_ids"][0].tolist()
            self.batches = batch_idx + 1

    module = Collects()
    trainer = quiet_trainer(devices=int(os.environ["WORLD_SIZE"]), strategy="ddp")
    data = PackedDataModule(Numbered(5), ROWS, val_documents=Numbered(SIZE), num_workers=1)
    trainer.validate(module, datamodule=data)
    return {"tokens": module.evaluated, "batches": module.batches}


@pytest.mark.parametrize("world_size", [2, *(pytest.param(n, marks=pytest.mark.full) for n in (1, 3))])
def test_evaluation_takes_every_token_once_in_as_many_packs_on_each_rank(world_size: int, tmp_path: Path) -> None:
    ranks = run_ranks(evaluate, world_size, tmp_path)
    assert len({rank["batches"] for rank in ranks}) == 1
    assert sorted(token for rank in ranks for token in rank["tokens"]) == Numbered(SIZE).tokens()


def replica_of_two(num_workers: int) -> Any:
    """Four processes are two replicas of two."""
    dist.init_process_group("gloo")
    rank = dist.get_rank() // 2
    settings = {"rank": rank, "world_size": 2, "replica_size": 2, "num_workers": num_workers}
    each = PackedLoader(open_documents(Numbered(SIZE)), ROWS, **settings)
    epochs = [[[each.info.indices, each.info.loss_weight, b["input_ids"][0].tolist()] for b in each] for _ in range(2)]
    feed = type(each._feed).__name__
    dist.barrier()  # in training, replicas keep step
    each.close()
    dist.destroy_process_group()
    return {"epochs": epochs, "feed": feed}


def test_processes_of_a_replica_get_the_same_packs_and_replicas_different_ones(tmp_path: Path) -> None:
    ranks = run_ranks(replica_of_two, 4, tmp_path, num_workers=1, timeout=150)
    assert [rank["feed"] for rank in ranks] == ["LeaderFeed", "FollowerFeed"] * 2
    for leader, follower in (ranks[:2], ranks[2:]):
        assert leader["epochs"] == follower["epochs"]
    for epoch in range(2):
        tokens = [t for rank in ranks[::2] for indices, _, ids in rank["epochs"][epoch] if indices for t in ids]
        assert sorted(tokens) == Numbered(SIZE).tokens()


def leader_fails(num_workers: int) -> None:
    class Broken(Numbered):
        reads = 0

        def __getitem__(self, number: int) -> Any:
            self.reads += 1
            if self.reads > SIZE and number == 7:
                raise OSError("unreadable")
            return super().__getitem__(number)

    dist.init_process_group("gloo")
    settings = {"rank": 0, "world_size": 1, "replica_size": 2, "num_workers": num_workers, "timeout": 30.0}
    list(PackedLoader(open_documents(Broken(SIZE)), ROWS, **settings))


@pytest.mark.parametrize("num_workers", [pytest.param(0, marks=pytest.mark.full), 1])
def test_a_fault_of_the_leader_stops_its_followers_with_its_text(num_workers: int, tmp_path: Path) -> None:
    for end in start_ranks(leader_fails, 2, tmp_path, num_workers=num_workers):
        assert end.code != 0
        assert "document 7: OSError: unreadable" in end.output


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"packing": "tight"}, "packing='tight': choose one of best_fit, sequential"),
        ({"num_workers": -1}, "num_workers must be a whole number"),
        ({"seed": -1}, "seed must be a whole number"),
        ({"sequence_length": 0}, "sequence_length=0: expected a whole number"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_once(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        PackedDataModule(Numbered(3), **{"sequence_length": ROWS, **settings})


OF_STRATEGY: list[tuple[dict[str, Any], str]] = [
    ({"causal_shift": False}, r"causal_shift=False does not fit PackedDataModule"),
    ({"ignore_index": 0}, r"ignore_index=0 does not fit PackedDataModule, whose labels without loss are -100"),
    ({"block_size": 24}, r"block_size=24 does not divide the 64 rows .* 1, 2, 4, 8, 16, 32 or 64 would fit"),
]


class NeverTrains(BigramModel):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise AssertionError("training began")

    validation_step = training_step


def refused_by_the_data() -> Any:
    said = []
    for options, _ in OF_STRATEGY:
        data = PackedDataModule(SmallIds(SIZE), ROWS, val_documents=SmallIds(3), num_workers=0)
        runs = ["fit"] if "block_size" in options else ["fit", "validate"]
        for run in runs:
            trainer = quiet_trainer(devices=1, strategy=LibraStrategy(**options))
            with pytest.raises(ValueError, match=r".") as error:
                getattr(trainer, run)(NeverTrains(), datamodule=data)
            said.append(str(error.value))
    return said


def test_options_of_the_strategy_that_do_not_fit_the_packs_are_refused(tmp_path: Path) -> None:
    fits, ignores, blocks = (says for _, says in OF_STRATEGY)
    (said,) = run_ranks(refused_by_the_data, 1, tmp_path)
    for sentence, says in zip(said, [fits, fits, ignores, ignores, blocks], strict=True):
        assert re.search(says, sentence), sentence


def test_only_a_strategy_of_ours_is_asked_for_its_options() -> None:
    """Another may have options of its own by the same names."""

    class HasOptions(DDPStrategy):
        options = SimpleNamespace(block_size=24, causal_shift=False, sequence_placement="vrsp", refine=True)
        rank_layout = SimpleNamespace(pool_size=5, context_parallel=1)

    data = PackedDataModule(SmallIds(SIZE), ROWS, num_workers=0)
    data.trainer = quiet_trainer(devices=1, strategy=HasOptions(parallel_devices=[torch.device("cpu")]))
    data.setup("fit")
    assert len(data.train_dataloader()) == len(PackedLoader(open_documents(SmallIds(SIZE)), ROWS))


def test_the_log_is_of_what_was_trained_on(tmp_path: Path) -> None:
    run = fit(str(tmp_path), accumulation=3, window_log=tmp_path / "log.jsonl", epochs=1)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    trained = [sorted(n for _, indices in run["steps"][at : at + 3] for n in indices) for at in range(0, 99, 3)]
    assert [line["sequences"] for line in lines] == [numbers for numbers in trained if numbers]
    assert [line["step"] for line in lines] == list(range(run["updates"]))


class AsksForSteps(BigramModel):
    """Reads the number of steps where many modules do, for a schedule."""

    def configure_optimizers(self) -> Any:
        self.expected = self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


def test_a_schedule_that_asks_for_the_number_of_steps_gets_it_when_training_goes_on_too(tmp_path: Path) -> None:
    def run(resume: Path | None = None) -> tuple[AsksForSteps, L.Trainer]:
        module = AsksForSteps()
        steps = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, every_n_train_steps=1)
        trainer = quiet_trainer(max_epochs=2, accumulate_grad_batches=3, enable_checkpointing=True, callbacks=[steps])
        trainer.fit(module, datamodule=PackedDataModule(SmallIds(SIZE), ROWS, num_workers=0), ckpt_path=resume)
        return module, trainer

    whole, trainer = run()
    assert whole.expected == trainer.global_step == 14
    resumed, trainer = run(tmp_path / "step=3.ckpt")
    assert resumed.expected == trainer.global_step == 14
    assert resumed.weights() == whole.weights()


def other_documents() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    list(PackedLoader(open_documents(Numbered(SIZE + rank)), ROWS, rank=rank, world_size=2, timeout=30.0))


def test_ranks_that_see_other_documents_say_so_at_once(tmp_path: Path) -> None:
    for end in start_ranks(other_documents, 2, tmp_path):
        assert end.code != 0
        assert f"documents is {SIZE} on global rank 0 and {SIZE + 1} on global rank 1" in end.output
