"""Who of a group is still there: what makes of a failed exchange a sentence that names a rank."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store

from odb_libra_lightning.odb.errors import PeerLostError

# What a rank is found at, beside the number of an exchange.
_LOST = b"lost"  # its process ended, and the rank before it saw that
_GAVE_UP = b"gave up"  # it noticed itself that another one is missing
# What stands in place of a message that will not come.
NO_MESSAGE = b""

# Key that says that somebody is lost, or has given up.
_NEWS = "news"
# How long it may take until the end of a process is known to all.
_NEWS_S = 2.0
# How long a rank that has heard of it goes on, for the others to hear too; longer than `GlooTransport` takes for it.
_LINGER_S = 3.0
# How often the messages that a lost rank owes are marked.
_MARK_S = 0.5
# Without an answer from the other host, a connection counts as broken after 5 + 3 * 2 seconds.
_KEEPALIVE = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3))


class RollCall:
    """A group's attendance list in the key-value store, and a watch that each rank keeps on the next.

    Each rank writes down which exchange it has come to, so that a rank that waits in vain sees who has not. And each
    holds a socket to which the rank before it is connected. That connection breaks when the process ends and at no
    other time: unlike a heartbeat, it is not missed by a process that computes or is stopped in a debugger.

    Args:
        store: a connection of its own to the store, under a name that no other group uses.
        rank: number of this process within the group.
        names: how to call each process of the group, such as "rank 1".
        address: address at which others reach this process.
        timeout: seconds to wait for the others.

    Raises:
        PeerLostError: if not all have come within `timeout`; it names them.
    """

    def __init__(self, store: Store, *, rank: int, names: Sequence[str], address: str, timeout: float) -> None:
        self.store: Any = store  # its annotations know no bytes
        self.rank = rank
        self.names = names
        self.timeout = timeout
        self.number = 0
        self._keys = [f"at/{member}" for member in range(len(names))]
        family = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][0]
        self._door = socket.create_server((address, 0), family=family)
        try:
            store.set(f"door/{rank}", json.dumps([address, self._door.getsockname()[1]]))
            store.set(self._keys[rank], "0")
            try:
                store.wait(self._keys, timedelta(seconds=timeout))
            except RuntimeError as error:
                absent = self._named(_absent(store, self._keys))
                raise PeerLostError(
                    f"{names[rank]}: the control group of {len(names)} did not form, since {absent} did not come "
                    f"within {timeout:g} s; do all ranks train with the same loader?"
                ) from error
            self._watch((rank + 1) % len(names))
        except RuntimeError as error:
            if isinstance(error, PeerLostError):
                raise
            raise self._store_lost() from error

    def attend(self) -> int:
        """Write down that this rank has come to its next exchange.

        Returns:
            Its number, from 1.
        """
        self.number += 1
        try:
            self.store.set(self._keys[self.rank], str(self.number))
        except RuntimeError as error:
            raise self._store_lost() from error
        return self.number

    def has_news(self) -> bool:
        """Whether some rank is known to be lost, or another one has given up waiting."""
        try:
            return bool(self.store.check([_NEWS]))
        except RuntimeError as error:
            raise self._store_lost() from error

    def absence(self, *, waited: float, cause: object = "") -> PeerLostError:
        """What to raise once the present exchange has failed: who did not come.

        Returns when all ranks that wait in it have had time to hear of it, as this one may be rank 0, whose process
        ends and takes the store along.

        Args:
            waited: seconds that this rank has waited in the exchange.
            cause: what the transport says, for the case that nobody is missing.
        """
        me = self.names[self.rank]
        deadline = time.monotonic() + (0 if waited >= 0.95 * self.timeout else _NEWS_S)
        try:
            while not self.has_news() and time.monotonic() < deadline:
                time.sleep(0.05)
            found = self.store.multi_get(self._keys)
            lost = [member for member, at in enumerate(found) if at == _LOST]
            late = [member for member, at in enumerate(found) if at.isdigit() and int(at) < self.number]
            self.store.set(self._keys[self.rank], _GAVE_UP)
            self._tell([] if lost else late)
        except RuntimeError:
            return self._store_lost()
        found = self._linger(found)
        lost = lost or [member for member, at in enumerate(found) if at == _LOST]
        # Not all who are behind hang: some may wait in vain in the exchange before. But those give up too.
        late = [member for member, at in enumerate(found) if at.isdigit() and member != self.rank] or late
        if lost:
            return PeerLostError(
                f"{me}: {self._named(lost)} does not answer, its process has ended before the epoch did; "
                "its own output says why"
            )
        if late:
            return PeerLostError(
                f"{me}: {self._named(late)} does not answer within {self.timeout:g} s; it hangs, or reading its "
                "samples takes longer; pass a larger timeout if it is meant to"
            )
        return PeerLostError(
            f"{me}: the exchange failed though no rank is missing: this one came over {self.timeout:g} s late, or they "
            "cannot reach one another; where a host has several networks, set GLOO_SOCKET_IFNAME to the interface of "
            f"the one that all share ({cause})"
        )

    def _linger(self, found: list[bytes]) -> list[bytes]:
        """Wait until the others can have heard of it, and return where they stood at the last."""
        begin = time.monotonic()
        with contextlib.suppress(RuntimeError):  # rank 0 has ended meanwhile
            while time.monotonic() < begin + _LINGER_S:
                time.sleep(_LINGER_S / 6)
                found = self.store.multi_get(self._keys)
        return found

    def _named(self, members: Sequence[int]) -> str:
        return " and ".join(self.names[member] for member in members)

    def _store_lost(self) -> PeerLostError:
        return PeerLostError(
            f"{self.names[self.rank]}: rank 0's process has ended, and the control store with it; "
            "its own output says why"
        )

    def _watch(self, member: int) -> None:
        """Keep a connection to a process from which nothing is ever read but its end."""
        address = json.loads(self.store.get(f"door/{member}"))
        try:
            connection = socket.create_connection(address, timeout=self.timeout)
        except OSError:
            return  # a firewall, say; then its end is noticed after the timeout
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            if hasattr(socket, option):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        over = threading.Event()
        watch = threading.Thread(target=_wait_for_end, args=(connection, weakref.ref(self), member, over), daemon=True)
        watch.start()
        # At the interpreter's exit too: a thread that then is inside the store would abort the process.
        weakref.finalize(self, _end_watch, watch, connection, over, os.getpid())

    def _mark_lost(self, member: int) -> None:
        with contextlib.suppress(RuntimeError):  # the store has ended too, and whoever needs it sees that
            if self.store.get(self._keys[member]) not in (_GAVE_UP, _LOST):
                self.store.set(self._keys[member], _LOST)
            self._tell([member])

    def _tell(self, members: Sequence[int]) -> None:
        """Tell all that some will not come, those too who wait for their messages in the store.

        The next message of such a rank is that of the exchange that this rank is in, or of the one after it: it cannot
        have gone further without this rank's own message. A mark beside a message is never read.
        """
        number = self.number
        for owed in (number, number + 1):
            for member in members:
                self.store.compare_set(message_key(owed, member), NO_MESSAGE, NO_MESSAGE)
        self.store.set(_NEWS, "")


def message_key(number: int, member: int) -> str:
    """Key of a message in the store: exchange `number`, from `member`."""
    return f"message/{number}/{member}"


def _absent(store: Store, keys: list[str]) -> list[int]:
    """Which keys are not in the store, by halves, since it only tells whether all of them are."""

    def search(low: int, high: int) -> list[int]:
        if store.check(keys[low:high]):
            return []
        if high - low == 1:
            return [low]
        middle = (low + high) // 2
        return search(low, middle) + search(middle, high)

    return search(0, len(keys))


def _wait_for_end(
    connection: socket.socket, watcher: weakref.ref[RollCall], member: int, over: threading.Event
) -> None:
    with contextlib.suppress(OSError):
        connection.recv(1)
    # Again and again, since this rank and those ahead of it may come to the message that is missing only later.
    while not over.is_set() and (roll := watcher()) is not None:
        roll._mark_lost(member)
        del roll
        over.wait(_MARK_S)


def _end_watch(watch: threading.Thread, connection: socket.socket, over: threading.Event, process: int) -> None:
    if os.getpid() != process:
        return  # a forked process, whose socket is the parent's
    over.set()
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    if watch is not threading.current_thread():
        watch.join(_NEWS_S)
    connection.close()
