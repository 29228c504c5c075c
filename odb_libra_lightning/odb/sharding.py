"""Which sample each rank draws, and in which order: a pure rule of rank, world size, seed and epoch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from odb_libra_lightning.odb.errors import ShardError


def views_per_rank(num_samples: int, world_size: int) -> int:
    """Views `q = ceil(num_samples / world_size)` that each rank draws in an epoch."""
    return -(-num_samples // world_size)


def check_shard(num_samples: int, *, rank: int, world_size: int) -> None:
    """Refuse a dataset that cannot be shared out.

    Raises:
        ShardError: a ValueError, if the dataset is empty or has fewer samples than there are ranks, or the rank is
            out of range.
    """
    if not 0 <= rank < world_size:
        raise ShardError(f"rank must lie in 0..{world_size - 1}, got {rank}")
    if num_samples < 1:
        raise ShardError("the training dataset is empty: give it at least one sample")
    if num_samples < world_size:
        raise ShardError(
            f"the training dataset has {num_samples} sample{'s' * (num_samples > 1)} for {world_size} ranks: "
            "each rank needs one; add samples or train on fewer devices"
        )


def rank_views(
    num_samples: int, *, rank: int, world_size: int, epoch: int, seed: int, shuffle: bool = True
) -> npt.NDArray[np.int64]:
    """Dataset indices that one rank draws in one epoch.

    Guarantee: over all ranks every index is drawn once, and `world_size * q - num_samples` of them once
    more, so that each rank draws the same number `q`. Price: those few repeats (fewer than `world_size`).
    The order depends on `(seed, epoch)` alone and is new in each epoch, so that ranks agree without talking.

    Args:
        num_samples: samples in the dataset, at least `world_size`.
        rank: this rank, `0 <= rank < world_size`.
        world_size: number of data-parallel ranks.
        epoch: number of the epoch, from 0.
        seed: seed of the order, the same on every rank.
        shuffle: False keeps the dataset's order.

    Returns:
        Indices, int64, shape `[q]`.

    Raises:
        ShardError: as `check_shard` does.
    """
    check_shard(num_samples, rank=rank, world_size=world_size)
    order = np.random.default_rng([seed, epoch]).permutation(num_samples) if shuffle else np.arange(num_samples)
    padding = views_per_rank(num_samples, world_size) * world_size - num_samples
    return np.concatenate([order, order[:padding]])[rank::world_size].astype(np.int64)
