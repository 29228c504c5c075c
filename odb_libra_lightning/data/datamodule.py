"""Online dynamic batching as a LightningDataModule, built anew or around one that exists."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.apply_func import apply_to_collection
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler
from typing_extensions import override

from odb_libra_lightning.data.evaluation import drawing_sampler, draws_whole, share_out
from odb_libra_lightning.data.training_datamodule import TrainingDataModule, average_exactly, data_parallel_rank
from odb_libra_lightning.odb.config import LoaderConfig, takes_settings
from odb_libra_lightning.odb.loader import ODBLoader


class ODBDataModule(TrainingDataModule[ODBLoader]):
    """Trains on token-budgeted batches that are formed online, with equal steps on every rank.

    Guarantee: what `ODBLoader` guarantees, under any strategy that calls backward through Lightning, with losses
    weighted exactly: `TokenLossScaling` is added to the trainer where it is missing. Evaluation runs in batches of a
    fixed size, each sample once over all ranks. Price: the number of steps of an epoch is unknown in advance.

    Example:
        >>> data = ODBDataModule(dataset, collate_fn=collate, l_max=16_384, num_workers=4)  # doctest: +SKIP
        >>> L.Trainer(strategy="ddp", callbacks=monitoring()).fit(module, datamodule=data)  # doctest: +SKIP

    Args:
        train_dataset: map-style or iterable dataset; its samples are of any type.
        collate_fn: makes a batch of a list of samples; None stacks them.
        l_max: token budget of a training batch on one rank, tokens.
        val_dataset: map-style dataset to validate on, or None.
        test_dataset: the same for testing.
        predict_dataset: the same for prediction.
        eval_batch_size: samples of an evaluation batch.
        **settings: the other fields of `LoaderConfig`.

    Raises:
        ValueError: if a setting cannot work.
        TypeError: for an unknown setting.
    """

    _name = "ODBDataModule"

    @takes_settings
    def __init__(
        self,
        train_dataset: Any,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        l_max: int = 8192,
        *,
        val_dataset: Any = None,
        test_dataset: Any = None,
        predict_dataset: Any = None,
        eval_batch_size: int = 8,
        **settings: Any,
    ) -> None:
        super().__init__()
        if eval_batch_size < 1:
            raise ValueError(f"eval_batch_size must be at least 1, got {eval_batch_size}")
        self._config = LoaderConfig.from_keywords(l_max=l_max, **settings)
        self._settings = {"l_max": l_max, **settings}
        self._train_dataset = train_dataset
        self._collate_fn = collate_fn
        self._eval_batch_size = eval_batch_size
        # The trainer warns about a hook that is there and has nothing to give, so they are there only with a dataset.
        if val_dataset is not None:
            self.val_dataloader = partial(self._evaluation_loader, val_dataset)  # type: ignore[method-assign]
        if test_dataset is not None:
            self.test_dataloader = partial(self._evaluation_loader, test_dataset)  # type: ignore[method-assign]
        if predict_dataset is not None:  # Lightning itself shares it out without repeats
            self.predict_dataloader = partial(self._fixed_batches, predict_dataset)  # type: ignore[method-assign]

    @classmethod
    def wrap(cls, datamodule: L.LightningDataModule, *, l_max: int, **settings: Any) -> ODBDataModule:
        """Train an existing datamodule's dataset in online batches; it is neither edited nor copied.

        Its training DataLoader gives the dataset, `collate_fn`, number of workers and whether to shuffle; its batch
        size plays no part. Its evaluation loaders, hooks and other attributes pass through.

        Args:
            datamodule: the datamodule. Its `train_dataloader` must return one DataLoader.
            l_max: token budget of a training batch on one rank, tokens.
            **settings: fields of `LoaderConfig`, which go before what the DataLoader says; also `collate_fn`.

        Raises:
            ValueError: if a setting cannot work, or, when training begins, the DataLoader draws its samples in a
                way that online batching would not keep.
            TypeError: for an unknown setting.
        """
        return _WrappedDataModule(datamodule, l_max=l_max, **settings)

    @override
    def train_dataloader(self) -> ODBLoader:
        return self._open(self._train_dataset, self._collate_fn, self._settings)

    def _open(self, dataset: Any, collate_fn: Callable[[list[Any]], Any] | None, settings: dict[str, Any]) -> ODBLoader:
        trainer = self.trainer
        if trainer is None:
            return ODBLoader(dataset, collate_fn, **settings)
        rank, world_size = data_parallel_rank(trainer)
        loader = ODBLoader(
            dataset,
            collate_fn,
            rank=rank,
            world_size=world_size,
            replica_size=trainer.world_size // world_size,
            **settings,
        )
        return self._take(loader, trainer)

    def _evaluation_loader(self, dataset: Any) -> Any:
        return self._share_out(self._fixed_batches(dataset))

    def _fixed_batches(self, dataset: Any) -> DataLoader[Any]:
        config = self._config
        return DataLoader(
            dataset,
            batch_size=self._eval_batch_size,
            collate_fn=self._collate_fn,
            num_workers=config.num_workers,
            pin_memory=config.pin_memory,
            worker_init_fn=config.worker_init_fn,
            multiprocessing_context=config.start_method if config.num_workers else None,
        )

    def _share_out(self, loaders: Any) -> Any:
        if self.trainer is None:
            return loaders
        average_exactly(self.trainer)
        rank, world_size = data_parallel_rank(self.trainer)
        return apply_to_collection(loaders, DataLoader, share_out, rank=rank, world_size=world_size)


class _WrappedDataModule(ODBDataModule):
    """What `ODBDataModule.wrap` returns: a training loader of its own, all else the inner datamodule's."""

    def __init__(
        self,
        inner: L.LightningDataModule,
        *,
        l_max: int,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        **settings: Any,
    ) -> None:
        self._inner = inner
        super().__init__(None, collate_fn, l_max, **settings)
        # The trainer asks whether a hook is overridden by looking at it, and prefers the datamodule's over the
        # module's if so. The inner one's own bound methods give it the right answer.
        for hook in ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"):
            setattr(self, hook, getattr(inner, hook))
        for hook in ("prepare_data", "setup", "predict_dataloader"):
            setattr(self, hook, getattr(inner, hook))
        for hook in ("val_dataloader", "test_dataloader"):
            if is_overridden(hook, inner):
                setattr(self, hook, partial(self._shared_out, hook))
        for attribute in ("prepare_data_per_node", "allow_zero_length_dataloader_with_multiple_devices"):
            setattr(self, attribute, getattr(inner, attribute))
        # What `save_hyperparameters` left there, which the trainer logs.
        vars(self).update(
            {name: value for name, value in vars(inner).items() if "hparams" in name or "hyperparams" in name}
        )

    def __getattr__(self, name: str) -> Any:
        """What this object does not have, the inner datamodule may."""
        if name.startswith("__") or "_inner" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._inner, name)

    @property
    def trainer(self) -> L.Trainer | None:
        """The trainer, which the inner datamodule sees too."""
        return self._inner.trainer

    @trainer.setter
    def trainer(self, trainer: L.Trainer | None) -> None:
        self._inner.trainer = trainer

    @override
    def train_dataloader(self) -> ODBLoader:
        loader = self._inner.train_dataloader()
        if not isinstance(loader, DataLoader):
            raise ValueError(
                f"{type(self._inner).__name__}.train_dataloader() returns a {type(loader).__name__}, and wrap() needs "
                "one DataLoader"
            )
        if loader.batch_size is None and loader.batch_sampler is None and self._collate_fn is None:
            raise ValueError(
                f"{type(self._inner).__name__}.train_dataloader() does not batch (batch_size=None): pass wrap() a "
                "collate_fn that makes a batch of a list of samples"
            )
        collate_fn = self._collate_fn or loader.collate_fn
        return self._open(loader.dataset, collate_fn, {**_settings_of(loader, self._settings), **self._settings})

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "inner": self._inner.state_dict()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._inner.load_state_dict(state_dict["inner"])

    def _shared_out(self, hook: str) -> Any:
        return self._share_out(getattr(self._inner, hook)())

    @override
    def teardown(self, stage: str) -> None:
        super().teardown(stage)
        self._inner.teardown(stage)

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        self._inner.on_exception(exception)


def _settings_of(loader: DataLoader[Any], given: dict[str, Any]) -> dict[str, Any]:
    """What a DataLoader says about how to read its dataset, in our terms."""
    settings: dict[str, Any] = {"num_workers": loader.num_workers, "pin_memory": loader.pin_memory}
    if loader.num_workers:
        settings["persistent_workers"] = loader.persistent_workers
        settings["worker_init_fn"] = loader.worker_init_fn
        if loader.multiprocessing_context is not None:
            settings["start_method"] = loader.multiprocessing_context.get_start_method()
    if isinstance(loader.dataset, IterableDataset):
        return settings
    sampler = drawing_sampler(loader)
    if isinstance(sampler, DistributedSampler):
        settings.update(shuffle=sampler.shuffle, seed=sampler.seed)
    elif draws_whole(loader):
        settings["shuffle"] = type(sampler) is RandomSampler
    elif "shuffle" not in given:
        raise ValueError(
            f"the training DataLoader draws its samples through a {type(sampler).__name__}, which online batching "
            "would replace by each sample once an epoch: pass shuffle=True or shuffle=False to wrap() if that is meant"
        )
    return settings
