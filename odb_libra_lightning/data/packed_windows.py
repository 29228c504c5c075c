"""Which packed sequence each replica trains on in each micro-step of an epoch: pure rules, the same on every rank.

An epoch puts its packed sequences in an order, which depends on documents, seed and epoch alone. Optimizer steps take
runs of that order, their *windows*; within a window sequences are placed so that pools have even attention work. So
what an optimizer step trains on does not depend on placement, pool size or context parallelism, nor on how `GBS = DP *
accumulation` is made up. Source: Libra (arXiv:2607.23250), Algorithm 1 and section 4, step equivalence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from odb_libra_lightning.libra.load import checked_lengths, pool_imbalance
from odb_libra_lightning.libra.packing import PackedSequences, pack_best_fit, pack_sequential
from odb_libra_lightning.libra.sequence_placement import place_sequences

Packing = Literal["best_fit", "sequential"]

STAND_IN = -1  # in place of the number of a sequence: the replica has no data in that micro-step
# Two tokens: a pack that a loss which shifts its labels by one can be computed on.
STAND_IN_LENGTH = 2


def pack_epoch(
    document_lengths: NDArray[np.int64],
    sequence_length: int,
    *,
    packing: Packing = "best_fit",
    shuffle: bool = True,
    seed: int = 0,
    epoch: int = 0,
) -> PackedSequences:
    """Packed sequences of an epoch, in the order in which optimizer steps take them.

    Every token of every document is in exactly one sequence. All epochs have equally many sequences.

    Args:
        document_lengths: tokens of each document, at least 1: int64 `[documents]`.
        sequence_length: tokens of a packed sequence at the most, `L`.
        packing: `best_fit` keeps documents whole where they fit in a sequence, and cuts longer ones into pieces of
            `L` first; `sequential` puts documents end to end and cuts every `L` tokens.
        shuffle: draw documents, and for `best_fit` sequences, in a new order in each epoch.
        seed: seed of that order.
        epoch: number of the epoch, from 0.

    Returns:
        Its `document` and `offset` are those of the documents as given.

    Raises:
        ValueError: no documents, a length below 1, or a `packing` that does not exist.
    """
    lengths = checked_lengths(document_lengths)
    rng = np.random.default_rng([seed, epoch])
    if packing == "sequential":
        order = rng.permutation(len(lengths)) if shuffle else np.arange(len(lengths))
        packed = pack_sequential(lengths[order], sequence_length)
        return _of(packed, document=order[packed.document], offset=packed.offset)
    if packing != "best_fit":
        raise ValueError(f"packing={packing!r}: choose one of best_fit, sequential")
    document, offset, length = _cut(lengths, sequence_length)
    order = rng.permutation(len(length)) if shuffle else np.arange(len(length))
    packed = pack_best_fit(length[order], sequence_length)
    pieces = order[packed.document]
    # Best fit opens sequences with the longest documents first.
    if shuffle:
        sequences = rng.permutation(len(packed))
    else:
        sequences = np.argsort(np.minimum.reduceat(pieces, packed.cu_pieces[:-1]), kind="stable")
    return _reordered(_of(packed, document=document[pieces], offset=offset[pieces]), sequences)


def _cut(lengths: NDArray[np.int64], most: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Document, offset and length of pieces of at most so many tokens, each int64 `[pieces]`."""
    pieces = -(-lengths // most)
    document = np.repeat(np.arange(len(lengths)), pieces)
    offset = (np.arange(len(document)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * most
    return document, offset, np.minimum(lengths[document] - offset, most)


def _of(packed: PackedSequences, *, document: NDArray[np.int64], offset: NDArray[np.int64]) -> PackedSequences:
    return PackedSequences(
        sequence_length=packed.sequence_length,
        document=document,
        offset=offset,
        length=packed.length,
        cu_pieces=packed.cu_pieces,
    )


def _reordered(packed: PackedSequences, order: NDArray[np.int64]) -> PackedSequences:
    counts = np.diff(packed.cu_pieces)[order]
    cu_pieces = np.concatenate([[0], np.cumsum(counts)])
    take = np.arange(cu_pieces[-1]) + np.repeat(packed.cu_pieces[:-1][order] - cu_pieces[:-1], counts)
    return PackedSequences(
        sequence_length=packed.sequence_length,
        document=packed.document[take],
        offset=packed.offset[take],
        length=packed.length[take],
        cu_pieces=cu_pieces,
    )


@dataclass(frozen=True, kw_only=True)
class WindowBounds:
    """One optimizer step of an epoch: which of its sequences, and in how many micro-steps.

    Attributes:
        first: number of its first sequence in the epoch's order.
        stop: number behind its last.
        first_step: number of its first micro-step, as the trainer counts.
        micro_steps: micro-steps; fewer than `accumulation` at the end of an epoch and, where training goes on within
            what the trainer counts as a window, at its beginning.
    """

    first: int
    stop: int
    first_step: int
    micro_steps: int


def cut_windows(
    num_sequences: int,
    *,
    data_parallel: int,
    accumulation: int,
    done: int = 0,
    first_step: int = 0,
    limit: int | None = None,
) -> Iterator[WindowBounds]:
    """Windows of what is left of an epoch: runs of `data_parallel * accumulation` sequences.

    The trainer steps its optimizer where the number of micro-batches is a multiple of `accumulation` and at the end of
    an epoch, so windows end there.

    Args:
        num_sequences: sequences of the epoch.
        data_parallel: replicas, `DP`.
        accumulation: micro-batches of a full window.
        done: sequences that are trained on.
        first_step: number of the next micro-step, as the trainer counts.
        limit: number of the micro-step at which the trainer ends the epoch; None: where the sequences end.
    """
    while done < num_sequences and (limit is None or first_step < limit):
        room = accumulation - first_step % accumulation
        if limit is not None:
            room = min(room, limit - first_step)
        stop = min(done + room * data_parallel, num_sequences)
        steps = -(-(stop - done) // data_parallel)
        yield WindowBounds(first=done, stop=stop, first_step=first_step, micro_steps=steps)
        done, first_step = stop, first_step + steps


def steps_left(num_sequences: int, *, data_parallel: int, done: int = 0) -> int:
    """Micro-steps that what is left of an epoch takes on every replica; windows do not change their number."""
    return -(-(num_sequences - done) // data_parallel)


@dataclass(frozen=True, kw_only=True)
class PlacedWindow:
    """Which sequence of a window each replica has in each micro-step.

    Attributes:
        sequences: by micro-step and replica, numbers in the epoch's order or `STAND_IN`: `[micro_steps][DP]`.
        imbalance: inter-pool imbalance of the window, largest pool load over the mean less 1, stand-ins included.
    """

    sequences: tuple[tuple[int, ...], ...]
    imbalance: float


def place_window(
    loads: Sequence[int],
    *,
    first: int = 0,
    data_parallel: int,
    pool_size: int = 1,
    placement: str = "sequential",
    refine: bool = False,
    seed: int = 0,
) -> PlacedWindow:
    """Deal the sequences of a window to micro-steps and replicas, evenly over pools.

    Pools that run at the same time are alike: they are dealt to micro-steps heaviest first. With `sequential` placement
    and no refinement sequences go out as they come. A window that does not fill its last micro-step is filled up with
    stand-ins, which are placed as sequences of little work.

    Args:
        loads: attention work of its sequences, see `attention_load`.
        first: number of its first sequence.
        data_parallel: replicas, `DP`.
        pool_size: replicas of a pool, `P`; divides `data_parallel`.
        placement: a name in `libra.sequence_placement.PLACEMENTS`.
        refine: even pools out further by swaps.
        seed: seed of the placement `random`.

    Raises:
        ValueError: a pool size that does not fit, or a placement that does not exist.
    """
    if data_parallel % pool_size:
        raise ValueError(f"pool_size={pool_size} does not divide data_parallel={data_parallel}")
    stand_ins = -len(loads) % data_parallel
    work = [*loads, *[STAND_IN_LENGTH**2] * stand_ins]
    pools = place_sequences(work, pool_size, method=placement, refine=refine, seed=seed)
    imbalance = pool_imbalance(work, pools)
    if placement != "sequential" or refine:
        pools = sorted(pools, key=lambda pool: -sum(work[i] for i in pool))
    order = [first + i if i < len(loads) else STAND_IN for pool in pools for i in pool]
    return PlacedWindow(
        sequences=tuple(tuple(order[at : at + data_parallel]) for at in range(0, len(order), data_parallel)),
        imbalance=float(imbalance),
    )
