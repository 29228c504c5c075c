"""Where packs come from: online batches, packed documents, a user's own loaders; and packs to validate on."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from odb_libra_lightning import ODBDataModule
from odb_libra_lightning.callbacks.loader_access import batch_info
from odb_libra_lightning.data.collators import PackingCollator
from odb_libra_lightning.data.packed_datamodule import PackedDataModule
from tests.launch import run_ranks
from tests.strategies.dense_decoder import IGNORED, DenseDecoder, Pack, load_weights, train_alone, unpadded
from tests.strategies.libra_runs import Case, CoreDecoder, check_updates, decoder_of, record_of, run_in_turn, trainer_of
from tests.strategies.packs import Listed, alone, mixed

SIZE = 41  # each document's first token is its number, below the vocabulary's size
EPOCHS = 2


def document(number: int) -> dict[str, torch.Tensor]:
    """A prompt of each document bears no loss; of every fifth document nothing does."""
    length = (number * 7919) % 23 + 1
    tokens = (torch.arange(length) * 5 + number * 11) % 48
    tokens[0] = number
    labels = tokens.clone()
    labels[: length // 3] = IGNORED
    if number % 5 == 0:
        labels[:] = IGNORED
    return {"input_ids": tokens, "labels": labels}


def bears_loss(number: int) -> bool:
    return bool((document(number)["labels"][1:] != IGNORED).any())


class Weights(L.Callback):
    """The loss weight of each batch of each epoch."""

    def __init__(self) -> None:
        self.of_epochs: list[list[float]] = []

    def on_train_epoch_start(self, trainer: L.Trainer, module: Any) -> None:
        self.of_epochs.append([])

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        self.of_epochs[-1].append(batch_info(trainer, batch_idx).loss_weight)


def fit_documents(runs: list[dict[str, Any]]) -> list[Any]:
    found = []
    for run in runs:
        print(f"run {run}", flush=True)
        case, weights = Case(**run["case"]), Weights()
        documents = Listed([document(number) for number in range(SIZE)])
        data: L.LightningDataModule
        if run["data"] == "odb":
            data = ODBDataModule(
                documents, PackingCollator(), l_max=50, num_workers=run["workers"], buffer_size=12, pacing=False
            )
        else:
            data = PackedDataModule(documents, 48, packing=run["data"], num_workers=run["workers"])
        module, trainer = decoder_of(case), trainer_of(case, callbacks=[weights])
        trainer.fit(module, datamodule=data)
        found.append({**record_of(module, trainer), "loss_weights": weights.of_epochs})
    return found


def documents_in(pack: dict[str, list[int]]) -> list[tuple[list[int], list[int]]]:
    """Tokens and labels of each document of a recorded pack."""
    starts = [row for row, position in enumerate(pack["position_ids"]) if position == 0]
    bounds = zip(starts, [*starts[1:], len(pack["input_ids"])], strict=True)
    return [(pack["input_ids"][a:b], pack["labels"][a:b]) for a, b in bounds]


def check_documents(packs: list[dict[str, list[int]]], *, whole: bool) -> None:
    """An epoch's packs have every document that bears loss; whole ones as they are, some of them twice at most."""
    counts: Counter[int] = Counter()
    for pack in packs:
        for tokens, labels in documents_in(pack):
            if not whole:
                counts.update(tokens[:1])
                continue
            expected = document(tokens[0])
            expected["labels"][0] = IGNORED
            assert tokens == expected["input_ids"].tolist()
            assert labels == expected["labels"].tolist()
            counts[tokens[0]] += 1
    needed = {number for number in range(SIZE) if bears_loss(number)}
    assert needed <= set(counts)
    if whole:
        assert counts.total() <= SIZE + 3


def token_mean(case: Case, ranks: list[Any], *, whole: bool) -> Any:
    """One process on the mean over all labels of each update, by the packs that were drawn and bear loss."""
    windows = []
    for epoch in range(case.epochs):
        members = [ranks[first : first + case.cp] for first in range(0, len(ranks), case.cp)]
        for replica in members:
            assert all(rank["packs"] == replica[0]["packs"] for rank in replica)
        steps = [
            [replica[0]["packs"][epoch][step] for replica in members if replica[0]["loss_weights"][epoch][step] != 0.0]
            for step in range(len(ranks[0]["packs"][epoch]))
        ]
        check_documents([pack for step in steps for pack in step], whole=whole)
        for first in range(0, len(steps), case.accumulate):
            packs = [pack for step in steps[first : first + case.accumulate] for pack in step]
            windows.append([{name: torch.tensor(v)[None] for name, v in pack.items()} for pack in packs])
    return train_alone(windows, clip=case.clip)


def run(data: str, workers: int = 0, **case: Any) -> dict[str, Any]:
    return {"data": data, "workers": workers, "case": {"epochs": EPOCHS, **case}}


RUNS = [
    run("odb", dp=2, cp=2, pool=2, accumulate=3, clip=0.2),
    run("best_fit", dp=2, cp=2, pool=2, accumulate=3, clip=0.2),
    run("best_fit", dp=4, cp=1, pool=2, accumulate=2),
    run("sequential", workers=1, dp=2, cp=2, pool=1, accumulate=2),
]
MORE_RUNS = [
    run("odb", dp=4, cp=1, pool=2),
    run("odb", workers=1, dp=2, cp=2, pool=1),
    run("best_fit", workers=1, dp=2, cp=2, pool=2),
]
RUNS_OF_TWO = [run("odb", dp=1, cp=2, accumulate=3), run("best_fit", dp=1, cp=2, accumulate=3)]


def check_run(run: dict[str, Any], ranks: list[Any]) -> None:
    """Updates are those of one process on the mean over all labels."""
    case = Case(**run["case"])
    check_updates(ranks, token_mean(case, ranks, whole=run["data"] != "sequential"))


@pytest.mark.parametrize("number", range(len(RUNS)), ids=lambda number: str(RUNS[number]["data"]) + str(number))
def test_updates_are_those_of_one_process_on_the_token_mean(number: int, recorded: dict[str, list[Any]]) -> None:
    check_run(RUNS[number], [rank[number] for rank in recorded["documents"]])


@pytest.mark.full
@pytest.mark.parametrize("runs", [MORE_RUNS, RUNS_OF_TWO], ids=["four_ranks", "two_ranks"])
def test_more_runs_have_those_updates_too(runs: list[dict[str, Any]], tmp_path: Path) -> None:
    world_size = Case(**runs[0]["case"]).world_size
    for run, *ranks in zip(runs, *run_ranks(fit_documents, world_size, tmp_path, runs=runs, timeout=170), strict=True):
        check_run(run, ranks)


class Augmented:
    """Documents that are others each time they are drawn, and in every process: of random length, too."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Pack:
        noise = torch.Generator()
        noise.manual_seed(int.from_bytes(os.urandom(7), "little"))
        length = int(torch.randint(5, 15, (), generator=noise))
        tokens = torch.randint(48, (1, length), generator=noise)
        return {"input_ids": tokens, "labels": tokens.clone(), "noise": torch.rand(1, length, generator=noise)}


class KeepsShards(CoreDecoder):
    def __init__(self) -> None:
        super().__init__()
        self.shards: list[Any] = []

    def training_step(self, batch: Pack, batch_idx: int) -> torch.Tensor:
        self.shards.append({name: values[0].tolist() for name, values in batch.items()})
        return super().training_step(batch, batch_idx)


def fit_augmented() -> Any:
    found = []
    for workers in (0, 1):
        module = KeepsShards()
        loader = DataLoader(Augmented(), batch_size=1, shuffle=True, collate_fn=alone, num_workers=workers)  # type: ignore[var-annotated, arg-type]
        trainer_of(Case(dp=2, cp=2, pool=2)).fit(module, train_dataloaders=loader)
        found.append({"shards": module.shards, "drawn": module.packs[0]})
    return found


def test_members_of_a_replica_share_a_random_batch_and_replicas_do_not(recorded: dict[str, list[Any]]) -> None:
    for run in zip(*recorded["augmented"], strict=True):
        assert len(run[0]["shards"]) == 6
        for step in range(6):
            together = []
            for leader in (0, 2):
                drawn = run[leader]["drawn"][step]
                assert drawn != run[leader + 1]["drawn"][step], "augmentation is not random"
                shards = [run[leader + member]["shards"][step] for member in range(2)]
                for name in ("input_ids", "noise"):
                    # The last row of a shard is blank.
                    assert [value for shard in shards for value in shard[name][:-1]] == drawn[name]
                assert [p for shard in shards for p in shard["position_ids"][:-1]] == list(range(len(drawn["noise"])))
                together.append(drawn["noise"])
            assert together[0] != together[1]


class Validates(CoreDecoder):
    """Replicas validate on different numbers of packs."""

    def __init__(self) -> None:
        super().__init__()
        self.sums: list[tuple[float, int]] = []

    def val_dataloader(self) -> Any:
        replica = self.trainer.strategy.distributed_sampler_kwargs["rank"]  # type: ignore[attr-defined]
        return DataLoader(Listed(mixed(3, seed=5)[: 1 + 2 * replica]), batch_size=1, collate_fn=alone)

    def validation_step(self, batch: Pack, batch_idx: int) -> None:
        losses = self.token_loss(batch)
        self.sums.append((float(losses.sum()), len(losses)))


def fit_and_validate() -> Any:
    found = []
    for options in ({}, {"attention": "distca"}, {"attention": "ring"}):
        module, case = Validates(), Case(dp=2, cp=2, pool=2, count=8, epochs=2, options=options)
        trainer = trainer_of(case, use_distributed_sampler=False, val_check_interval=2, num_sanity_val_steps=1)
        replica = trainer.strategy.distributed_sampler_kwargs["rank"]  # type: ignore[attr-defined]
        loader = DataLoader(Listed(case.make_packs()[replica::2]), batch_size=1, collate_fn=alone)
        trainer.fit(module, train_dataloaders=loader)
        trainer.validate(module, verbose=False)
        found.append({**record_of(module, trainer), "sums": module.sums})
    return found


def test_replicas_validate_on_unequal_numbers_of_packs(recorded: dict[str, list[Any]]) -> None:
    case = Case(dp=2, cp=2, pool=2, count=8, epochs=2)
    packs = case.make_packs()
    expected = train_alone([packs[first : first + 2] for first in range(0, 8, 2)] * 2, packs_a_window=2)
    final = DenseDecoder()
    load_weights(final, expected.weights)
    right = [final.token_loss(unpadded(pack)) for pack in mixed(3, seed=5)]
    for run in zip(*recorded["validated"], strict=True):
        check_updates(run, expected)
        for replica, validated in enumerate((right[:1], right)):
            members = run[2 * replica : 2 * replica + 2]
            times = len(members[0]["sums"])
            assert times == 1 + len(validated) * (2 * 2 + 1)
            for at, losses in enumerate(validated, start=times - len(validated)):
                assert sum(member["sums"][at][1] for member in members) == len(losses)
                assert sum(member["sums"][at][0] for member in members) == pytest.approx(losses.sum().item(), abs=1e-9)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    calls = {
        "documents": (fit_documents, {"runs": RUNS}),
        "augmented": (fit_augmented, {}),
        "validated": (fit_and_validate, {}),
    }
    return run_in_turn(4, tmp_path_factory.mktemp("data"), calls)
