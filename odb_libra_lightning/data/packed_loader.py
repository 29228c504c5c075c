"""Packed sequences for a training loop, in windows that every rank knows beforehand."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader
from typing_extensions import override

from odb_libra_lightning.data.documents import Documents
from odb_libra_lightning.data.packed_steps import MicroBatch, SequencePlacement, micro_batches
from odb_libra_lightning.data.packed_windows import STAND_IN_LENGTH, Packing, pack_epoch, steps_left
from odb_libra_lightning.data.packs import PackDataset, Pieces, unchanged
from odb_libra_lightning.data.window_log import WindowLog
from odb_libra_lightning.libra.packing import PackedSequences
from odb_libra_lightning.odb.epoch import EpochStart
from odb_libra_lightning.odb.errors import ShardError
from odb_libra_lightning.odb.feeds import Feed, FollowerFeed, LeaderFeed, decoder
from odb_libra_lightning.odb.ledger import open_ledger
from odb_libra_lightning.odb.position import Position
from odb_libra_lightning.odb.rendezvous import check_agreement
from odb_libra_lightning.odb.steps import Step
from odb_libra_lightning.odb.training_loader import TrainerClock, TrainingLoader

# What is left of an epoch is dealt anew to whatever ranks there are.
_MODE = "non_join"


class PackedLoader(TrainingLoader):
    """Packed sequences, one a micro-batch, in optimizer steps that hold the same sequences on any number of ranks.

    Guarantee: in each epoch every token of every document is in exactly one micro-batch of one replica; an optimizer
    step holds the same packed sequences whatever the placement, the pool size and the context parallelism, and whatever
    replicas times accumulation make up its number; all replicas have the same number of micro-batches, which is the
    loader's length; nothing is exchanged but, once, that all have the same documents. Price: lengths and loss masks of
    all documents are known beforehand; a replica without a sequence in the last micro-step of an epoch gets a stand-in
    whose `info.loss_weight` is 0; an error on one replica is not raised on the others.

    A batch is a mapping of `input_ids`, `labels` and `position_ids`, int64 `[1, T]`, with `T` at most
    `sequence_length`. Labels are the ids, -100 at each document's first token and where the document's own are.

    The loader draws one batch ahead of the one that it gives out, see `on_batch`.

    Args:
        documents: what to pack, the same on every process.
        sequence_length: tokens of a packed sequence at the most.
        packing: see `pack_epoch`.
        shuffle: a new order of documents and sequences in each epoch.
        seed: seed of that order.
        rank: this data-parallel rank; None asks the process group when the first batch is drawn.
        world_size: number of data-parallel ranks; None likewise.
        replica_size: processes that share each data-parallel rank: the first of them loads, and all get the same.
        accumulation: micro-batches of an accumulation window, for a loop without a trainer.
        placement: how the sequences of an optimizer step are dealt to pools.
        num_workers: processes that read packs; 0 reads in this one.
        pin_memory: put batches into page-locked memory.
        window_log: file to log what each optimizer step trained on, see `WindowLog`; rank 0 writes it.
        timeout: seconds that this process waits for a worker, and processes of a replica for one another.

    Raises:
        ValueError: if a setting cannot work.
    """

    def __init__(
        self,
        documents: Documents,
        sequence_length: int,
        *,
        packing: Packing = "best_fit",
        shuffle: bool = True,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        replica_size: int = 1,
        accumulation: int = 1,
        placement: SequencePlacement | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
        window_log: str | Path | None = None,
        timeout: float = 1800.0,
    ) -> None:
        self._documents = documents
        self._pack = partial(
            pack_epoch, documents.lengths, sequence_length, packing=packing, shuffle=shuffle, seed=seed
        )
        self._seed = seed
        self._placement = placement or SequencePlacement()
        self._num_workers = num_workers
        self._pin_memory = pin_memory
        self._timeout = timeout
        self._packed: tuple[int, PackedSequences] = (0, self._pack(epoch=0))
        self._num_sequences = len(self._packed[1])
        self._log = None if window_log is None else WindowLog(window_log, placement=self._placement.method)
        self._length = self._end = 0  # of the pass under way: its length, and the step at which the trainer ends it
        self._order = {
            "documents": len(documents.lengths),
            "tokens": int(documents.lengths.sum()),
            "sequence_length": sequence_length,
            "packing": packing,
            "shuffle": shuffle,
            "seed": seed,
        }
        super().__init__(
            Position(self._num_sequences, _MODE, self._order),
            rank=rank,
            world_size=world_size,
            replica_size=replica_size,
            accumulation=accumulation,
            keep_feed=True,
        )

    def __len__(self) -> int:
        """Micro-batches of a replica in the epoch that is under way, or else comes next, as the trainer counts.

        An epoch is under way until its last batch is trained on.
        """
        if self._busy or self.position.ending:
            return self._length
        return self._ahead(self._clock())

    @override
    def __iter__(self) -> Iterator[Any]:
        if self._beyond_limit(self._clock()):
            self.position.skip_epoch()
        return super().__iter__()

    @property
    @override
    def samples_per_epoch(self) -> int:
        """Packed sequences of an epoch, over all ranks."""
        return self._num_sequences

    @override
    def mark_trained(self, batch_idx: int) -> None:
        super().mark_trained(batch_idx)
        if self._log is not None:
            self._log.trained(batch_idx)

    @override
    def _limit(self, clock: TrainerClock) -> int:
        self._length = self._ahead(clock)
        self._end = self._length if clock.limit is None else min(self._length, clock.limit)
        if self._log is not None:
            self._log.begin_pass()
        return self._end

    def _ahead(self, clock: TrainerClock) -> int:
        """Length of the pass that comes next."""
        first_step, done = self.position.ahead(carry_on=self._marks)
        if self._beyond_limit(clock):
            first_step = done = 0
        return first_step + steps_left(self._num_sequences, data_parallel=self._ranks()[1], done=done)

    def _beyond_limit(self, clock: TrainerClock) -> bool:
        """Whether the trainer ends the epoch where training stands, without asking for a batch."""
        first_step, _ = self.position.ahead(carry_on=self._marks)
        return clock.limit is not None and first_step >= clock.limit

    @override
    def _drawn(self, steps: Iterator[Step]) -> Iterator[Step]:
        drawn = super()._drawn(steps)
        step = next(drawn, None)
        while step is not None:
            following = next(drawn, None)
            yield step
            step = following

    @override
    def _next_batch(self, steps: Iterator[Step]) -> Any:
        batch = super()._next_batch(steps)
        if self._marks and self._recent and self._recent[-1].batch_idx + 1 == self._end:
            self._busy = False  # a trainer that knows the length does not ask for the end
        return batch

    @override
    def _open_feed(self, rank: int, world_size: int) -> Feed:
        facts = {**self._order, "placement": repr(self._placement), "lengths": _checksum(self._documents.lengths)}
        check_agreement(facts, what="packed documents and their settings", timeout=self._timeout)
        decode = decoder(pinned=self._pin_memory)
        if self._replica_size == 1:
            return self._pack_feed(rank, world_size, decode)
        store = self._joined_control(rank, world_size, timeout=self._timeout)
        channel = store.replica_channel()
        assert channel is not None
        if not store.leads:
            return FollowerFeed(channel, decode)
        return LeaderFeed(lambda: self._pack_feed(rank, world_size, bytes), channel, decode)

    def _pack_feed(self, rank: int, world_size: int, decode: Callable[[Any], Any]) -> Feed:
        return PackFeed(
            PackDataset(self._documents, stand_in_length=STAND_IN_LENGTH, encode=True),
            partial(self._micro_batches, rank, world_size),
            decode,
            num_workers=self._num_workers,
            timeout=self._timeout,
        )

    def _micro_batches(self, rank: int, world_size: int, start: EpochStart) -> Iterator[MicroBatch]:
        if self._packed[0] != start.epoch:
            self._packed = (start.epoch, self._pack(epoch=start.epoch))
        packed = self._packed[1]
        ledger = open_ledger(
            self._num_sequences, world_size=world_size, mode=_MODE, epoch=start.epoch, state=start.state
        )
        on_window = None
        if self._log is not None and rank == 0:
            on_window = partial(self._log.placed, packed, epoch=start.epoch, accumulation=start.accumulation)
        return micro_batches(
            packed,
            self._documents,
            start=start,
            done=ledger.done_views,  # windows are trained on in order
            rank=rank,
            world_size=world_size,
            placement=self._placement,
            seed=self._seed,
            on_window=on_window,
        )

    @override
    def _check_shard(self, rank: int, world_size: int) -> None:
        if world_size < 1:
            raise ShardError(f"world_size must be at least 1, got {world_size}")
        if not 0 <= rank < world_size:
            raise ShardError(f"rank must lie in 0..{world_size - 1}, got {rank}")
        if world_size % self._placement.pool_size:
            raise ShardError(f"pool_size={self._placement.pool_size} does not divide the {world_size} replicas")


class PackFeed:
    """Packs read by a DataLoader, in the order of their micro-batches.

    Args:
        dataset: reads them.
        plan: gives the micro-batches of a pass.
        decode: makes a batch of the bytes that it travels as.
        num_workers: processes that read; 0 reads in this one.
        timeout: seconds to wait for a worker.
    """

    def __init__(
        self,
        dataset: PackDataset,
        plan: Callable[[EpochStart], Iterator[MicroBatch]],
        decode: Callable[[Any], Any],
        *,
        num_workers: int,
        timeout: float,
    ) -> None:
        self._plan = plan
        self._decode = decode
        self._order = _Order()
        workers = {"timeout": timeout, "persistent_workers": True} if num_workers else {}
        self._loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=None,
            sampler=self._order,
            num_workers=num_workers,
            collate_fn=unchanged,
            generator=torch.Generator(),  # the trainer's own would be advanced on one process of a replica alone
            **workers,  # type: ignore[arg-type]
        )

    def steps(self, start: EpochStart) -> Iterator[Step]:
        """Steps of one pass."""
        self._order.begin(self._plan(start))
        for payload in self._loader:
            micro_batch = self._order.asked_for.popleft()
            yield Step(micro_batch.info, self._decode(payload), micro_batch.sequences)

    def close(self) -> None:
        """End the workers."""
        iterator, self._loader._iterator = self._loader._iterator, None
        if iterator is not None and self._loader.num_workers:
            iterator._shutdown_workers()  # type: ignore[attr-defined]


class _Order:
    """A sampler of packs, which remembers the micro-batches that the DataLoader has asked for."""

    def __init__(self) -> None:
        self.asked_for: deque[MicroBatch] = deque()
        self._coming: Iterator[MicroBatch] = iter(())

    def begin(self, coming: Iterator[MicroBatch]) -> None:
        self._coming = coming
        self.asked_for.clear()

    def __iter__(self) -> Iterator[Pieces | None]:
        for micro_batch in self._coming:
            self.asked_for.append(micro_batch)
            yield micro_batch.pieces


def _checksum(lengths: NDArray[np.int64]) -> int:
    return zlib.crc32(np.ascontiguousarray(lengths).tobytes())
