"""Where a rank's samples come from: a stock DataLoader, asked for so many samples at a time."""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader

from odb_libra_lightning.odb.config import LoaderConfig
from odb_libra_lightning.odb.errors import SampleError
from odb_libra_lightning.odb.lifetime import end_with_parent
from odb_libra_lightning.odb.reader import Failure, Sample, SampleReader
from odb_libra_lightning.odb.sharding import rank_views, views_per_rank

# Samples that a worker reads for one message: enough to hide the cost of a message, few enough that a slow
# dataset does not hold up the first batch.
_CHUNK = 16
# Seconds after which a wait for the workers looks whether they are alive.
_CHECK_S = 5.0


class SampleSource:
    """Draws one rank's views of a map-style dataset, in order, through the data workers.

    While a round is grouped and collated the workers already read the next buffer.

    Attributes:
        in_sampler: views of this epoch that no worker has been asked for (`R`).
        in_workers: views asked for and not yet taken (`Q`).
    """

    def __init__(self, dataset: Any, config: LoaderConfig, *, rank: int, world_size: int) -> None:
        self._num_samples = len(dataset)
        self._config = config
        self._rank = rank
        self._world_size = world_size
        self._views = _Chunks()
        self._ready: deque[Sample | Failure] = deque()
        self._chunks: Iterator[list[Sample | Failure]] = iter(())
        self.taken = 0
        # Less than other ranks wait for this one, so that its own error is the one to be read.
        self._patience = 0.75 * config.timeout
        workers = config.num_workers
        share = -(-min(views_per_rank(self._num_samples, world_size), config.buffer_size) // max(workers, 1))
        self._views.size = min(_CHUNK, share)
        self._loader: DataLoader[Sample | Failure] = DataLoader(
            SampleReader(dataset, config),
            batch_sampler=self._views,
            num_workers=workers,
            collate_fn=list,
            generator=torch.Generator(),
            worker_init_fn=_WorkerStart(config),
            multiprocessing_context=config.start_method if workers else None,
            prefetch_factor=-(-(config.prefetch_factor or share) // self._views.size) if workers else None,
            persistent_workers=config.persistent_workers and workers > 0,
            timeout=min(_CHECK_S, self._patience) if workers else 0,
        )

    def start(self, epoch: int) -> None:
        """Begin an epoch: a new order, and new random seeds for workers that start with it."""
        self._views.indices = rank_views(
            self._num_samples,
            rank=self._rank,
            world_size=self._world_size,
            epoch=epoch,
            seed=self._config.seed,
            shuffle=self._config.shuffle,
        )
        self._views.drawn = self.taken = 0
        self._ready.clear()
        seeds = np.random.SeedSequence([self._config.seed, epoch, self._rank])
        self._loader.generator.manual_seed(int(seeds.generate_state(1)[0]))
        self._chunks = iter(self._loader)
        if self._config.num_workers:
            # torch raises from a signal handler when a worker dies, wherever the main thread is then. Without it the
            # death is noticed in `take`, where a failure can be told to all ranks.
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    @property
    def in_sampler(self) -> int:
        """Views of this epoch that no worker has been asked for."""
        return len(self._views.indices) - self._views.drawn

    @property
    def in_workers(self) -> int:
        """Views asked for and not yet taken."""
        return self._views.drawn - self.taken

    def take(self, count: int) -> list[Sample]:
        """Next samples in the order of the views; fewer than asked for only at the epoch's end.

        Raises:
            SampleError: for the first of them that cannot be used.
        """
        taken: list[Sample] = []
        while len(taken) < count:
            if not self._ready:
                chunk = self._next_chunk()
                if chunk is None:
                    break
                self._ready.extend(chunk)
            sample = self._ready.popleft()
            self.taken += 1
            if isinstance(sample, Failure):
                raise SampleError(*sample)
            taken.append(sample)
        return taken

    def _next_chunk(self) -> list[Sample | Failure] | None:
        deadline = time.monotonic() + self._patience
        while True:
            try:
                return next(self._chunks, None)
            except RuntimeError as error:  # torch has no class of its own for it
                if "timed out" not in str(error):
                    raise
                if time.monotonic() >= deadline:
                    raise SampleError(
                        f"no sample from the data workers within {self._patience:g} s: the dataset hangs or is slow; "
                        "pass a larger timeout if it is meant to be"
                    ) from None


class _Chunks:
    """A batch sampler that counts what it has handed out."""

    def __init__(self) -> None:
        self.indices: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self.size = 1
        self.drawn = 0

    def __iter__(self) -> Iterator[list[int]]:
        while self.drawn < len(self.indices):
            chunk = self.indices[self.drawn : self.drawn + self.size].tolist()
            self.drawn += len(chunk)
            yield chunk


class _WorkerStart:
    """What a data worker does first; a class, so that it pickles under `spawn`."""

    def __init__(self, config: LoaderConfig) -> None:
        self._config = config

    def __call__(self, worker_id: int) -> None:
        end_with_parent()
        if self._config.worker_init_fn is not None:
            self._config.worker_init_fn(worker_id)
