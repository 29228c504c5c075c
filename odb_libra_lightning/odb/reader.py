"""What runs in a data worker: read one sample, learn its length, and make it ready to travel."""

from __future__ import annotations

import itertools
import math
import random
import traceback
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from odb_libra_lightning.odb.config import LoaderConfig
from odb_libra_lightning.odb.lengths import realized_length
from odb_libra_lightning.odb.sharding import MOST_SAMPLES
from odb_libra_lightning.odb.wire import to_bytes

_64_BITS = 2**64 - 1


# One view to read: its number within the epoch, the dataset index of its sample, and the number of the epoch. A plain
# tuple, since many of them travel.
Draw: TypeAlias = tuple[int, int, int]


class Sample(NamedTuple):
    """A realized sample on its way to a batch.

    Attributes:
        view: number of the view within the epoch.
        identity: its dataset index; for an iterable dataset, its place in the stream.
        length: realized length, tokens; 0 for a sample that a policy drops.
        payload: the sample itself, as bytes; empty for a dropped one.
    """

    view: int
    identity: int
    length: int
    payload: bytes

    @property
    def dropped(self) -> bool:
        """Whether a policy left the sample out."""
        return self.length == 0


class Failure(NamedTuple):
    """A sample that cannot be used: one sentence for a person, and the worker's traceback where it raised."""

    sentence: str
    traceback: str


class SampleReader(Dataset["Sample | Failure"]):
    """A map-style dataset of realized samples over the user's own.

    It returns failures instead of raising them, so that the sentence and the traceback reach every rank as
    they were written, not wrapped by each process on the way. The global random generators are seeded for each sample,
    so that its augmentation does not depend on which worker reads it, nor on what was read before.
    """

    def __init__(self, dataset: Any, config: LoaderConfig) -> None:
        self.dataset = dataset
        self.config = config

    def __getitem__(self, draw: Draw) -> Sample | Failure:
        """Read one sample, and apply the policies for empty and oversize ones."""
        view, identity, epoch = draw
        try:
            with _Randomness(self.config.seed, epoch, identity):
                sample = self.dataset[identity]
        except Exception as error:
            return _failure(identity, error)
        return realize(sample, view=view, identity=identity, config=self.config)


class StreamReader(IterableDataset["Sample | Failure"]):
    """One rank's part of an iterable dataset, shared out over its data workers.

    Each worker of each rank goes through the whole stream and keeps every so-many-th sample, so that nothing is lost
    or repeated whatever the dataset makes of ranks and workers, which it is not told of. The price is that every worker
    reads everything. A dataset that shares itself out (`stream_sharding="dataset"`) is spared that: what a worker of it
    yields is all that worker's.

    Args:
        dataset: the user's.
        config: settings.
        rank: this rank.
        world_size: number of data-parallel ranks.
        epoch: number of the epoch, from 0.
        done: whether each place of the stream is done, bool `[n]`; those are left out.
    """

    def __init__(
        self, dataset: Any, config: LoaderConfig, *, rank: int, world_size: int, epoch: int, done: npt.NDArray[np.bool_]
    ) -> None:
        self._dataset = dataset
        self._config = config
        self._rank = rank
        self._world_size = world_size
        self._epoch = epoch
        self._done = done

    def __iter__(self) -> Iterator[Sample | Failure]:
        """Samples in the order of the stream."""
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        mine, parts = self._rank + self._world_size * worker, self._world_size * workers
        by_dataset = self._config.stream_sharding == "dataset"
        # What is random in the order of the stream comes out the same in every worker.
        randomness = _Randomness(self._config.seed, self._epoch, *((mine,) if by_dataset else ()))
        if not by_dataset:
            torch_worker._worker_info = None
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(self._epoch)
        stream: Iterator[Any] | None = None
        for number in itertools.count():
            place = number * parts + mine if by_dataset else number
            if self._config.max_samples is not None and place >= self._config.max_samples:
                return
            if place >= MOST_SAMPLES:
                yield Failure(f"a stream can have {MOST_SAMPLES} samples an epoch: pass max_samples", "")
                return
            try:
                with randomness:
                    if stream is None:
                        stream = iter(self._dataset)
                    sample = next(stream)
            except StopIteration:
                return
            except Exception as error:
                yield _failure(place, error)
                return
            if place % parts == mine and not (place < len(self._done) and self._done[place]):
                yield realize(sample, view=place, identity=place, config=self._config)


def realize(sample: Any, *, view: int, identity: int, config: LoaderConfig) -> Sample | Failure:
    """Learn a sample's length, apply the policies, and make it ready to travel."""
    try:
        length = whole_number((config.length_fn or realized_length)(sample), "a length")
    except Exception as error:
        return _failure(identity, error)
    if length < 0:
        return Failure(f"sample {identity} has a length of {length}: length_fn must return tokens, 0 or more", "")
    if length == 0:
        if config.empty == "drop":
            return Sample(view, identity, 0, b"")
        return Failure(f"sample {identity} is empty (length {length}): remove it, or pass empty='drop'", "")
    if config.oversize != "keep" and config.token_cost.exceeds(length, config.l_max):
        if config.oversize == "drop":
            return Sample(view, identity, 0, b"")
        costs = "" if config.cost == "linear" else f", which cost {float(config.token_cost.of(1, length)):,.0f}"
        return Failure(
            f"sample {identity} has {length} tokens{costs}, over l_max={config.l_max}: shorten it, raise l_max, "
            "or pass oversize='keep' or 'drop'",
            "",
        )
    try:
        return Sample(view, identity, length, to_bytes(sample))
    except Exception as error:
        return Failure(f"sample {identity} cannot be pickled: {error}", traceback.format_exc())


def whole_number(value: Any, what: str) -> int:
    """A count that a user's function returned, of any numeric type.

    Raises:
        ValueError: if it is none.
    """
    number = value.item() if hasattr(value, "item") else value
    finite = isinstance(number, (int, float)) and not isinstance(number, bool) and math.isfinite(number)
    if not finite or number != int(number):
        raise ValueError(f"{what} must be a whole number of tokens, got {value!r}")
    return int(number)


def _failure(identity: int, error: Exception) -> Failure:
    return Failure(f"sample {identity}: {type(error).__name__}: {error}", traceback.format_exc())


class _Randomness:
    """A state of the global random generators of its own, in force within `with`.

    In a data worker nothing else draws from them, so it is left there; the trainer's is put back.
    """

    def __init__(self, *seed: int) -> None:
        self._seed: int | None = _mixed(seed)
        self._swaps = get_worker_info() is None
        self._states: tuple[Any, ...] = ()

    def __enter__(self) -> None:
        if self._swaps:
            outer, mine = _states(), self._states
            self._states = outer
            if mine:
                _set_states(mine)
        if self._seed is not None:
            seed, self._seed = self._seed, None
            random.seed(seed)
            np.random.seed(seed >> 32)
            torch.default_generator.manual_seed(seed)

    def __exit__(self, *exception: object) -> None:
        if self._swaps:
            outer, self._states = self._states, _states()
            _set_states(outer)


def _mixed(numbers: tuple[int, ...]) -> int:
    """A seed of 64 bits from several numbers, by the steps of SplitMix64, quicker than NumPy's SeedSequence."""
    mixed = 0
    for number in numbers:
        mixed = (mixed + number + 0x9E3779B97F4A7C15) & _64_BITS
        mixed = ((mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9) & _64_BITS
        mixed = ((mixed ^ mixed >> 27) * 0x94D049BB133111EB) & _64_BITS
        mixed ^= mixed >> 31
    return mixed


def _states() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _set_states(states: tuple[Any, ...]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
