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
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from odb_libra_lightning import ODBDataModule, ODBLoader
from odb_libra_lightning.callbacks import TokenLossScaling, ZeroWeightSteps, monitoring
from odb_libra_lightning.data.evaluation import evaluation_batches
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


# ---- validation


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


# ---- wrap


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
    with pytest.raises(RuntimeError, match="need an ODBLoader, and the trainer has a DataLoader"):
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
