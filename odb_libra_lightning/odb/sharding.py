"""Which sample each rank draws, and in which order: pure rules of world size, seed and epoch.

An epoch puts the samples in an *order* and deals that order out to the ranks in turn. A *view* is one draw: view `v`
below the number of samples is the sample at position `v` of the order; the few views above it are the repeats that
make the ranks' shares equal.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from odb_libra_lightning.odb.errors import ShardError

# Views travel between ranks as 32-bit numbers.
MOST_SAMPLES = 2**31 - 2**20


def check_shard(num_samples: int, *, rank: int, world_size: int) -> None:
    """Refuse a dataset that cannot be shared out.

    Raises:
        ShardError: a ValueError, if the dataset is empty, has fewer samples than there are ranks or more than can be
            numbered, or the rank is out of range.
    """
    if world_size < 1:
        raise ShardError(f"world_size must be at least 1, got {world_size}")
    if not 0 <= rank < world_size:
        raise ShardError(f"rank must lie in 0..{world_size - 1}, got {rank}")
    if num_samples < 1:
        raise ShardError("the training dataset is empty: give it at least one sample")
    if num_samples < world_size:
        raise ShardError(
            f"the training dataset has {num_samples} sample{'s' * (num_samples > 1)} for {world_size} ranks: "
            "each rank needs one; add samples or train on fewer devices"
        )
    if num_samples > MOST_SAMPLES:
        raise ShardError(
            f"the training dataset has {num_samples} samples, and an epoch can have {MOST_SAMPLES}: pass max_samples"
        )


def samples_drawn(num_samples: int, max_samples: int | None) -> int:
    """Samples of an epoch: the dataset's, or the cap where that is smaller."""
    return num_samples if max_samples is None else min(num_samples, max_samples)


def epoch_order(
    num_samples: int, *, epoch: int, seed: int, shuffle: bool = True, max_samples: int | None = None
) -> npt.NDArray[np.int64]:
    """Dataset indices in the order of one epoch, the same on every rank.

    Args:
        num_samples: samples in the dataset.
        epoch: number of the epoch, from 0.
        seed: seed of the order.
        shuffle: False keeps the dataset's order.
        max_samples: samples to draw in an epoch, the first of the order; None draws all.

    Returns:
        int64 `[M]`, `M` as `samples_drawn` says.
    """
    order = np.random.default_rng([seed, epoch]).permutation(num_samples) if shuffle else np.arange(num_samples)
    return order[: samples_drawn(num_samples, max_samples)].astype(np.int64)
