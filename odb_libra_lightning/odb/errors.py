"""Errors a person can meet; the first line of each says what went wrong and what to change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class ODBError(RuntimeError):
    """The data path failed; raised with the same text and at the same step on every rank."""


class ShardError(ODBError, ValueError):
    """A dataset that cannot be shared out over the ranks."""


class SetupError(ODBError, ValueError):
    """Settings that do not fit the run: its processes, its model or its data."""


@contextmanager
def refusing_setup() -> Iterator[None]:
    """Turn a `ValueError` about settings into a `SetupError`, which a command shows as one sentence."""
    try:
        yield
    except ODBError:
        raise
    except ValueError as error:
        raise SetupError(str(error)) from error


class SampleError(ODBError):
    """A sample cannot be used: it raised, is empty, too long, or its length cannot be read."""

    def __init__(self, sentence: str, traceback: str = "") -> None:
        super().__init__(sentence)
        self.traceback = traceback


class PeerLostError(ODBError):
    """A process of the data path, on this rank or another, no longer answers."""
