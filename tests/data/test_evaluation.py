"""Evaluation counts every sample once, over any number of ranks."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from odb_libra_lightning import ODBDataModule
from odb_libra_lightning.data.evaluation import evaluation_batches
from tests.launch import run_ranks
from tests.modules import BigramModel, quiet_trainer
from tests.samples import Documents, pad


def fit_with_validation(samples: int, batch_size: int) -> Any:
    module = BigramModel()
    data = ODBDataModule(
        Documents(30), pad, l_max=600, num_workers=0, val_dataset=Documents(samples), eval_batch_size=batch_size
    )
    trainer = quiet_trainer(devices=2, strategy="ddp", max_epochs=2)
    trainer.fit(module, datamodule=data)
    trainer.validate(module, datamodule=data)
    return {"evaluated": module.evaluated, "validations": module.validations}


def test_validation_follows_each_epoch_and_counts_each_of_499_samples_once(tmp_path: Path) -> None:
    ranks = run_ranks(fit_with_validation, 2, tmp_path, samples=499, batch_size=8)
    assert [rank["validations"] for rank in ranks] == [3, 3]
    assert Counter(i for rank in ranks for i in rank["evaluated"]) == Counter(dict.fromkeys(range(499), 3))


@pytest.mark.parametrize("samples", [1, 2, 3, 7, 16, 17, 499])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_evaluation_batches_hold_everything_once_in_equal_number(
    samples: int, world_size: int, batch_size: int
) -> None:
    if samples < world_size:
        with pytest.raises(ValueError, match=f"{samples} samples cannot be shared out over {world_size} ranks"):
            evaluation_batches(samples, rank=0, world_size=world_size, batch_size=batch_size)
        return
    ranks = [
        evaluation_batches(samples, rank=rank, world_size=world_size, batch_size=batch_size)
        for rank in range(world_size)
    ]
    assert Counter(i for rank in ranks for batch in rank for i in batch) == Counter(range(samples))
    assert len({len(rank) for rank in ranks}) == 1
    sizes = [len(batch) for rank in ranks for batch in rank]
    assert min(sizes) >= 1
    assert max(sizes) <= batch_size + (samples % world_size > 0)


def test_test_and_predict_loaders_pass_through() -> None:
    data = ODBDataModule(Documents(5), pad, num_workers=0, test_dataset=Documents(11), predict_dataset=Documents(12))

    class Predictor(BigramModel):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.evaluated.extend(int(row[0]) for row in batch["input_ids"])

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return batch["input_ids"][:, 0]

    module = Predictor()
    trainer = quiet_trainer(devices=1)
    trainer.test(module, datamodule=data, verbose=False)
    assert module.evaluated == list(range(11))
    predictions = trainer.predict(module, datamodule=data)
    assert torch.cat(predictions).tolist() == list(range(12))  # type: ignore[arg-type]
