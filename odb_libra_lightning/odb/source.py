"""Where a rank's samples come from: a stock DataLoader, asked for so many samples at a time."""

from __future__ import annotations

import signal
import threading
import time
from collections import deque
from collections.abc import Iterator
from multiprocessing import connection
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, IterableDataset

from odb_libra_lightning.odb.config import LoaderConfig
from odb_libra_lightning.odb.errors import SampleError
from odb_libra_lightning.odb.ledger import EpochLedger, StreamLedger
from odb_libra_lightning.odb.lifetime import end_with_parent
from odb_libra_lightning.odb.reader import Draw, Failure, Sample, SampleReader, StreamReader
from odb_libra_lightning.odb.sharding import epoch_order

# Samples that a worker reads for one message: enough to hide the cost of a message, few enough that a slow
# dataset does not hold up the first batch.
_CHUNK = 16
# Seconds after which a wait for the workers looks whether they are alive.
_CHECK_S = 2.0


class SampleSource:
    """Draws one rank's samples, in order, through the data workers.

    While a round is grouped and collated the workers already read the next buffer.

    Args:
        dataset: the user's.
        config: settings.
        rank: this rank.

    Attributes:
        in_sampler: views of this deal that no worker has been asked for (`R`); of a stream, 1 until it ends.
        in_workers: views asked for and not yet taken (`Q`); of a stream 0, since nobody knows.
    """

    def __init__(self, dataset: Any, config: LoaderConfig, *, rank: int) -> None:
        self._dataset = dataset
        self._config = config
        self._rank = rank
        self._ready: deque[Sample | Failure] = deque()
        self._chunks: Iterator[list[Sample | Failure]] = iter(())
        # Less than other ranks wait for this one, so that its own error is the one to be read.
        self._patience = 0.75 * config.timeout
        self._indexed: tuple[_Chunks, DataLoader[Sample | Failure]] | None = None
        self._in_sampler = 0
        self._waiting = False
        self._workers: list[Any] = []

    def start(self, ledger: EpochLedger | StreamLedger) -> None:
        """Begin to draw what an epoch's ledger leaves to this rank; what was drawn and not taken is forgotten."""
        self._ready.clear()
        self._workers = []
        self._chunks = iter(())  # workers of an earlier deal end before others begin
        if self._indexed is not None and self._indexed[0].out:
            self._indexed = None  # torch would wait for what persistent workers still read, and not for long
        loader = self._stream(ledger) if isinstance(ledger, StreamLedger) else self._of_views(ledger)
        seeds = np.random.SeedSequence([self._config.seed, ledger.epoch, self._rank])
        loader.generator.manual_seed(int(seeds.generate_state(1)[0]))
        self._chunks = iter(loader)
        self._watch_workers()

    def _watch_workers(self) -> None:
        """Have a worker's death raised in this thread while it waits for samples, where it can be told to all ranks.

        A worker that dies within a message leaves a read that nothing else ends. torch raises from its handler of
        SIGCHLD, but wherever the main thread is then, and not where a fork server is the workers' parent.
        """
        self._workers = getattr(self._chunks, "_workers", [])
        if self._workers:
            signal.signal(signal.SIGCHLD, self._worker_may_have_died)
            ends = [worker.sentinel for worker in self._workers]
            threading.Thread(target=_signal_ends, args=(ends,), name="odb-workers", daemon=True).start()

    def _of_views(self, ledger: EpochLedger) -> DataLoader[Sample | Failure]:
        config = self._config
        views = ledger.share(self._rank)
        if self._indexed is None:
            chunks = _Chunks(min(_CHUNK, self._share_of_a_worker(-(-len(ledger.views) // ledger.world_size))))
            self._indexed = chunks, self._loader(SampleReader(self._dataset, config), chunks.size, batch_sampler=chunks)
        chunks, loader = self._indexed
        order = epoch_order(
            len(self._dataset),
            epoch=ledger.epoch,
            seed=config.seed,
            shuffle=config.shuffle,
            max_samples=config.max_samples,
        )
        chunks.begin(views, order[ledger.positions(views)], ledger.epoch)
        return loader

    def _stream(self, ledger: StreamLedger) -> DataLoader[Sample | Failure]:
        self._in_sampler = 1
        reader = StreamReader(
            self._dataset,
            self._config,
            rank=self._rank,
            world_size=ledger.world_size,
            epoch=ledger.epoch,
            done=ledger.done(),
        )
        size = min(_CHUNK, self._share_of_a_worker(self._config.buffer_size))
        return self._loader(reader, size, batch_size=size, drop_last=False)

    def _share_of_a_worker(self, views: int) -> int:
        """Samples that a worker keeps ready: all together one buffer."""
        return -(-min(max(views, 1), self._config.buffer_size) // max(self._config.num_workers, 1))

    def _loader(self, reader: Any, chunk: int, **sampling: Any) -> DataLoader[Sample | Failure]:
        config = self._config
        workers = config.num_workers
        ready = config.prefetch_factor or self._share_of_a_worker(config.buffer_size)
        return DataLoader(
            reader,
            num_workers=workers,
            collate_fn=list,
            generator=torch.Generator(),
            worker_init_fn=_WorkerStart(config),
            multiprocessing_context=config.start_method if workers else None,
            prefetch_factor=-(-ready // chunk) if workers else None,
            # The reader of a stream belongs to one epoch.
            persistent_workers=config.persistent_workers and workers > 0 and not isinstance(reader, IterableDataset),
            timeout=min(_CHECK_S, self._patience) if workers else 0,
            **sampling,
        )

    def close(self) -> None:
        """End the workers."""
        self._chunks = iter(())
        self._indexed = None

    @property
    def in_sampler(self) -> int:
        """Views of this deal that no worker has been asked for; of a stream, 1 until it ends."""
        return self._indexed[0].left if self._indexed else self._in_sampler

    @property
    def in_workers(self) -> int:
        """Views asked for and not yet taken; of a stream 0, since nobody knows."""
        return self._indexed[0].out if self._indexed else 0

    def take(self, count: int) -> list[Sample]:
        """Next samples in the order of the views; fewer than asked for only at the end.

        Raises:
            SampleError: for the first of them that cannot be used.
        """
        taken: list[Sample] = []
        while len(taken) < count:
            if not self._ready:
                chunk = self._next_chunk()
                if chunk is None:
                    self._in_sampler = 0
                    self._workers = []  # they end now
                    break
                self._ready.extend(chunk)
            sample = self._ready.popleft()
            if self._indexed:
                self._indexed[0].out -= 1
            if isinstance(sample, Failure):
                raise SampleError(*sample)
            taken.append(sample)
        return taken

    def _next_chunk(self) -> list[Sample | Failure] | None:
        deadline = time.monotonic() + self._patience
        while True:
            try:
                self._waiting = True
                self._worker_may_have_died()
                return next(self._chunks, None)
            except RuntimeError as error:  # torch has no class of its own for it
                if "timed out" not in str(error):
                    raise
                if time.monotonic() >= deadline:
                    raise SampleError(
                        f"no sample from the data workers within {self._patience:g} s: the dataset hangs or is slow; "
                        "pass a larger timeout if it is meant to be"
                    ) from None
            finally:
                self._waiting = False

    def _worker_may_have_died(self, *_: object) -> None:
        if not self._waiting or getattr(self._chunks, "_shutdown", False):  # at the end of a pass workers do end
            return
        # A fork server tells of an exit code once; whoever asks a moment later, as a nested call does, hears of 255.
        self._waiting = False
        dead = [worker for worker in self._workers if worker.exitcode not in (None, 0, 255)]
        if dead:
            how = [f"pid {worker.pid}, exit code {worker.exitcode}" for worker in dead]
            raise RuntimeError(f"DataLoader worker exited unexpectedly ({'; '.join(how)}); a negative code is a signal")
        self._waiting = True


def _signal_ends(sentinels: list[int]) -> None:
    """Interrupt the main thread at each end of a process."""
    main = threading.main_thread().ident
    while sentinels and main is not None:
        for ended in connection.wait(sentinels):
            sentinels.remove(ended)  # type: ignore[arg-type]
            signal.pthread_kill(main, signal.SIGCHLD)


class _Chunks:
    """A batch sampler of draws that counts what it has handed out."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.out = 0
        self._drawn = 0
        self._epoch = 0
        self._views: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self._identities = self._views

    def begin(self, views: npt.NDArray[np.int64], identities: npt.NDArray[np.int64], epoch: int) -> None:
        self._views, self._identities, self._epoch = views, identities, epoch
        self._drawn = self.out = 0

    @property
    def left(self) -> int:
        return len(self._views) - self._drawn

    def __iter__(self) -> Iterator[list[Draw]]:
        views, identities = self._views, self._identities  # a sampler of an earlier deal hands out nothing of this one
        while self._views is views and self._drawn < len(views):
            chunk = slice(self._drawn, self._drawn + self.size)
            pairs = zip(views[chunk].tolist(), identities[chunk].tolist(), strict=True)
            draws = [(view, identity, self._epoch) for view, identity in pairs]
            self._drawn += len(draws)
            self.out += len(draws)
            yield draws


class _WorkerStart:
    """What a data worker does first; a class, so that it pickles under `spawn`."""

    def __init__(self, config: LoaderConfig) -> None:
        self._config = config

    def __call__(self, worker_id: int) -> None:
        end_with_parent()
        if self._config.worker_init_fn is not None:
            self._config.worker_init_fn(worker_id)
