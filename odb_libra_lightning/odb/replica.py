"""Processes that share a data-parallel rank: the leader loads, the others receive the same steps."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Protocol

from odb_libra_lightning.odb.epoch import EpochStart
from odb_libra_lightning.odb.errors import ODBError
from odb_libra_lightning.odb.rendezvous import ReplicaChannel
from odb_libra_lightning.odb.steps import Step


class Feed(Protocol):
    """Where a loader's steps come from."""

    def steps(self, start: EpochStart) -> Iterator[Step]:
        """Steps of one epoch."""
        ...

    def close(self) -> None:
        """End what runs for it."""
        ...


class LeaderFeed:
    """Takes steps from a feed and hands each to the other members as well."""

    def __init__(self, feed: Feed, channel: ReplicaChannel) -> None:
        self._feed = feed
        self._channel = channel

    def steps(self, start: EpochStart) -> Iterator[Step]:
        """Steps of one epoch."""
        try:
            for step in self._feed.steps(start):
                self._channel.broadcast(pickle.dumps(step))
                yield step
        except ODBError as error:
            self._channel.broadcast(pickle.dumps(str(error)))
            raise
        self._channel.broadcast(pickle.dumps(None))

    def close(self) -> None:
        """End the feed."""
        self._feed.close()


class FollowerFeed:
    """Receives the leader's steps, its end of an epoch, or its failure."""

    def __init__(self, channel: ReplicaChannel) -> None:
        self._channel = channel

    def steps(self, start: EpochStart) -> Iterator[Step]:
        """Steps of one epoch, which begins as the leader's does.

        Raises:
            ODBError: with the leader's text.
        """
        while (received := pickle.loads(self._channel.broadcast(None))) is not None:
            if isinstance(received, str):
                raise ODBError(received)
            yield received

    def close(self) -> None:
        """Nothing runs here."""
