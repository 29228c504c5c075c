"""How monitors find what a strategy with Libra's pools knows of each micro-batch."""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING, cast

import lightning as L

if TYPE_CHECKING:
    from odb_libra_lightning.strategies.micro_batch_facts import MicroBatchFacts
    from odb_libra_lightning.strategies.pool_session import PoolSession


def pool_session(trainer: L.Trainer) -> PoolSession | None:
    """The session of a strategy that computes attention in pools; None under any other strategy."""
    return cast("PoolSession | None", getattr(trainer.strategy, "session", None))


class FactsReader:
    """Reads the facts about each micro-batch once; asked after every micro-batch, so that none is lost."""

    def __init__(self) -> None:
        self._last: MicroBatchFacts | None = None

    def begin(self, trainer: L.Trainer) -> None:
        """Pass over what is there already, of an earlier `fit`."""
        session = pool_session(trainer)
        self._last = session.facts[-1] if session is not None and session.facts else None

    def new(self, trainer: L.Trainer) -> list[MicroBatchFacts]:
        """Facts about the micro-batches since the last call, in order."""
        session = pool_session(trainer)
        if session is None:
            return []
        found = list(takewhile(lambda facts: facts is not self._last, reversed(session.facts)))[::-1]
        if found:
            self._last = found[-1]
        return found
