"""Evaluation on fixed packs, each once over all ranks, and equally many on each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from heapq import heapify, heappop, heappush, heapreplace
from itertools import pairwise
from operator import itemgetter
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from odb_libra_lightning.data.evaluation import evaluation_batches
from odb_libra_lightning.data.packed_steps import pieces_of
from odb_libra_lightning.data.packs import PackDataset, unchanged
from odb_libra_lightning.libra.packing import PackedSequences
from odb_libra_lightning.odb.feeds import decoder


def even_out(packed: PackedSequences, replicas: int) -> PackedSequences:
    """Split packs until their number is a multiple of the replicas, so that all have equally many.

    The largest pack of several documents is split between two of them, which changes no document's attention. Only
    where all packs are of one document, the largest document is cut in two.

    Args:
        packed: the packs.
        replicas: data-parallel replicas.

    Raises:
        ValueError: fewer tokens than would give each replica a pack of two.
    """
    missing = -len(packed) % replicas
    tokens = np.append(0, np.cumsum(packed.length)).tolist()  # before each piece
    cuts = packed.cu_pieces.tolist()
    # The heaviest pack first, of equal ones the first.
    packs = [(tokens[first] - tokens[stop], first, stop) for first, stop in pairwise(cuts) if stop - first > 1]
    heapify(packs)
    while missing and packs:
        _, first, stop = heappop(packs)
        middle = (first + stop) // 2
        cuts.append(middle)
        for begin, end in ((first, middle), (middle, stop)):
            if end - begin > 1:
                heappush(packs, (tokens[begin] - tokens[end], begin, end))
        missing -= 1
    if not missing:
        return replace(packed, cu_pieces=np.sort(np.array(cuts, np.int64)))

    pieces = list(
        zip((-packed.length).tolist(), tokens[:-1], packed.document.tolist(), packed.offset.tolist(), strict=True)
    )
    heapify(pieces)
    for _ in range(missing):
        weight, at, document, offset = pieces[0]
        length = -weight
        if length < 4:
            raise ValueError(
                f"an evaluation set of {tokens[-1]} tokens cannot be shared out over {replicas} replicas: evaluate on "
                "fewer devices, or on more documents"
            )
        half = length // 2
        heapreplace(pieces, (-half, at, document, offset))
        heappush(pieces, (half - length, at + half, document, offset + half))
    pieces.sort(key=itemgetter(1))
    lengths, _, documents, offsets = (np.array(column, np.int64) for column in zip(*pieces, strict=True))
    return PackedSequences(
        sequence_length=packed.sequence_length,
        document=documents,
        offset=offsets,
        length=-lengths,
        cu_pieces=np.arange(len(pieces) + 1),
    )


class PackEvaluation:
    """One replica's packs, one a batch; all processes of the replica read the same.

    Not a DataLoader itself, so that the trainer does not put a sampler with repeats into it.

    Args:
        dataset: reads packs.
        packed: the packs, as many as a multiple of the replicas.
        rank: this data-parallel rank.
        world_size: replicas.
        num_workers: processes that read; 0 reads in this one.
        pin_memory: put batches into page-locked memory.
    """

    def __init__(
        self,
        dataset: PackDataset,
        packed: PackedSequences,
        *,
        rank: int,
        world_size: int,
        num_workers: int,
        pin_memory: bool,
    ) -> None:
        batches = evaluation_batches(len(packed), rank=rank, world_size=world_size, batch_size=1)
        self.dataset = dataset
        self._pieces = [pieces_of(packed, number, epoch=0) for batch in batches for number in batch]
        self._decode = decoder(pinned=pin_memory)
        self._loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=None,
            sampler=self._pieces,
            num_workers=num_workers,
            collate_fn=unchanged,
        )

    def __iter__(self) -> Iterator[Any]:
        """Packs of this replica."""
        return map(self._decode, self._loader)

    def __len__(self) -> int:
        """Number of packs, the same on every rank."""
        return len(self._pieces)
