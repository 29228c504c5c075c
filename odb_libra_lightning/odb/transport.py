"""What carries the messages of ranks: Gloo between processes, nothing for one rank, lockstep in one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch._C._distributed_c10d import ProcessGroupGloo, Store

from odb_libra_lightning.odb.errors import PeerLostError
from odb_libra_lightning.odb.exchange import Gather, Message, Room

Events: TypeAlias = Generator[Any, Any, None]


class Transport(Protocol):
    """Carries one all_gather at a time."""

    def all_gather(self, message: Message) -> Message:
        """Gather int64 `[k]` of every rank into `[W, k]`.

        Raises:
            PeerLostError: if another rank does not answer in time.
        """
        ...


class LocalTransport:
    """One rank alone."""

    def all_gather(self, message: Message) -> Message:
        """Its own message, `[1, k]`."""
        return message[None]


class GlooTransport:
    """A Gloo group of its own between the collate processes, apart from the trainer's.

    Built directly, not through `init_process_group`, so that a forked process is free of the default group that
    it inherits.

    Args:
        store: key-value store that all ranks reach, under a name that no other group uses.
        rank: this rank.
        world_size: number of ranks.
        timeout: seconds to wait for the others.

    Raises:
        PeerLostError: if the group does not form in time.
    """

    def __init__(self, store: Store, *, rank: int, world_size: int, timeout: float) -> None:
        self._rank = rank
        self._world_size = world_size
        self._timeout = timeout
        try:
            self._group = ProcessGroupGloo(store, rank, world_size, timedelta(seconds=timeout))
        except RuntimeError as error:
            raise PeerLostError(
                f"rank {rank}: the control group of {world_size} ranks did not form within {timeout:g} s; "
                f"do all ranks train with the same loader? ({error})"
            ) from error

    def all_gather(self, message: Message) -> Message:
        """Gather over Gloo."""
        mine = torch.from_numpy(np.ascontiguousarray(message))
        everyone = [torch.empty_like(mine) for _ in range(self._world_size)]
        try:
            work: Any = self._group.allgather([everyone], [mine])  # type: ignore[attr-defined]
            work.wait()
        except RuntimeError as error:
            raise PeerLostError(
                f"rank {self._rank}: another rank's collate process has ended or did not answer within "
                f"{self._timeout:g} s; where it has ended, its own output says why ({error})"
            ) from error
        return torch.stack(everyone).numpy()


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
    answers: list[Any] = [None] * len(generators)
    while True:
        messages = []
        for rank, events in enumerate(generators):
            messages.append(_next_gather(events, answers[rank], yielded[rank], partial(has_room, rank)))
        if all(message is None for message in messages):
            return yielded
        shapes = {None if message is None else message.shape for message in messages}
        assert len(shapes) == 1, f"ranks have parted: one gathers while another ends or gathers differently: {shapes}"
        gathered = np.stack([message for message in messages if message is not None])
        answers = [gathered.copy() for _ in generators]


def _next_gather(events: Events, answer: Any, yielded: list[Any], has_room: Callable[[], bool]) -> Message | None:
    try:
        event = events.send(answer)
        while not isinstance(event, Gather):
            if isinstance(event, Room):
                event = events.send(has_room())
            else:
                yielded.append(event)
                event = events.send(None)
    except StopIteration:
        return None
    return event.message
