"""ODBDataModule.wrap: someone else's datamodule trains online, unedited."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from odb_libra_lightning import ODBDataModule, ODBLoader
from tests.launch import run_ranks
from tests.modules import BigramModel, quiet_trainer
from tests.samples import Documents, pad


class Existing(L.LightningDataModule):
    """Someone else's datamodule, with a hook of its own and an attribute that its module reads."""

    num_classes = 7

    def __init__(self, **loader: Any) -> None:
        super().__init__()
        self.loader_settings = {"batch_size": 4, "shuffle": True, "num_workers": 1, **loader}
        self.calls: list[str] = []

    def prepare_data(self) -> None:
        self.calls.append("prepare_data")

    def setup(self, stage: str) -> None:
        self.calls.append(f"setup {TrainerFn(stage).value}")
        self.train = Documents(61)

    def train_dataloader(self) -> Any:
        return DataLoader(self.train, collate_fn=pad, **self.loader_settings)

    def val_dataloader(self) -> Any:
        return [DataLoader(Documents(9), collate_fn=pad, batch_size=2), DataLoader(Documents(5), collate_fn=pad)]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.calls.append("transfer")
        return batch

    def teardown(self, stage: str) -> None:
        self.calls.append(f"teardown {TrainerFn(stage).value}")


class TwoValidationLoaders(BigramModel):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)


def fit_wrapped() -> Any:
    existing = Existing()
    module = TwoValidationLoaders()
    trainer = quiet_trainer(devices=2, strategy="ddp", max_epochs=1)
    data = ODBDataModule.wrap(existing, l_max=600)
    trainer.fit(module, datamodule=data)
    assert existing.trainer is trainer
    return {
        "seen": module.seen,
        "evaluated": module.evaluated,
        "calls": existing.calls,
        "classes": trainer.datamodule.num_classes,
    }


def test_an_existing_datamodule_trains_online_unedited(tmp_path: Path) -> None:
    ranks = run_ranks(fit_wrapped, 2, tmp_path)
    counts = Counter(i for rank in ranks for batch in rank["seen"] for i in batch)
    assert set(counts) == set(range(61))
    assert counts.total() == 62
    assert Counter(i for rank in ranks for i in rank["evaluated"]) == Counter(range(9)) + Counter(range(5))
    for rank, result in enumerate(ranks):
        calls = result["calls"]
        assert calls[:2] == (["prepare_data", "setup fit"] if rank == 0 else ["setup fit", "transfer"])
        assert calls.count("transfer") >= len(result["seen"])
        assert calls[-1] == "teardown fit"
        assert result["classes"] == 7


def test_wrap_reads_the_order_off_the_loader_and_refuses_one_it_would_replace() -> None:
    def loader_of(existing: Existing, **settings: Any) -> ODBLoader:
        existing.train = Documents(61)
        return ODBDataModule.wrap(existing, l_max=600, **settings).train_dataloader()

    assert loader_of(Existing()).config.shuffle
    ordered = loader_of(Existing(shuffle=False), num_workers=0)
    assert not ordered.config.shuffle
    assert ordered.config.num_workers == 0
    weighted = WeightedRandomSampler([1.0] * 61, 61)
    with pytest.raises(ValueError, match=r"through a WeightedRandomSampler.*pass shuffle=True or shuffle=False"):
        loader_of(Existing(shuffle=None, sampler=weighted))
    assert loader_of(Existing(shuffle=None, sampler=weighted), shuffle=True).config.shuffle
    with pytest.raises(ValueError, match="RandomSampler"):
        loader_of(Existing(shuffle=None, sampler=RandomSampler(Documents(61), num_samples=10)))


class Buckets:
    """A batch sampler of the user's own, which hides how samples are drawn."""

    def __iter__(self) -> Any:
        return iter([[0, 1], [2, 3]])

    def __len__(self) -> int:
        return 2


def test_wrap_refuses_a_batch_sampler_that_it_would_replace_and_a_loader_that_does_not_batch() -> None:
    class Bucketed(Existing):
        def train_dataloader(self) -> Any:
            return DataLoader(Documents(4), batch_sampler=Buckets(), collate_fn=pad)  # type: ignore[arg-type]

    class Unbatched(Existing):
        def train_dataloader(self) -> Any:
            return DataLoader(Documents(4), batch_size=None)

    with pytest.raises(ValueError, match="through a Buckets"):
        ODBDataModule.wrap(Bucketed(), l_max=10).train_dataloader()
    assert not ODBDataModule.wrap(Bucketed(), l_max=10, shuffle=False).train_dataloader().config.shuffle
    with pytest.raises(ValueError, match="does not batch"):
        ODBDataModule.wrap(Unbatched(), l_max=10).train_dataloader()
    assert ODBDataModule.wrap(Unbatched(), l_max=10, collate_fn=pad).train_dataloader().collate_fn is pad


def test_wrap_keeps_the_hyperparameters_that_the_trainer_logs() -> None:
    class Saved(Existing):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.save_hyperparameters()

    wrapped = ODBDataModule.wrap(Saved(width=3), l_max=10)
    assert wrapped.hparams_initial == {"width": 3}
    assert wrapped._log_hyperparams


def test_wrap_needs_one_dataloader() -> None:
    class Several(Existing):
        def train_dataloader(self) -> Any:
            return [DataLoader(Documents(3))]

    with pytest.raises(ValueError, match=r"Several\.train_dataloader\(\) returns a list, and wrap"):
        ODBDataModule.wrap(Several(), l_max=10).train_dataloader()
    with pytest.raises(TypeError, match="did you mean 'buffer_size'"):
        ODBDataModule.wrap(Existing(), l_max=10, buffersize=3)


class GivesBatchSampler(L.LightningDataModule):
    def __init__(self, sampler: Any) -> None:
        super().__init__()
        self.sampler = sampler

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Documents(60), batch_sampler=BatchSampler(self.sampler, 4, False), collate_fn=pad)


def test_the_sampler_within_a_batch_sampler_is_the_one_that_counts() -> None:
    data = ODBDataModule.wrap(GivesBatchSampler(RandomSampler(Documents(60))), l_max=400)
    assert data.train_dataloader().config.shuffle
    data = ODBDataModule.wrap(GivesBatchSampler(SequentialSampler(Documents(60))), l_max=400)
    assert not data.train_dataloader().config.shuffle
    for sampler in (SubsetRandomSampler(range(10)), WeightedRandomSampler([1.0] * 60, 10)):
        with pytest.raises(ValueError, match=f"draws its samples through a {type(sampler).__name__}"):
            ODBDataModule.wrap(GivesBatchSampler(sampler), l_max=400).train_dataloader()
