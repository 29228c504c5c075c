"""The collate process of a rank: its main function, and the handle that the training process holds.

The training process sends an `EpochStart` or None over a pipe and reads frames back: for each step its
`BatchInfo` and its batch, then the epoch's end or a failure.
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import pickle
import queue
import threading
import traceback
from collections.abc import Iterator
from functools import partial
from multiprocessing import connection, util
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from odb_libra_lightning.odb.epoch import EpochStart, Step
from odb_libra_lightning.odb.errors import ODBError, PeerLostError
from odb_libra_lightning.odb.lifetime import end_with_parent, no_garbage_collection, obey_parent_alone
from odb_libra_lightning.odb.rank_data import RankData, RankJob

# How long a process that was asked to end may take.
_GRACE_S = 5.0
# How long a collate process waits for room before it tells the other ranks that it is still there.
_PATIENCE_S = 30.0


class CollateProcess:
    """Handle of a running collate process.

    It ends with this object, with the interpreter, and, by the kernel's hand, with the training process however
    that dies.
    """

    def __init__(self, job: RankJob) -> None:
        context: Any = mp.get_context(job.config.start_method)
        self._rank = job.rank
        self._timeout = job.config.timeout
        self._connection, theirs = context.Pipe(duplex=True)
        self._idle = True  # not within an epoch
        # Not daemonic, since it has children of its own: the data workers.
        in_main_thread = threading.current_thread() is threading.main_thread()
        self._process = context.Process(
            target=_main, args=(job, theirs, in_main_thread), name=f"odb-collate-{job.rank}"
        )
        with no_garbage_collection():
            self._process.start()
        theirs.close()
        # Before the interpreter joins non-daemonic children at exit (priority 0), which would wait forever.
        self._finalize = util.Finalize(self, _end, args=(self._process,), exitpriority=10)

    def steps(self, start: EpochStart) -> Iterator[Step]:
        """Steps of one epoch.

        Raises:
            ODBError: what stopped the data path, the same on every rank.
            PeerLostError: if the process died or does not answer in time.
        """
        self._idle = False
        try:
            self._connection.send(start)
        except OSError as error:
            raise self._died() from error
        while True:
            kind, content = pickle.loads(self._receive())
            if kind == "end":
                self._idle = True
                return
            if kind == "failure":
                raise ODBError(content)
            if kind == "peer lost":
                raise PeerLostError(content)
            info, views = content
            yield Step(info, self._receive(), views)

    def close(self) -> None:
        """End the process: an idle one is asked to, so that it ends its workers and their semaphores in good order."""
        if self._idle:
            with contextlib.suppress(OSError):  # it has ended already
                self._connection.send(None)
                self._process.join(_GRACE_S)
        self._finalize()
        self._connection.close()

    def _receive(self) -> bytes:
        # A little longer than the collate process waits for other ranks: its own error says more.
        ready = connection.wait([self._connection, self._process.sentinel], self._timeout + _GRACE_S)
        if not ready:
            raise PeerLostError(
                f"rank {self._rank}: no batch within {self._timeout:g} s. Its own dataset, or another rank's, "
                "takes longer or hangs; pass a larger timeout if it is meant to"
            )
        if self._connection in ready:
            try:
                frame: bytes = self._connection.recv_bytes()
                return frame
            except (EOFError, OSError) as error:
                raise self._died() from error
        raise self._died()

    def _died(self) -> PeerLostError:
        self._process.join(_GRACE_S)
        code = self._process.exitcode
        how = f"by signal {-code}" if code is not None and code < 0 else f"with exit code {code}"
        return PeerLostError(f"rank {self._rank}: its collate process ended {how} before the epoch did")


def _end(process: BaseProcess) -> None:
    for stop in (process.terminate, process.kill):
        if process.is_alive():
            stop()
            process.join(_GRACE_S)


def _main(job: RankJob, pipe: Connection, parent_is_main_thread: bool) -> None:
    obey_parent_alone()
    end_with_parent(parent_is_main_thread=parent_is_main_thread)
    torch.set_num_threads(1)
    outbox = _Outbox(pipe, job.config.prefetch_batches)
    # Well within the time that other ranks wait for this one's answer.
    has_room = partial(outbox.has_room, min(job.config.timeout / 4, _PATIENCE_S))
    try:
        data = RankData(job)
        while (request := pipe.recv()) is not None:
            for step in data.steps(request, has_room=has_room):
                outbox.put(pickle.dumps(("step", (step.info, step.views))), step.payload)
            outbox.put(pickle.dumps(("end", None)))
    except EOFError:
        pass  # the training process is gone
    except PeerLostError as error:
        outbox.put(pickle.dumps(("peer lost", str(error))))
    except ODBError as error:
        outbox.put(pickle.dumps(("failure", str(error))))
    except Exception:
        text = f"rank {job.rank}: the collate process failed\n\nOn rank {job.rank}:\n{traceback.format_exc()}"
        outbox.put(pickle.dumps(("failure", text)))
    outbox.close()


class _Outbox:
    """Finished frames on their way to the training process; `put` never waits, `has_room` does."""

    def __init__(self, pipe: Connection, size: int) -> None:
        self._pipe = pipe
        self._size = size
        self._steps = 0  # put and not sent
        self._sent = threading.Condition()
        self._frames: queue.SimpleQueue[tuple[bytes, ...] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._send, daemon=True)
        self._thread.start()

    def has_room(self, patience: float) -> bool:
        """Whether fewer steps than `size` wait to be sent, at the latest after `patience` seconds."""
        with self._sent:
            return self._sent.wait_for(lambda: self._steps < self._size, patience)

    def put(self, *frames: bytes) -> None:
        with self._sent:
            self._steps += 1
        self._frames.put(frames)

    def close(self) -> None:
        """Wait until everything is sent: what is written to a pipe outlives the writer."""
        self._frames.put(None)
        self._thread.join()

    def _send(self) -> None:
        while (frames := self._frames.get()) is not None:
            try:
                for frame in frames:
                    self._pipe.send_bytes(frame)
            except OSError:
                os._exit(1)  # the training process is gone, and nobody is left to tell
            with self._sent:
                self._steps -= 1
                self._sent.notify()
