"""What ranks say to one another, as generators: each `yield Gather(...)` or `Broadcast(...)` is one exchange.

A generator does not know what carries its messages. `transport.drive` runs one over a transport, and
`transport.play` runs those of all ranks in one process, in lockstep.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from odb_libra_lightning.odb.errors import ODBError

Message: TypeAlias = npt.NDArray[np.int64]
T = TypeVar("T")

_OPEN, _FULL, _FAILED = range(3)  # how a rank is, in the first number of its message
SMALL = 2**31
# A failure text is cut to this many bytes: it crosses the wire once for each rank.
_MAX_TEXT = 32_768


@dataclass(frozen=True)
class Room:
    """A question: is there room for more finished steps? Answered by a bool, within a fraction of the timeout."""


@dataclass(frozen=True)
class Gather:
    """One all_gather: `message` is int64 `[k]`, with the same `k` on every rank; the answer is `[W, k]`."""

    message: Message


@dataclass(frozen=True)
class Broadcast:
    """One broadcast: the answer is the bytes of rank `root`, on every rank; `payload` is read there alone."""

    root: int
    payload: bytes | None


Exchange: TypeAlias = Generator[Gather | Broadcast | Room, Any, T]


def gather(values: Sequence[int], *, failure: str | None = None) -> Exchange[Message]:
    """Exchange integers, unless some rank has failed, once every rank has room for what follows.

    A rank without room says so instead of keeping the others waiting, and all ask again. So ranks hear of one another
    however long training pauses, and silence means that something hangs.

    Args:
        values: `[k]` integers, the same `k` on every rank, whether it failed or not.
        failure: what went wrong on this rank since the last exchange, if anything did.

    Returns:
        int64 `[W, k]`, the same on every rank.

    Raises:
        ODBError: on every rank, with the text of the lowest rank that failed. Whether a second exchange
            fetches that text is read off what all ranks gathered, so all of them make it or none does.
    """
    full = True
    while full:
        has_room = failure is not None or (yield Room())
        state = _FAILED if failure is not None else _OPEN if has_room else _FULL
        gathered: Message = yield Gather(np.array([state, *values], np.int64))
        failed = np.flatnonzero(gathered[:, 0] == _FAILED)
        if len(failed):
            texts = yield from gather_bytes((failure or "").encode()[:_MAX_TEXT])
            raise ODBError(texts[int(failed[0])].decode(errors="replace"))
        full = bool((gathered[:, 0] == _FULL).any())
    return gathered[:, 1:]


def gather_small(values: Sequence[int], count: int, *, failure: str | None = None) -> Exchange[npt.NDArray[np.int32]]:
    """The same for integers below `SMALL`, which travel two to a word.

    Args:
        values: at most `count` integers; ranks may have fewer than others.
        count: how many columns the answer has, the same on every rank.
        failure: what went wrong on this rank.

    Returns:
        int32 `[W, count]`, padded with 0.

    Raises:
        OverflowError: if a value does not fit.
        ODBError: as `gather` does.
    """
    packed = np.zeros(count + count % 2, np.int32)
    packed[: len(values)] = values
    gathered = yield from gather(packed.view(np.int64).tolist(), failure=failure)
    return np.ascontiguousarray(gathered).view(np.int32)[:, :count]


def gather_bytes(payload: bytes) -> Exchange[list[bytes]]:
    """Exchange bytes of any length, which need not be equal: two all_gathers."""
    sizes: Message = (yield Gather(np.array([len(payload)], np.int64)))[:, 0]
    words = -(-int(sizes.max()) // 8)
    padded = np.frombuffer(bytearray(payload.ljust(words * 8, b"\0")), np.int64)
    gathered: Message = yield Gather(padded)
    return [gathered[rank].tobytes()[: int(size)] for rank, size in enumerate(sizes)]
