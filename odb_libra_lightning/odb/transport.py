"""What carries the messages of ranks: Gloo or the control store between processes, lockstep in one process."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch._C._distributed_c10d import ProcessGroupGloo, Store

from odb_libra_lightning.odb.errors import PeerLostError
from odb_libra_lightning.odb.exchange import Broadcast, Gather, Message, Room
from odb_libra_lightning.odb.roll_call import NO_MESSAGE, RollCall, message_key

Events: TypeAlias = Generator[Any, Any, None]

# What a message in the store begins with, so that an empty one differs from `NO_MESSAGE`.
_PRESENT = b"+"
# How often a rank that waits in Gloo looks whether another is lost.
_LOOK_S = 1.0
# A store refuses values over 8 MiB.
_PIECE_BYTES = 4 << 20


class Transport(Protocol):
    """Carries one exchange at a time; all ranks make the same ones in the same order."""

    def all_gather(self, message: Message) -> Message:
        """Gather int64 `[k]` of every rank into `[W, k]`.

        Raises:
            PeerLostError: if another rank does not answer in time.
        """
        ...

    def broadcast(self, payload: bytes | None, root: int) -> bytes:
        """The bytes of `root`, on every rank; `payload` is read there alone.

        Raises:
            PeerLostError: if another rank does not answer in time. `root` need not wait for the others, and may
                learn of it only in the next exchange.
        """
        ...


class LocalTransport:
    """One rank alone."""

    def all_gather(self, message: Message) -> Message:
        """Its own message, `[1, k]`."""
        return message[None]

    def broadcast(self, payload: bytes | None, root: int) -> bytes:
        """Its own bytes."""
        return _own(payload)


class GlooTransport:
    """A Gloo group of its own between the collate processes, apart from the trainer's.

    Built directly, not through `init_process_group`, so that a forked process is free of the default group that
    it inherits.

    Args:
        roll: the group, complete.
        address: address of this process whose network interface the group uses; where the variable
            `GLOO_SOCKET_IFNAME` names interfaces, Gloo takes those.

    Raises:
        PeerLostError: if the group does not form in time.
    """

    def __init__(self, roll: RollCall, *, address: str) -> None:
        self._roll = roll
        timeout = timedelta(seconds=roll.timeout)
        begin = time.monotonic()
        try:
            if "GLOO_SOCKET_IFNAME" in os.environ:
                self._group = ProcessGroupGloo(roll.store, roll.rank, len(roll.names), timeout)
            else:
                # Gloo's own choice is the address of the host's name, which on Debian is 127.0.1.1.
                options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
                options._devices = [ProcessGroupGloo.create_device(hostname=address)]
                options._timeout = timeout
                self._group = ProcessGroupGloo(roll.store, roll.rank, len(roll.names), options)
        except RuntimeError as error:
            raise roll.absence(waited=time.monotonic() - begin, cause=error) from error

    def all_gather(self, message: Message) -> Message:
        """Gather over Gloo."""
        mine = torch.from_numpy(np.ascontiguousarray(message))
        everyone = [torch.empty_like(mine) for _ in self._roll.names]
        self._roll.attend()
        self._wait(lambda group: group.allgather([everyone], [mine]))
        return torch.stack(everyone).numpy()

    def broadcast(self, payload: bytes | None, root: int) -> bytes:
        """Broadcast the size, then the bytes."""
        self._roll.attend()
        mine = _own(payload) if self._roll.rank == root else b""
        size = torch.tensor([len(mine)])
        self._wait(lambda group: group.broadcast(size, root))
        data = torch.from_numpy(np.frombuffer(bytearray(mine) or bytearray(int(size)), np.uint8))
        if size:
            self._wait(lambda group: group.broadcast(data, root))
        return data.numpy().tobytes()

    def _wait(self, begin_work: Callable[[Any], Any]) -> None:
        """Wait for an exchange, and for the news that it cannot succeed.

        Only a lost rank's neighbours in Gloo's ring see a connection break; the others wait for ranks that are alive.
        """
        begin = time.monotonic()
        try:
            work = begin_work(self._group)
            while not _ends(work, within=_LOOK_S):
                # Who is gone may have done its part before, as at an epoch's end.
                if self._roll.has_news() and not _ends(work, within=_LOOK_S):
                    break
            if work.is_completed():
                return
        except PeerLostError:
            raise
        except RuntimeError as error:
            raise self._roll.absence(waited=time.monotonic() - begin, cause=error) from error
        raise self._roll.absence(waited=time.monotonic() - begin)


class StoreTransport:
    """Messages by way of the control store, over which each rank reads those of the others.

    A round over Gloo polls, one over the store sleeps until the answer is there: where processes outnumber cores, the
    store is the quicker of the two. All its traffic goes through rank 0's process.

    A rank may delete its own messages of earlier exchanges once an all_gather is complete: it has then seen a message
    of every rank in that all_gather, each of which was set after its rank had read all of the exchanges before. After
    a broadcast it may not, since its root has heard of nobody.

    Args:
        roll: the group, complete.
        store: a connection beside that of `roll`, which must not wait while this one does.
    """

    def __init__(self, roll: RollCall, store: Store) -> None:
        self._roll = roll
        self._store: Any = store  # its annotations know no bytes
        self._written: list[str] = []  # own keys of earlier exchanges

    def all_gather(self, message: Message) -> Message:
        """Gather over the store."""
        number = self._roll.attend()
        mine = message_key(number, self._roll.rank)
        with self._absence():
            self._store.set(mine, _PRESENT + message.tobytes())
            found = self._store.multi_get([message_key(number, rank) for rank in range(len(self._roll.names))])
            self._check_sent(found)
            while self._written:
                self._store.delete_key(self._written.pop())
        self._written.append(mine)
        gathered = [np.frombuffer(data, np.int64, offset=len(_PRESENT)) for data in found]
        assert all(len(row) == len(message) for row in gathered), "ranks have parted: they gather different messages"
        return np.stack(gathered)

    def broadcast(self, payload: bytes | None, root: int) -> bytes:
        """Broadcast over the store, in pieces that a store takes."""
        number = self._roll.attend()
        head = message_key(number, root)
        with self._absence():
            if self._roll.rank == root:
                data = _own(payload)
                pieces = range(0, len(data), _PIECE_BYTES)
                for piece in pieces:
                    self._store.set(f"{head}/{piece}", data[piece : piece + _PIECE_BYTES])
                self._store.set(head, _PRESENT + str(len(data)).encode())
                self._written += [head, *(f"{head}/{piece}" for piece in pieces)]
                return data
            found = self._store.get(head)
            self._check_sent([found])
            size = int(found[len(_PRESENT) :])
            return b"".join(self._store.get(f"{head}/{piece}") for piece in range(0, size, _PIECE_BYTES))

    def _check_sent(self, found: list[bytes]) -> None:
        if NO_MESSAGE in found:
            raise RuntimeError("a message will not come")

    @contextlib.contextmanager
    def _absence(self) -> Iterator[None]:
        begin = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            raise self._roll.absence(waited=time.monotonic() - begin, cause=error) from error


def _ends(work: Any, *, within: float) -> bool:
    """Whether Gloo has done its work; raises what it met."""
    try:
        work.wait(timedelta(seconds=within))
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()
    return True


def _own(payload: bytes | None) -> bytes:
    assert payload is not None, "the root of a broadcast has nothing to send"
    return payload


class MeteredTransport:
    """Counts the time and the bytes of another transport's exchanges."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.seconds = 0.0
        self.bytes = 0

    def all_gather(self, message: Message) -> Message:
        """Gather, and count."""
        begin = time.perf_counter()
        gathered = self._transport.all_gather(message)
        self.seconds += time.perf_counter() - begin
        self.bytes += gathered.nbytes
        return gathered

    def broadcast(self, payload: bytes | None, root: int) -> bytes:
        """Broadcast, and count."""
        begin = time.perf_counter()
        received = self._transport.broadcast(payload, root)
        self.seconds += time.perf_counter() - begin
        self.bytes += len(received)
        return received


def drive(events: Events, transport: Transport, *, has_room: Callable[[], bool] = lambda: True) -> Iterator[Any]:
    """Run one rank's generator over a transport, and yield its finished steps.

    Args:
        events: what `RankEpoch.run` returns.
        transport: carries its exchanges.
        has_room: whether there is room for more steps; may wait a while for it.
    """
    answer: Any = None
    while True:
        try:
            event = events.send(answer)
        except StopIteration:
            return
        answer = None
        if isinstance(event, Gather):
            answer = transport.all_gather(event.message)
        elif isinstance(event, Broadcast):
            answer = transport.broadcast(event.payload, event.root)
        elif isinstance(event, Room):
            answer = has_room()
        else:
            yield event


def play(ranks: Iterable[Events], *, has_room: Callable[[int], bool] = lambda rank: True) -> list[list[Any]]:
    """Run the generators of all ranks in this process, in lockstep.

    Args:
        ranks: what `RankEpoch.run` returns, for each rank.
        has_room: whether a rank has room for more steps; asked again until all have.

    Returns:
        The finished steps of each rank.

    Raises:
        AssertionError: if the ranks do not make the same exchanges, which between processes would be a hang.
    """
    generators = list(ranks)
    yielded: list[list[Any]] = [[] for _ in generators]
    answer: Any = None
    while True:
        events: list[Any] = [
            _next_exchange(generator, answer, yielded[rank], partial(has_room, rank))
            for rank, generator in enumerate(generators)
        ]
        kinds = {_kind(event) for event in events}
        assert len(kinds) <= 1, f"ranks have parted: one ends or makes another exchange: {kinds}"
        first = events[0] if events else None
        if first is None:
            return yielded
        answer = _own(events[first.root].payload) if isinstance(first, Broadcast) else _stacked(events)


def tapped(events: Events, tap: Callable[[Any], bool]) -> Events:
    """The same events, each shown to `tap` on its way; those that it answers with True go no further."""
    answer: Any = None
    while True:
        try:
            event = events.send(answer)
        except StopIteration:
            return
        answer = None
        if not tap(event):
            answer = yield event


def _next_exchange(
    events: Events, answer: Any, yielded: list[Any], has_room: Callable[[], bool]
) -> Gather | Broadcast | None:
    try:
        event = events.send(answer)
        while not isinstance(event, Gather | Broadcast):
            if isinstance(event, Room):
                event = events.send(has_room())
            else:
                yielded.append(event)
                event = events.send(None)
    except StopIteration:
        return None
    return event


def _kind(event: Gather | Broadcast | None) -> tuple[Any, ...]:
    """What the events of all ranks must have in common."""
    if event is None:
        return ("end",)
    if isinstance(event, Broadcast):
        return ("broadcast", event.root)
    return ("all_gather", event.message.shape)


def _stacked(events: Iterable[Any]) -> Message:
    """The messages of all ranks; one array for all, which no rank may change."""
    gathered: Message = np.stack([event.message for event in events])
    gathered.setflags(write=False)
    return gathered
