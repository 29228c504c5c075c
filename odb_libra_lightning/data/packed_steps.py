"""An epoch of packed sequences as micro-batches of one replica, each with all facts about it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from odb_libra_lightning.data.documents import Documents
from odb_libra_lightning.data.packed_windows import (
    STAND_IN,
    PlacedWindow,
    WindowBounds,
    cut_windows,
    place_window,
)
from odb_libra_lightning.data.packs import Pieces
from odb_libra_lightning.libra.packing import PackedSequences
from odb_libra_lightning.odb.batch_info import BatchInfo
from odb_libra_lightning.odb.epoch import EpochStart
from odb_libra_lightning.odb.loss_weight import window_loss_weights


@dataclass(frozen=True, kw_only=True)
class SequencePlacement:
    """How the sequences of an optimizer step are dealt to pools, see `place_window`.

    Attributes:
        pool_size: replicas of a pool, `P`.
        method: a name in `libra.sequence_placement.PLACEMENTS`.
        refine: even pools out further by swaps.
    """

    pool_size: int = 1
    method: str = "sequential"
    refine: bool = False


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """What a replica trains on in one micro-step.

    Attributes:
        pieces: what its pack is made of; None for want of data.
        info: all facts about it.
        sequences: numbers of the sequences that all replicas train on in the step: int64 `[at most DP]`.
    """

    pieces: Pieces | None
    info: BatchInfo
    sequences: NDArray[np.int64]


@dataclass(frozen=True)
class _Counts:
    """Of the sequences of a window, in the epoch's order: int64 each, with a last entry, 0, for `STAND_IN`."""

    first: int
    tokens: NDArray[np.int64]
    loss_tokens: NDArray[np.int64]

    def of(self, values: NDArray[np.int64], sequence: int) -> int:
        return int(values[STAND_IN if sequence == STAND_IN else sequence - self.first])


def micro_batches(
    packed: PackedSequences,
    documents: Documents,
    *,
    start: EpochStart,
    done: int,
    rank: int,
    world_size: int,
    placement: SequencePlacement,
    seed: int,
    on_window: Callable[[WindowBounds, PlacedWindow], None] | None = None,
) -> Iterator[MicroBatch]:
    """What is left of an epoch, for one replica. Every rank knows everything, so nothing is exchanged.

    Args:
        packed: the sequences of the epoch, in order.
        documents: what they are packed of.
        start: how the pass begins, and how the trainer counts.
        done: sequences that are trained on.
        rank: data-parallel rank.
        world_size: replicas, `DP`.
        placement: how windows are placed.
        seed: seed of the placement `random`.
        on_window: called with each window when it is placed.
    """
    for bounds in cut_windows(
        len(packed),
        data_parallel=world_size,
        accumulation=start.accumulation,
        done=done,
        first_step=start.first_step,
        limit=start.limit,
    ):
        loads, counts = _count(packed, documents, bounds)
        window = place_window(
            loads,
            first=bounds.first,
            data_parallel=world_size,
            pool_size=placement.pool_size,
            placement=placement.method,
            refine=placement.refine,
            seed=int(np.random.SeedSequence([seed, start.epoch, bounds.first]).generate_state(1)[0]),
        )
        if on_window is not None:
            on_window(bounds, window)
        yield from _of_window(packed, bounds, window, counts, start=start, rank=rank)


def pieces_of(packed: PackedSequences, sequence: int, *, epoch: int) -> Pieces:
    """The pieces of one sequence."""
    run = slice(int(packed.cu_pieces[sequence]), int(packed.cu_pieces[sequence + 1]))
    return Pieces(
        name=f"epoch {epoch}, packed sequence {sequence}",
        document=packed.document[run],
        offset=packed.offset[run],
        length=packed.length[run],
    )


def _count(packed: PackedSequences, documents: Documents, bounds: WindowBounds) -> tuple[list[int], _Counts]:
    """Attention work of each sequence of a window, and its tokens."""
    bounds_of = packed.cu_pieces[bounds.first : bounds.stop + 1]
    run = slice(int(bounds_of[0]), int(bounds_of[-1]))
    length = packed.length[run]
    bearing = documents.loss_tokens(packed.document[run], packed.offset[run], length)
    begins = bounds_of[:-1] - bounds_of[0]
    loads, tokens, loss_tokens = (np.add.reduceat(values, begins) for values in (length * length, length, bearing))
    return loads.tolist(), _Counts(bounds.first, np.append(tokens, 0), np.append(loss_tokens, 0))


def _of_window(
    packed: PackedSequences,
    bounds: WindowBounds,
    window: PlacedWindow,
    counts: _Counts,
    *,
    start: EpochStart,
    rank: int,
) -> Iterator[MicroBatch]:
    bearing = [[counts.of(counts.loss_tokens, sequence) for sequence in step] for step in window.sequences]
    totals = [sum(step) for step in bearing]
    weights = window_loss_weights(
        [step[rank] for step in bearing],
        totals,
        world_size=len(window.sequences[0]),
        accumulation=start.accumulation,
    )
    done = bounds.first
    for micro_step, sequences in enumerate(window.sequences):
        real = [sequence for sequence in sequences if sequence != STAND_IN]
        done += len(real)
        mine = sequences[rank]
        pieces = None if mine == STAND_IN else pieces_of(packed, mine, epoch=start.epoch)
        tokens = sum(counts.of(counts.tokens, sequence) for sequence in real)
        info = BatchInfo(
            epoch=start.epoch,
            batch_idx=bounds.first_step + micro_step,
            round=0,
            deal=0,
            indices=() if pieces is None else (mine,),
            lengths=() if pieces is None else tuple(pieces.length.tolist()),
            padded_tokens=counts.of(counts.tokens, mine),
            loss_tokens=bearing[micro_step][rank],
            loss_weight=weights[micro_step],
            accumulation=start.accumulation,
            ends_window=micro_step + 1 == bounds.micro_steps,
            window_loss_tokens=sum(totals),
            global_samples=len(real),
            global_tokens=tokens,
            global_padded_tokens=tokens,
            global_loss_tokens=totals[micro_step],
            idle_ranks=len(sequences) - len(real),
            samples_done=done,
            samples_dropped=0,
            samples_total=len(packed),
        )
        yield MicroBatch(pieces=pieces, info=info, sequences=np.array(real, np.int64))
