"""Evaluation over several ranks that counts every sample once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler


def evaluation_batches(num_samples: int, *, rank: int, world_size: int, batch_size: int) -> list[list[int]]:
    """One rank's batches of dataset indices.

    Guarantee: over all ranks every index is in exactly one batch, and all ranks have the same number of batches, so
    that a forward pass with collectives in it does not hang. Price: batches differ in size by one, and hold one
    sample more than asked for where the counts cannot be equal otherwise.

    Args:
        num_samples: samples in the dataset, at least `world_size`.
        rank: this rank.
        world_size: number of ranks.
        batch_size: samples a batch.

    Raises:
        ValueError: if there are fewer samples than ranks.
    """
    if num_samples < world_size:
        raise ValueError(
            f"an evaluation dataset of {num_samples} samples cannot be shared out over {world_size} ranks without "
            "repeats: evaluate on fewer devices"
        )
    largest_share = -(-num_samples // world_size)
    smallest_share = num_samples // world_size
    batches = min(-(-largest_share // batch_size), smallest_share)
    indices = np.arange(rank, num_samples, world_size)
    return [batch.tolist() for batch in np.array_split(indices, batches)]


class EvaluationLoader:
    """One rank's share of a DataLoader, each sample once.

    Not a DataLoader itself, so that the trainer does not put a sampler with repeats into it.
    """

    def __init__(self, loader: DataLoader[Any], *, rank: int, world_size: int) -> None:
        self.dataset = loader.dataset
        batches = evaluation_batches(
            len(self.dataset),  # type: ignore[arg-type]
            rank=rank,
            world_size=world_size,
            batch_size=loader.batch_size or 1,
        )
        workers: dict[str, Any] = {}
        if loader.num_workers:
            workers = {
                "prefetch_factor": loader.prefetch_factor,
                "persistent_workers": loader.persistent_workers,
                "multiprocessing_context": loader.multiprocessing_context,
            }
        self._loader: DataLoader[Any] = DataLoader(
            self.dataset,
            batch_sampler=batches,
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            **workers,
        )

    def __iter__(self) -> Iterator[Any]:
        """Batches of this rank."""
        return iter(self._loader)

    def __len__(self) -> int:
        """Number of batches, the same on every rank."""
        return len(self._loader)


def drawing_sampler(loader: DataLoader[Any]) -> Any:
    """What draws a DataLoader's samples: the sampler in its batch sampler, or one of another kind itself."""
    if type(loader.batch_sampler) is BatchSampler:
        return loader.batch_sampler.sampler  # a DataLoader that is given one has another, unused, of its own
    return loader.batch_sampler or loader.sampler


def draws_whole(loader: DataLoader[Any]) -> bool:
    """Whether a DataLoader's own sampler draws each sample of its dataset once, in order or at random."""
    if isinstance(loader.dataset, IterableDataset):
        return False
    sampler = drawing_sampler(loader)
    if type(sampler) is RandomSampler:
        return not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    return type(sampler) is SequentialSampler


def share_out(loader: Any, *, rank: int, world_size: int) -> Any:
    """An evaluation loader for one rank: the loader itself where it is sharded already or cannot be.

    A DataLoader over a map-style dataset that draws it whole, in order or at random, is shared out; a loader with
    a sampler of its own, over an iterable dataset, or of another kind is the user's affair, or the trainer's.
    """
    if world_size == 1 or not isinstance(loader, DataLoader) or loader.batch_size is None or not draws_whole(loader):
        return loader
    return EvaluationLoader(loader, rank=rank, world_size=world_size)
