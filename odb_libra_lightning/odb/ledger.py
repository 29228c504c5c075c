"""Which views of an epoch are trained on, and which are left for whom: the value that a checkpoint holds.

Source: ODB, section 5 (`R, Q, B, E` partition the views of a rank); here only `E` is kept, since the rest follows.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

Views = npt.NDArray[np.int64]


class EpochLedger:
    """The views of one epoch: how they are dealt to the ranks, and which of them are done.

    Guarantee: until the next `deal`, ranks keep their shares; a new deal, to any number of ranks, hands out exactly
    the samples of which no view is done. Price: where shares must be equal, or fewer samples are left than ranks, a
    deal repeats fewer than `world_size` samples.

    Args:
        num_samples: samples that the epoch draws, `M`.
        world_size: number of data-parallel ranks.
        equal: whether all ranks draw the same number of views in an epoch dealt afresh (`join`).
        epoch: number of the epoch, from 0.

    Attributes:
        steps: training steps behind the views that are done.
        dropped: views among them that a policy dropped.
        views: int64 `[V]`, the views of the present deal; rank `r` has `views[r::world_size]`.
    """

    def __init__(self, num_samples: int, world_size: int, *, equal: bool, epoch: int = 0) -> None:
        self.num_samples = num_samples
        self.epoch = epoch
        self.steps = 0
        self.dropped = 0
        self._equal = equal
        self._before = np.zeros(num_samples, bool)  # positions done before the present deal
        self._deal(world_size)

    def _deal(self, world_size: int) -> None:
        self.world_size = world_size
        left = np.flatnonzero(~self._before)
        repeats = -len(left) % world_size if self._equal or len(left) < world_size else 0
        self._repeated = left[np.arange(repeats) % max(len(left), 1)]
        self.views = np.concatenate([left, self.num_samples + np.arange(repeats)])
        self._done = np.zeros(self.num_samples + repeats, bool)

    def positions(self, views: Views) -> Views:
        """Positions in the epoch's order that views stand for."""
        repeats = views >= self.num_samples
        positions = views.copy()
        positions[repeats] = self._repeated[views[repeats] - self.num_samples]
        return positions

    def share(self, rank: int) -> Views:
        """Views that a rank has still to draw, in order."""
        mine: Views = self.views[rank :: self.world_size]
        return mine[~self._done[mine]]

    def drop_the_rest(self) -> None:
        """Count what is left as dropped: an epoch that is over has trained on all else."""
        if self._equal:
            self.dropped += len(self.views) - int(self._done.sum())
            self.mark(self.views)
        else:  # positions are marked here, not views: see `Step`
            left = np.flatnonzero(~self._all_done())
            self.dropped += len(left)
            self.mark(left)

    def share_sizes(self) -> Views:
        """Number of views that each rank has still to draw, int64 `[world_size]`."""
        undone = np.flatnonzero(~self._done[self.views])
        sizes: Views = np.bincount(undone % self.world_size, minlength=self.world_size)
        return sizes

    def mark(self, views: Views) -> None:
        """Count views of the present deal as done."""
        self._done[views] = True

    @property
    def done_views(self) -> int:
        """Views of the epoch that are done: samples done before the present deal, and views of it."""
        return int(self._before.sum()) + int(self._done.sum())

    def checksum(self) -> int:
        """The same for ledgers that leave the same views."""
        return zlib.crc32(np.packbits(self._done).tobytes(), zlib.crc32(np.packbits(self._before).tobytes()))

    @property
    def total(self) -> int:
        """Views of the epoch: done before the present deal, and all of the deal."""
        return int(self._before.sum()) + len(self.views)

    @property
    def samples_left(self) -> int:
        """Samples of the epoch of which no view is done."""
        return self.num_samples - int(self._all_done().sum())

    def deal(self, world_size: int) -> None:
        """Deal the samples that are left anew."""
        self._before = self._all_done()
        self._deal(world_size)

    def _all_done(self) -> npt.NDArray[np.bool_]:
        done = self._before.copy()
        done[self.positions(np.flatnonzero(self._done))] = True
        return done

    def state_dict(self) -> dict[str, Any]:
        """Plain values and packed bits."""
        return {
            "epoch": self.epoch,
            "steps": self.steps,
            "dropped": self.dropped,
            "samples": self.num_samples,
            "world_size": self.world_size,
            "equal": self._equal,
            "before": np.packbits(self._before),
            "done": np.packbits(self._done),
        }

    @classmethod
    def restore(cls, state: dict[str, Any], *, world_size: int, equal: bool) -> EpochLedger:
        """The ledger that a state was taken of; dealt anew unless each rank can and must keep its share.

        Args:
            state: what `state_dict` returned.
            world_size: number of data-parallel ranks now.
            equal: whether all ranks are to draw the same number of views.
        """
        ledger = cls(state["samples"], state["world_size"], equal=state["equal"], epoch=state["epoch"])
        ledger.steps, ledger.dropped = state["steps"], state["dropped"]
        ledger._before = _unpacked(state["before"], ledger.num_samples)
        ledger._deal(state["world_size"])
        ledger._done = _unpacked(state["done"], len(ledger._done))
        if not equal or (world_size, equal) != (state["world_size"], state["equal"]):
            ledger._equal = equal
            ledger.deal(world_size)
        return ledger


class StreamLedger:
    """The same for a dataset of unknown size: a view is a place in the stream, and rank `r` has every `W`-th.

    Attributes:
        steps: training steps behind the views that are done.
        dropped: views among them that a policy dropped.
    """

    num_samples = None
    total = None

    def __init__(self, world_size: int, *, epoch: int = 0) -> None:
        self.world_size = world_size
        self.epoch = epoch
        self.steps = 0
        self.dropped = 0
        self._done = np.zeros(0, bool)

    @property
    def done_views(self) -> int:
        """Views that are done."""
        return int(self._done.sum())

    def checksum(self) -> int:
        """The same for ledgers that leave the same views."""
        return zlib.crc32(np.packbits(np.trim_zeros(self._done, "b")).tobytes())

    def done(self) -> npt.NDArray[np.bool_]:
        """Whether each place of the stream is done; those beyond the end are not."""
        return self._done

    def mark(self, views: Views) -> None:
        """Count places of the stream as done."""
        if len(views) and (needed := int(views.max()) + 1) > len(self._done):
            grown = np.zeros(max(needed, 2 * len(self._done)), bool)
            grown[: len(self._done)] = self._done
            self._done = grown
        self._done[views] = True

    def state_dict(self) -> dict[str, Any]:
        """Plain values and packed bits."""
        return {
            "epoch": self.epoch,
            "steps": self.steps,
            "dropped": self.dropped,
            "samples": None,
            "world_size": self.world_size,
            "done": np.packbits(np.trim_zeros(self._done, "b")),
        }

    @classmethod
    def restore(cls, state: dict[str, Any], *, world_size: int) -> StreamLedger:
        """The ledger that a state was taken of, for any number of ranks."""
        ledger = cls(world_size, epoch=state["epoch"])
        ledger.steps, ledger.dropped = state["steps"], state["dropped"]
        ledger._done = _unpacked(state["done"], 8 * len(state["done"]))
        return ledger


def open_ledger(
    num_samples: int | None, *, world_size: int, mode: str, epoch: int = 0, state: dict[str, Any] | None = None
) -> EpochLedger | StreamLedger:
    """The ledger of an epoch that begins, or, with a state, of one that goes on.

    Args:
        num_samples: samples that the epoch draws; None for an iterable dataset.
        world_size: number of data-parallel ranks.
        mode: `"join"` or `"non_join"`.
        epoch: number of the epoch, from 0.
        state: what a ledger's `state_dict` returned.
    """
    if num_samples is None:
        return StreamLedger.restore(state, world_size=world_size) if state else StreamLedger(world_size, epoch=epoch)
    equal = mode == "join"
    if state:
        return EpochLedger.restore(state, world_size=world_size, equal=equal)
    return EpochLedger(num_samples, world_size, equal=equal, epoch=epoch)


def _unpacked(bits: Any, count: int) -> npt.NDArray[np.bool_]:
    return np.unpackbits(np.asarray(bits, np.uint8), count=count).astype(bool)
