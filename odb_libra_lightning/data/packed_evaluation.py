"""Evaluation on fixed packs, each once over all ranks, and equally many on each."""

from __future__ import annotations

from collections.abc import Iterator
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
    cu, document, offset, length = (
        values.tolist() for values in (packed.cu_pieces, packed.document, packed.offset, packed.length)
    )
    while (len(cu) - 1) % replicas:
        several = [i for i in range(len(cu) - 1) if cu[i + 1] - cu[i] > 1]
        if several:
            largest = max(several, key=lambda i: (sum(length[cu[i] : cu[i + 1]]), -i))
            cu.insert(largest + 1, (cu[largest] + cu[largest + 1]) // 2)
            continue
        at = int(np.argmax(length))
        if length[at] < 4:
            raise ValueError(
                f"an evaluation set of {sum(length)} tokens cannot be shared out over {replicas} replicas: evaluate on "
                "fewer devices, or on more documents"
            )
        half = length[at] // 2
        document.insert(at + 1, document[at])
        offset.insert(at + 1, offset[at] + half)
        length[at : at + 1] = [half, length[at] - half]
        cu = list(range(len(length) + 1))  # each pack is one piece
    return PackedSequences(
        sequence_length=packed.sequence_length,
        document=np.array(document, np.int64),
        offset=np.array(offset, np.int64),
        length=np.array(length, np.int64),
        cu_pieces=np.array(cu, np.int64),
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
