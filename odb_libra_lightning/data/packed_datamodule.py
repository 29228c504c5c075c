"""Packed documents as a LightningDataModule, for long contexts: with or without context parallelism."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.utilities import rank_zero_warn
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from typing_extensions import override

from odb_libra_lightning.data.collators import IGNORED
from odb_libra_lightning.data.documents import Documents, open_documents
from odb_libra_lightning.data.packed_evaluation import PackEvaluation, even_out
from odb_libra_lightning.data.packed_loader import PackedLoader
from odb_libra_lightning.data.packed_steps import SequencePlacement
from odb_libra_lightning.data.packed_windows import STAND_IN_LENGTH, Packing, pack_epoch
from odb_libra_lightning.data.packs import PackDataset
from odb_libra_lightning.data.training_datamodule import TrainingDataModule, average_exactly, data_parallel_rank
from odb_libra_lightning.libra.layout import check_homes, check_replicas
from odb_libra_lightning.libra.whole_numbers import checked_count
from odb_libra_lightning.odb.errors import refusing_setup
from odb_libra_lightning.strategies.libra import ContextParallelStrategy
from odb_libra_lightning.strategies.libra_options import LibraOptions


class PackedDataModule(TrainingDataModule[PackedLoader]):
    """Trains on documents packed into sequences of one length, one a micro-batch.

    Guarantee: what `PackedLoader` guarantees, with losses weighted exactly: `TokenLossScaling` is added to the trainer
    where it is missing. Under `LibraStrategy` sequences are placed so that its pools have even attention work, and all
    processes of a replica get the same ones; under any other strategy they go out as they come. An optimizer step
    trains on the same sequences either way. Evaluation takes fixed packs, each once over all ranks.

    Example:
        >>> data = PackedDataModule("corpus-tokens", 131_072, window_log="runs/windows.jsonl")  # doctest: +SKIP
        >>> L.Trainer(strategy=LibraStrategy(context_parallel=4)).fit(module, datamodule=data)  # doctest: +SKIP

    Args:
        documents: `TokenFiles`, the folder of some, or a sequence of documents: ids `[tokens]`, or mappings with
            `input_ids` and perhaps `labels`, whose lengths every process then reads once beforehand.
        sequence_length: tokens of a packed sequence at the most.
        packing: `best_fit` keeps documents whole where they fit, and cuts longer ones into pieces first; `sequential`
            puts documents end to end and cuts every `sequence_length` tokens.
        val_documents: documents to validate on, or None.
        shuffle: draw documents and sequences in a new order in each epoch.
        seed: seed of that order.
        num_workers: processes that read packs, of each replica; 0 reads in the training process.
        pin_memory: put batches into page-locked memory.
        window_log: file to log what each optimizer step trained on, see `check_step_equivalence`.
        timeout: seconds to wait for a worker, and for the other processes of a replica.

    Raises:
        ValueError: if a setting cannot work; when a run begins, options of the strategy that do not fit.
    """

    _name = "PackedDataModule"

    def __init__(
        self,
        documents: Any,
        sequence_length: int,
        *,
        packing: Packing = "best_fit",
        val_documents: Any = None,
        shuffle: bool = True,
        seed: int = 0,
        num_workers: int = 2,
        pin_memory: bool = False,
        window_log: str | Path | None = None,
        timeout: float = 1800.0,
    ) -> None:
        super().__init__()
        self._given = documents
        self._given_to_validate = val_documents
        self._opened: dict[int, Documents] = {}  # by identity of what was given
        self._sequence_length = checked_count("sequence_length", sequence_length)
        if packing not in ("best_fit", "sequential"):
            raise ValueError(f"packing={packing!r}: choose one of best_fit, sequential")
        if isinstance(num_workers, bool) or not isinstance(num_workers, int) or num_workers < 0:
            raise ValueError(f"num_workers must be a whole number of at least 0, got {num_workers!r}")
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < float("inf"):
            raise ValueError(f"timeout must be a number of seconds above 0, got {timeout!r}")
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise ValueError(f"seed must be a whole number of at least 0, got {seed!r}")
        self._packing: Packing = packing
        self._order = {"packing": packing, "shuffle": shuffle, "seed": seed}
        self._num_workers = num_workers
        self._pin_memory = pin_memory
        self._window_log = window_log
        self._timeout = timeout
        # The trainer warns about a hook that is there and has nothing to give.
        if val_documents is not None:
            self.val_dataloader = partial(self._evaluation_loader, val_documents)  # type: ignore[method-assign]

    @override
    def setup(self, stage: str) -> None:
        if self.trainer is not None and isinstance(self.trainer.strategy, ContextParallelStrategy):
            with refusing_setup():
                _check_labels(self.trainer.strategy.options)

    @override
    def train_dataloader(self) -> PackedLoader:
        settings: dict[str, Any] = {
            **self._order,
            "num_workers": self._num_workers,
            "pin_memory": self._pin_memory,
            "window_log": self._window_log,
            "timeout": self._timeout,
        }
        trainer = self.trainer
        if trainer is None:
            return PackedLoader(self._documents(self._given), self._sequence_length, **settings)
        rank, world_size = data_parallel_rank(trainer)
        placement = _placement(trainer)
        with refusing_setup():
            self._check_degrees(trainer, world_size, placement)
        loader = PackedLoader(
            self._documents(self._given),
            self._sequence_length,
            rank=rank,
            world_size=world_size,
            replica_size=trainer.world_size // world_size,
            placement=placement,
            **settings,
        )
        return self._take(loader, trainer)

    def _check_degrees(self, trainer: L.Trainer, data_parallel: int, placement: SequencePlacement) -> None:
        check_replicas(
            global_batch=data_parallel * trainer.accumulate_grad_batches,
            data_parallel=data_parallel,
            pool_size=placement.pool_size,
        )
        strategy = trainer.strategy
        # Homes of unequal size are no fault; a block that a person chose and that does not fit them is.
        if isinstance(strategy, ContextParallelStrategy) and strategy.options.block_size is not None:
            check_homes(
                sequence_length=self._sequence_length,
                context_parallel=strategy.rank_layout.context_parallel,
                block_size=strategy.options.block_size,
            )

    def _documents(self, given: Any) -> Documents:
        if id(given) not in self._opened:
            with refusing_setup():
                self._opened[id(given)] = _open_with_progress(given)
        return self._opened[id(given)]

    def _evaluation_loader(self, given: Any) -> PackEvaluation:
        documents = self._documents(given)
        packed = pack_epoch(documents.lengths, self._sequence_length, packing=self._packing, shuffle=False)
        rank, world_size = 0, 1
        if self.trainer is not None:
            average_exactly(self.trainer)
            rank, world_size = data_parallel_rank(self.trainer)
        packs = PackDataset(documents, stand_in_length=STAND_IN_LENGTH, encode=True)
        evened = even_out(packed, world_size)
        if cut := len(evened.length) - len(packed.length):
            rank_zero_warn(
                f"{cut} of the validation documents are cut in two, so that each of {world_size} replicas has as many "
                "packs: their second halves do not attend to the first, and the loss is not quite that of whole "
                f"documents. Validate on a multiple of {world_size} documents, or on fewer devices"
            )
        return PackEvaluation(
            packs,
            evened,
            rank=rank,
            world_size=world_size,
            num_workers=self._num_workers,
            pin_memory=self._pin_memory,
        )


def _check_labels(options: LibraOptions) -> None:
    """Refuse a loss that the labels of a pack are not made for: they are its ids, and -100 where none is."""
    if not options.causal_shift:
        raise ValueError(
            "causal_shift=False does not fit PackedDataModule, whose labels are the ids themselves, for a loss that "
            "shifts them by one: leave out causal_shift and have the module shift, or give the strategy a loader of "
            "your own whose labels are shifted"
        )
    if options.ignore_index != IGNORED:
        raise ValueError(
            f"ignore_index={options.ignore_index} does not fit PackedDataModule, whose labels without loss are "
            f"{IGNORED}: leave out ignore_index, and have the module's loss ignore {IGNORED}"
        )


def _placement(trainer: L.Trainer) -> SequencePlacement:
    """How the trainer's strategy wants the sequences of an optimizer step; as they come where it has no pools."""
    strategy = trainer.strategy
    if not isinstance(strategy, ContextParallelStrategy):
        return SequencePlacement()
    options = strategy.options
    return SequencePlacement(
        pool_size=strategy.rank_layout.pool_size, method=options.sequence_placement, refine=options.refine
    )


def _open_with_progress(given: Any) -> Documents:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("Reading document lengths", total=None)
        return open_documents(given, progress=lambda done, total: bar.update(task, completed=done, total=total))
