"""Where a loader's steps come from: this process, a collate process, or another process that shares the rank."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch.utils.data._utils.pin_memory import pin_memory

from odb_libra_lightning.odb.epoch import EpochStart
from odb_libra_lightning.odb.errors import ODBError
from odb_libra_lightning.odb.rank_data import RankData
from odb_libra_lightning.odb.rendezvous import ReplicaChannel
from odb_libra_lightning.odb.steps import Step
from odb_libra_lightning.odb.wire import from_bytes


class Feed(Protocol):
    """Where steps come from, their batches decoded; `CollateProcess` is one too."""

    def steps(self, start: EpochStart) -> Iterator[Step]:
        """Steps of one epoch."""
        ...

    def close(self) -> None:
        """End what runs for it."""
        ...


def decoder(*, pinned: bool) -> Callable[[Any], Any]:
    """What makes a batch of the bytes that it travels as, in page-locked memory if wanted and of use."""
    return _pinned if pinned and torch.cuda.is_available() else from_bytes


def _pinned(payload: Any) -> Any:
    return pin_memory(from_bytes(payload))  # type: ignore[no-untyped-call]


class LocalFeed:
    """Everything in this process."""

    def __init__(self, data: RankData, decode: Callable[[Any], Any]) -> None:
        self._data = data
        self._decode = decode

    def steps(self, start: EpochStart) -> Iterator[Step]:
        """Steps of one epoch."""
        for step in self._data.steps(start):
            yield replace(step, payload=self._decode(step.payload))

    def close(self) -> None:
        """Forget the samples that were read ahead."""
        self._data.close()


class LeaderFeed:
    """Takes steps from a feed that leaves them encoded, and hands each to the other members of its rank as well.

    Args:
        open_feed: opens that feed. It is called with the first epoch, so that its failure reaches the members too.
        channel: to the members.
        decode: makes a batch of its bytes.
    """

    def __init__(self, open_feed: Callable[[], Feed], channel: ReplicaChannel, decode: Callable[[Any], Any]) -> None:
        self._open_feed = open_feed
        self._channel = channel
        self._decode = decode
        self._feed: Feed | None = None

    def steps(self, start: EpochStart) -> Iterator[Step]:
        """Steps of one epoch."""
        steps = self._encoded_steps(start)
        while True:
            try:
                step = next(steps, None)
            except Exception as error:
                text = str(error) if isinstance(error, ODBError) else f"{type(error).__name__}: {error}"
                self._channel.broadcast(pickle.dumps(text))
                raise
            self._channel.broadcast(pickle.dumps(step))
            if step is None:
                return
            yield replace(step, payload=self._decode(step.payload))

    def _encoded_steps(self, start: EpochStart) -> Iterator[Step]:
        self._feed = self._feed or self._open_feed()
        yield from self._feed.steps(start)

    def close(self) -> None:
        """End the feed."""
        if self._feed is not None:
            self._feed.close()


class FollowerFeed:
    """Receives the leader's steps, its end of an epoch, or its failure."""

    def __init__(self, channel: ReplicaChannel, decode: Callable[[Any], Any]) -> None:
        self._channel = channel
        self._decode = decode

    def steps(self, start: EpochStart) -> Iterator[Step]:
        """Steps of one epoch, which begins as the leader's does.

        Raises:
            ODBError: with the leader's text.
        """
        while (received := pickle.loads(self._channel.broadcast(None))) is not None:
            if isinstance(received, str):
                raise ODBError(received)
            yield replace(received, payload=self._decode(received.payload))

    def close(self) -> None:
        """Nothing runs here."""
