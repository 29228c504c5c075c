"""The collate process of a rank: its main function, and the handle that the training process holds.

The training process sends requests for epochs, and word of each batch that it has taken. Frames come back: for each
step its `BatchInfo` and its batch, then the epoch's end or a failure. A thread of the training process receives and
decodes them while the trainer computes.
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import pickle
import queue
import select
import signal
import socket
import struct
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import util
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from odb_libra_lightning.odb.epoch import EpochStart
from odb_libra_lightning.odb.errors import ODBError, PeerLostError
from odb_libra_lightning.odb.lifetime import Ending, end_with_parent, no_garbage_collection
from odb_libra_lightning.odb.rank_data import RankData, RankJob
from odb_libra_lightning.odb.steps import Step

# How long a process that was asked to end may take.
_GRACE_S = 5.0
# How long a collate process waits for room before it tells the other ranks that it is still there.
_PATIENCE_S = 30.0
# How long a forked process may take to begin, and how many are tried.
_START_S = 10.0
_ATTEMPTS = 5
# Seconds after which a wait for a batch looks whether the collate process is alive.
_CHECK_S = 1.0


def _as_it_is(payload: bytearray) -> Any:
    return payload


class CollateProcess:
    """Handle of a running collate process.

    It ends with this object, with the interpreter, and, by the kernel's hand, with the training process however
    that dies.

    Args:
        job: what the process works on.
        decode: what `steps` yields as payload is `decode(payload)`. It runs in the receiving thread, ahead of the
            trainer, and must not refer to this object: that would keep it alive.
    """

    def __init__(self, job: RankJob, decode: Callable[[bytearray], Any] = _as_it_is) -> None:
        self._rank = job.rank
        self._timeout = job.config.timeout
        self._process, self._socket = _start(job)
        self._arrived: queue.SimpleQueue[tuple[str, Any, Any]] = queue.SimpleQueue()
        receiver = threading.Thread(
            target=_receive_all,
            args=(self._socket, decode, self._arrived),
            name=f"odb-receive-{job.rank}",
            daemon=True,  # or the interpreter would wait for it before it runs the finalizer
        )
        receiver.start()
        # Before the interpreter joins non-daemonic children at exit (priority 0), which would wait forever.
        self._finalize = util.Finalize(self, _end, args=(self._process, self._socket, receiver), exitpriority=10)

    def steps(self, start: EpochStart) -> Iterator[Step]:
        """Steps of one epoch.

        Args:
            start: how the pass begins.

        Raises:
            ODBError: what stopped the data path, the same on every rank.
            PeerLostError: if the process died or does not answer in time.
        """
        try:
            _send(self._socket, pickle.dumps(("epoch", start)))
        except OSError as error:
            raise self._died() from error
        while True:
            kind, content, payload = self._next_arrived()
            match kind:
                case "step":
                    with contextlib.suppress(OSError):  # it has ended, perhaps after the last step
                        _send(self._socket, pickle.dumps(("taken", None)))
                    info, views = content
                    yield Step(info, payload, views)
                case "end":
                    return
                case "failure":
                    raise ODBError(content)
                case "peer lost":
                    raise PeerLostError(content)
                case "not decoded":
                    raise content
                case _:
                    raise self._died()

    def close(self) -> None:
        """End the process. It is asked to, so that it ends its workers and their semaphores in good order."""
        self._finalize()

    def _next_arrived(self) -> tuple[str, Any, Any]:
        # A little longer than the collate process waits for other ranks: its own error says more.
        deadline = time.monotonic() + self._timeout + _GRACE_S
        died = False
        while (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                return self._arrived.get(timeout=min(left, _CHECK_S))
            if not died and not self._process.is_alive():
                # The receiver sees it too and says so, unless a descendant of the process keeps the socket open.
                died = True
                deadline = min(deadline, time.monotonic() + _GRACE_S)
        if died:
            raise self._died()
        raise PeerLostError(
            f"rank {self._rank}: no batch within {self._timeout:g} s. Its own dataset, or another rank's, "
            "takes longer or hangs; pass a larger timeout if it is meant to"
        )

    def _died(self) -> PeerLostError:
        self._process.join(_GRACE_S)
        code = self._process.exitcode
        how = f"by signal {-code}" if code is not None and code < 0 else f"with exit code {code}"
        return PeerLostError(f"rank {self._rank}: its collate process ended {how} before the epoch did")


def _start(job: RankJob) -> tuple[BaseProcess, socket.socket]:
    """Start a process and wait until it runs.

    A fork copies the locks of this process as they are, and where another thread held one, the child waits for it for
    ever. The resolver's is such a lock: the key-value store of rank 0 takes it for each process that connects. Whether
    it is free in the child is decided by the fork, so a child that does not get through is given up for another.
    """
    context: Any = mp.get_context(job.config.start_method)
    forked = context.get_start_method() == "fork"
    # Not daemonic, since it has children of its own: the data workers.
    in_main_thread = threading.current_thread() is threading.main_thread()
    for attempt in range(1, _ATTEMPTS + 1):
        mine, theirs = socket.socketpair()
        process = context.Process(
            target=_main, args=(job, theirs, in_main_thread, forked), name=f"odb-collate-{job.rank}"
        )
        try:
            with no_garbage_collection():
                process.start()
        except BaseException:
            mine.close()
            raise
        finally:
            theirs.close()
        if not forked or attempt == _ATTEMPTS or select.select([mine], [], [], _START_S)[0]:
            break
        process.kill()
        process.join(_GRACE_S)
        mine.close()
    return process, mine


def _end(process: BaseProcess, mine: socket.socket, receiver: threading.Thread) -> None:
    if process.is_alive():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            _send(mine, pickle.dumps(("stop", None)))
        process.join(_GRACE_S)
    if process.is_alive():
        process.kill()
        process.join(_GRACE_S)
    with contextlib.suppress(OSError):
        mine.shutdown(socket.SHUT_RDWR)
    if receiver is not threading.current_thread():  # where the collector may have run
        receiver.join(_GRACE_S)
    mine.close()


def _receive_all(
    mine: socket.socket, decode: Callable[[bytearray], Any], arrived: queue.SimpleQueue[tuple[str, Any, Any]]
) -> None:
    """Receive until the process or the handle ends. What waits in `arrived` is bounded by the sender's `has_room`."""
    while True:
        try:
            kind, content = pickle.loads(_receive(mine))
            payload = _receive(mine) if kind == "step" else bytearray()
        except (EOFError, OSError):
            arrived.put(("gone", None, None))
            return
        if kind == "started":
            continue
        if kind != "step":
            arrived.put((kind, content, None))
            continue
        try:
            batch = decode(payload)
        except Exception as error:
            arrived.put(("not decoded", error, None))
            return
        arrived.put((kind, content, batch))
        del payload, batch  # not to be held while the next is awaited


def _main(job: RankJob, theirs: socket.socket, parent_is_main_thread: bool, forked: bool) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # `_obey` hears when to end; data workers do end by this signal
    end_with_parent(parent_is_main_thread=parent_is_main_thread)
    torch.set_num_threads(1)
    if forked:
        socket.getnameinfo(("127.0.0.1", 0), socket.NI_NUMERICSERV)  # gets through, or never will: see `_start`
        _send(theirs, pickle.dumps(("started", None)))
    ending = Ending()
    outbox = _Outbox(theirs, job.config.prefetch_batches)
    requests: queue.SimpleQueue[EpochStart] = queue.SimpleQueue()
    threading.Thread(target=_obey, args=(theirs, requests, outbox, ending), name="odb-obey", daemon=True).start()
    # Well within the time that other ranks wait for this one's answer.
    has_room = partial(outbox.has_room, min(job.config.timeout / 4, _PATIENCE_S))
    try:
        data = RankData(job)
        while True:
            for step in data.steps(requests.get(), has_room=has_room):
                outbox.put_step(pickle.dumps(("step", (step.info, step.views))), step.payload)
            outbox.put(pickle.dumps(("end", None)))
    except PeerLostError as error:
        outbox.put(pickle.dumps(("peer lost", str(error))))
    except ODBError as error:
        outbox.put(pickle.dumps(("failure", str(error))))
    except Exception:
        text = f"rank {job.rank}: the collate process failed\n\nOn rank {job.rank}:\n{traceback.format_exc()}"
        outbox.put(pickle.dumps(("failure", text)))
    outbox.close()
    ending.begin()


def _obey(theirs: socket.socket, requests: queue.SimpleQueue[EpochStart], outbox: _Outbox, ending: Ending) -> None:
    """Take what the training process says, whatever the main thread is doing."""
    while True:
        try:
            kind, content = pickle.loads(_receive(theirs))
        except (EOFError, OSError):
            ending.at_once()  # the training process is gone
        match kind:
            case "epoch":
                requests.put(content)
            case "taken":
                outbox.one_taken()
            case "stop":
                ending.in_good_order()
                return


class _Outbox:
    """Finished frames on their way to the training process; putting never waits, `has_room` does."""

    def __init__(self, theirs: socket.socket, size: int) -> None:
        self._socket = theirs
        self._size = size
        self._steps = 0  # put, and not taken by the trainer, on whichever side they are
        self._taken = threading.Condition()
        self._frames: queue.SimpleQueue[tuple[bytes, ...] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._send, name="odb-send", daemon=True)
        self._thread.start()

    def has_room(self, patience: float) -> bool:
        """Whether fewer steps than `size` wait for the trainer, at the latest after `patience` seconds."""
        with self._taken:
            return self._taken.wait_for(lambda: self._steps < self._size, patience)

    def one_taken(self) -> None:
        """Note that the trainer has taken a step."""
        with self._taken:
            self._steps -= 1
            self._taken.notify()

    def put_step(self, *frames: bytes) -> None:
        """Put the frames of a step."""
        with self._taken:
            self._steps += 1
        self._frames.put(frames)

    def put(self, *frames: bytes) -> None:
        """Put frames that need no room."""
        self._frames.put(frames)

    def close(self) -> None:
        """Wait until everything is sent: what is written to a socket outlives the writer."""
        self._frames.put(None)
        self._thread.join()

    def _send(self) -> None:
        while (frames := self._frames.get()) is not None:
            try:
                for frame in frames:
                    _send(self._socket, frame)
            except OSError:
                return  # the training process is gone, which `_obey` notices too


# A `Connection` reads a large frame in hundreds of pieces and takes the interpreter lock for each, which a busy trainer
# is slow to give. Here the kernel fills the whole frame first.
_LENGTH = struct.Struct("!Q")


def _send(to: socket.socket, frame: bytes) -> None:
    to.sendall(_LENGTH.pack(len(frame)))
    to.sendall(frame)


def _receive(end: socket.socket) -> bytearray:
    (length,) = _LENGTH.unpack(_receive_exactly(end, _LENGTH.size))
    return _receive_exactly(end, length)


def _receive_exactly(end: socket.socket, length: int) -> bytearray:
    frame = bytearray(length)
    rest = memoryview(frame)
    while rest:
        received = end.recv_into(rest, 0, socket.MSG_WAITALL)
        if not received:
            raise EOFError
        rest = rest[received:]
    return frame
