"""What a callback keeps from batch to batch, and what of it a checkpoint holds."""

from __future__ import annotations

from typing import Generic, TypeVar

import lightning as L

from odb_libra_lightning.odb.batch_info import BatchInfo

T = TypeVar("T")


class Windowed(Generic[T]):
    """A value that advances with each batch, and the same as of the last full accumulation window.

    A checkpoint holds the second: a resumed run trains on an unfinished window again.

    Attributes:
        now: the value.
        settled: as of the last full window.
    """

    def __init__(self, start: T) -> None:
        self._start = start
        self.set(start)

    def set(self, value: T) -> None:
        """Take a value as it is, as from a checkpoint."""
        self.now = self.settled = value

    def advance(self, value: T, info: BatchInfo) -> None:
        """Take the value after a batch."""
        self.now = value
        if info.ends_window:
            self.settled = value

    def begin(self, trainer: L.Trainer) -> None:
        """Begin anew in a run that does; called in `setup`, after which a checkpoint is read."""
        if not trainer.global_step:
            self.set(self._start)
