"""ODBDataModule under Lightning's own trainer: what is trained on, evaluated, and how runs end."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter, namedtuple
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import (
    DataLoader,
    Subset,
)

from odb_libra_lightning import ODBDataModule, ODBLoader
from odb_libra_lightning.callbacks import TokenLossScaling, ZeroWeightSteps, monitoring
from tests.launch import run_ranks, start_ranks
from tests.modules import BigramModel, quiet_trainer
from tests.samples import Documents, pad

# ---- which samples are trained on (two ranks)

MATRIX = list(itertools.product([True, False], [True, False], [True, False]))


def fit_the_matrix(strategy: str, start_method: str) -> Any:
    """Two epochs for each of: loader from the hook or from outside, use_distributed_sampler, shuffle."""
    results = []
    for hook, distributed_sampler, shuffle in MATRIX:
        settings = {"l_max": 600, "buffer_size": 20, "num_workers": 1, "shuffle": shuffle, "start_method": start_method}
        module = BigramModel()
        trainer = quiet_trainer(
            devices=2,
            strategy=strategy,
            max_epochs=2,
            use_distributed_sampler=distributed_sampler,
            callbacks=[] if hook else [TokenLossScaling()],
        )
        if hook:
            trainer.fit(module, datamodule=ODBDataModule(Documents(51), pad, **settings))
        else:
            trainer.fit(module, train_dataloaders=ODBLoader(Documents(51), pad, **settings))
        results.append(module.seen)
    return results


def check_the_matrix(ranks: list[Any]) -> None:
    for (_, _, shuffle), *seen in zip(MATRIX, *ranks, strict=True):
        assert len(seen[0]) == len(seen[1]), "equal steps"
        counts = Counter(i for rank in seen for batch in rank for i in batch)
        assert set(counts) == set(range(51))
        assert counts.total() == 2 * 52, "each sample once an epoch, and one of 51 once more on two ranks"
        for rank in seen:
            half = [sorted(i for batch in part for i in batch) for part in _epochs(rank)]
            assert (half[0] == half[1]) != shuffle, "a new order in each epoch, if shuffled"


def _epochs(batches: list[list[int]]) -> tuple[list[list[int]], list[list[int]]]:
    """A rank's batches of the first and the second epoch, 26 samples each."""
    done = 0
    for number, batch in enumerate(batches):
        done += len(batch)
        if done == 26:
            return batches[: number + 1], batches[number + 1 :]
    raise AssertionError(f"no epoch of 26 samples in {batches}")


@pytest.mark.parametrize(
    ("strategy", "start_method"), [("ddp", "fork"), pytest.param("ddp", "spawn", marks=pytest.mark.full)]
)
def test_every_sample_is_trained_on_once_an_epoch_in_every_combination(
    strategy: str, start_method: str, tmp_path: Path
) -> None:
    check_the_matrix(run_ranks(fit_the_matrix, 2, tmp_path, timeout=170, strategy=strategy, start_method=start_method))


def fit_persistent() -> Any:
    module = BigramModel()
    data = ODBDataModule(Documents(80), pad, l_max=600, num_workers=2, persistent_workers=True)
    quiet_trainer(devices=2, strategy="ddp", max_epochs=2).fit(module, datamodule=data)
    return module.seen


def test_persistent_workers_bring_a_new_order_of_the_same_set(tmp_path: Path) -> None:
    ranks = run_ranks(fit_persistent, 2, tmp_path)
    counts = Counter(i for rank in ranks for batch in rank for i in batch)
    assert counts == Counter(dict.fromkeys(range(80), 2))
    first = [batch for rank in ranks for batch in rank[: len(rank) // 2]]
    second = [batch for rank in ranks for batch in rank[len(rank) // 2 :]]
    assert first != second


# ---- modules and batches from elsewhere


class VariedRandomDataset(RandomDataset):
    """Lightning's random vectors, with a length beside each."""

    def __getitem__(self, index: int) -> Any:
        return {"x": super().__getitem__(index), "length": index % 7 + 1}


def fit_the_boring_model() -> Any:
    module = BoringModel()
    data = ODBDataModule(RandomDataset(32, 64), l_max=160, num_workers=1, val_dataset=RandomDataset(32, 64))
    before = module.layer.weight.detach().clone()
    quiet_trainer(devices=2, strategy="ddp", max_epochs=1).fit(module, datamodule=data)
    return {"moved": bool((module.layer.weight != before).any()), "steps": module.trainer.global_step}


def test_lightning_s_boring_model_trains_unedited(tmp_path: Path) -> None:
    ranks = run_ranks(fit_the_boring_model, 2, tmp_path)
    assert all(rank["moved"] for rank in ranks)
    assert ranks[0]["steps"] == ranks[1]["steps"] >= 7


class CausalLMInTenLines(L.LightningModule):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.model(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 3e-3)


def test_a_hugging_face_model_in_ten_lines_trains_unedited() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    losses: list[float] = []

    class Losses(L.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
            losses.append(float(outputs["loss"]))

    module = CausalLMInTenLines(transformers.LlamaForCausalLM(config))
    data = ODBDataModule(Documents(60, longest=40), pad, l_max=200, num_workers=1)
    quiet_trainer(devices=1, max_epochs=6, callbacks=[Losses(), *monitoring(progress_bar=False)]).fit(
        module, datamodule=data
    )
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])


@dataclasses.dataclass
class Batch:
    input_ids: torch.Tensor
    labels: torch.Tensor


NamedBatch = namedtuple("NamedBatch", ["input_ids", "labels"])


def as_dataclass(samples: list[Any]) -> Batch:
    return Batch(**pad(samples))


def as_namedtuple(samples: list[Any]) -> Any:
    return NamedBatch(**pad(samples))


def as_nested(samples: list[Any]) -> Any:
    return {"text": [pad(samples)], "meta": {"names": [str(len(s["input_ids"])) for s in samples]}}


def as_tuple(samples: list[Any]) -> Any:
    return tuple(pad(samples).values())


def as_other_keys(samples: list[Any]) -> Any:
    batch = pad(samples)
    return {"tokens": batch["input_ids"], "targets": batch["labels"]}


def labels_of_tuple(batch: Any) -> int:
    return int((batch[1][:, 1:] != -100).sum())


def labels_of_other_keys(batch: Any) -> int:
    return int((batch["targets"][:, 1:] != -100).sum())


SHAPES = {
    "dict": (pad, None, lambda b: (b["input_ids"], b["labels"])),
    "dataclass": (as_dataclass, None, lambda b: (b.input_ids, b.labels)),
    "namedtuple": (as_namedtuple, None, lambda b: (b.input_ids, b.labels)),
    "nested": (as_nested, None, lambda b: (b["text"][0]["input_ids"], b["text"][0]["labels"])),
    "tuple": (as_tuple, labels_of_tuple, lambda b: b),
    "other keys": (as_other_keys, labels_of_other_keys, lambda b: (b["tokens"], b["targets"])),
}


class Unpacking(BigramModel):
    def __init__(self, unpack: Any) -> None:
        super().__init__()
        self.unpack = unpack

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(*self.unpack(batch))


def fit_batches_of_every_shape() -> Any:
    weights = {}
    for name, (collate_fn, loss_tokens, unpack) in SHAPES.items():
        module = Unpacking(unpack)
        data = ODBDataModule(Documents(41), collate_fn, l_max=500, num_workers=1, loss_tokens=loss_tokens)
        quiet_trainer(devices=2, strategy="ddp", max_epochs=1).fit(module, datamodule=data)
        weights[name] = module.weights()
    return weights


def test_batches_of_every_shape_train_to_the_same_weights(tmp_path: Path) -> None:
    ranks = run_ranks(fit_batches_of_every_shape, 2, tmp_path)
    for name in SHAPES:
        assert ranks[0][name] == ranks[0]["dict"], name
        assert ranks[1][name] == ranks[0]["dict"], name


# ---- what is attached, and errors


@pytest.mark.parametrize(
    ("loss_scaling", "given", "expected"),
    [
        ("token", [], [TokenLossScaling]),
        ("sample", [], [TokenLossScaling]),
        ("token", [TokenLossScaling], [TokenLossScaling]),
        ("none", [], [ZeroWeightSteps]),
    ],
)
def test_loss_scaling_is_attached_once_where_it_is_missing(
    loss_scaling: Any, given: list[Any], expected: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    trainer = quiet_trainer(devices=1, max_epochs=1, callbacks=[callback() for callback in given])
    data = ODBDataModule(Documents(9), pad, num_workers=0, loss_scaling=loss_scaling)
    with caplog.at_level("INFO"):
        trainer.fit(BigramModel(), datamodule=data)
    assert [type(c) for c in trainer.callbacks if isinstance(c, ZeroWeightSteps)] == expected
    assert ("ODBDataModule adds the callback" in caplog.text) == (not given)


def test_the_constructor_shows_its_settings_and_refuses_others() -> None:
    import inspect

    parameters = inspect.signature(ODBDataModule).parameters
    assert parameters["buffer_size"].default == 1024
    assert "settings" not in parameters
    with pytest.raises(TypeError, match=r"unknown setting 'lmax'.*'l_max'"):
        ODBDataModule(Documents(3), lmax=3)
    with pytest.raises(ValueError, match="eval_batch_size must be at least 1, got 0"):
        ODBDataModule(Documents(3), eval_batch_size=0)


def test_a_loader_given_to_fit_learns_of_the_trainer_s_accumulation() -> None:
    trainer = quiet_trainer(devices=1, max_epochs=1, accumulate_grad_batches=4, callbacks=[TokenLossScaling()])
    loader = ODBLoader(Documents(9), pad, l_max=400, num_workers=0)
    trainer.fit(BigramModel(), train_dataloaders=loader)
    assert loader.info.accumulation == 4


def test_a_schedule_of_accumulation_is_asked_before_training_begins() -> None:
    module = BigramModel()
    scheduler = GradientAccumulationScheduler({0: 4, 1: 2})
    trainer = quiet_trainer(devices=1, max_epochs=2, callbacks=[scheduler])
    trainer.fit(module, datamodule=ODBDataModule(Documents(30), pad, l_max=400, num_workers=0))
    half = len(module.seen) // 2
    assert trainer.global_step == -(-half // 4) + -(-half // 2)


def test_weights_are_applied_once_whatever_callbacks_there_are() -> None:
    trainer = quiet_trainer(devices=1, max_epochs=1, callbacks=[ZeroWeightSteps()])
    trainer.fit(BigramModel(), datamodule=ODBDataModule(Documents(9), pad, num_workers=0))
    assert sum(isinstance(callback, ZeroWeightSteps) for callback in trainer.callbacks) == 1


def test_a_trainer_may_train_on_another_loader_afterwards() -> None:
    trainer = quiet_trainer(devices=1, max_epochs=1)
    trainer.fit(BigramModel(), datamodule=ODBDataModule(Documents(9), pad, num_workers=0))
    trainer.fit_loop.epoch_progress.reset()
    module = BigramModel()
    trainer.fit(module, train_dataloaders=DataLoader(Documents(9), collate_fn=pad, batch_size=3))
    assert len(module.seen) == 3


def test_an_exception_in_a_step_of_weight_zero_leaves_the_parameters_free() -> None:
    class FailsOnce(BigramModel):
        failed = False

        def on_after_backward(self) -> None:
            if not self.failed:
                self.failed = True
                raise RuntimeError("out of memory")

    module = FailsOnce()
    data = ODBDataModule(Documents(9), pad, num_workers=0, loss_tokens=lambda batch: 0)
    with pytest.raises(RuntimeError, match="out of memory"):
        quiet_trainer(devices=1, max_epochs=1).fit(module, datamodule=data)
    before = module.weights()
    quiet_trainer(devices=1, max_epochs=1).fit(module, datamodule=ODBDataModule(Documents(9), pad, num_workers=0))
    assert module.weights() != before


def test_callbacks_refuse_a_loader_of_another_kind() -> None:
    trainer = quiet_trainer(devices=1, callbacks=[TokenLossScaling()])
    with pytest.raises(RuntimeError, match="need a loader of this package, and the trainer has a DataLoader"):
        trainer.fit(BigramModel(), train_dataloaders=DataLoader(Documents(9), collate_fn=pad))


class EmptySeven(Documents):
    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        sample = super().__getitem__(index)
        return {name: value[:0] for name, value in sample.items()} if index == 7 else sample


def fit_an_empty_sample() -> None:
    data = ODBDataModule(EmptySeven(40), pad, l_max=500, num_workers=1, shuffle=False)
    quiet_trainer(devices=2, strategy="ddp", max_epochs=1).fit(BigramModel(), datamodule=data)


def test_an_empty_sample_ends_training_on_both_ranks_with_its_index(tmp_path: Path) -> None:
    for end in start_ranks(fit_an_empty_sample, 2, tmp_path):
        assert end.code == 1
        assert "ODBError: rank 1: sample 7 is empty (length 0): remove it, or pass empty='drop'" in end.output


def fit_fewer_samples_than_ranks() -> None:
    quiet_trainer(devices=2, strategy="ddp").fit(BigramModel(), datamodule=ODBDataModule(Documents(1), pad))


def test_fewer_samples_than_ranks_is_one_clear_error_on_each(tmp_path: Path) -> None:
    for end in start_ranks(fit_fewer_samples_than_ranks, 2, tmp_path):
        assert end.code == 1
        assert "the training dataset has 1 sample for 2 ranks: each rank needs one" in end.output


class Fails(BigramModel):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        raise RuntimeError("the user's own error")


def test_an_error_in_the_module_ends_the_processes() -> None:
    data = ODBDataModule(Documents(300), pad, l_max=300, num_workers=2)
    with pytest.raises(RuntimeError, match="the user's own error"):
        quiet_trainer(devices=1).fit(Fails(), datamodule=data)


def test_limits_on_batches_end_an_epoch_early_and_the_next_is_fresh() -> None:
    module = BigramModel()
    data = ODBDataModule(Documents(200), pad, l_max=400, num_workers=1, persistent_workers=True)
    quiet_trainer(devices=1, max_epochs=2, limit_train_batches=3).fit(module, datamodule=data)
    assert len(module.seen) == 6
    assert module.seen[:3] != module.seen[3:]


def test_a_subset_and_one_sample_train() -> None:
    for dataset in (Subset(Documents(9), [4]), Documents(1)):  # type: ignore[arg-type]
        module = BigramModel()
        quiet_trainer(devices=1, max_epochs=1).fit(module, datamodule=ODBDataModule(dataset, pad, num_workers=1))
        assert len(module.seen) == 1


def test_nothing_to_train_on_is_refused() -> None:
    with pytest.raises(ValueError, match="training dataset is empty"):
        quiet_trainer(devices=1).fit(BigramModel(), datamodule=ODBDataModule(Documents(0), pad))
