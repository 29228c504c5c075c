"""Where training stands in its epochs: what is given out, what of it trained on, and where the next pass begins."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import torch

from odb_libra_lightning.odb.account import EpochAccount
from odb_libra_lightning.odb.batch_info import BatchInfo
from odb_libra_lightning.odb.epoch import EpochStart
from odb_libra_lightning.odb.ledger import EpochLedger, StreamLedger, Views, open_ledger


class Position:
    """The position of one loader, the same on every rank.

    Batches that are given out wait here until they are trained on (`settle`), and then enter the epoch's ledger.

    Args:
        num_samples: samples that an epoch draws; None for an iterable dataset.
        mode: `"join"` or `"non_join"`.
        order: what the order of an epoch follows from; a state within an epoch is good for the same only.
    """

    def __init__(self, num_samples: int | None, mode: str, order: dict[str, Any]) -> None:
        self._num_samples = num_samples
        self._mode = mode
        self._order = order
        self._epoch = 0
        self._ledger: EpochLedger | StreamLedger | None = None  # of the epoch that is under way; None before it is
        self._loaded: dict[str, Any] | None = None  # a state that no pass has gone on from yet
        self._next_step: int | None = None  # by which number a trainer calls the batch after the loaded state
        self._given: deque[tuple[BatchInfo, Views]] = deque()  # and not trained on
        self._ended = False  # whether the last pass came to its end
        self._limit: int | None = None  # number of the step at which the trainer ends the last pass
        self._limited = False  # whether it did
        self._deals: list[int] = []  # what each ended deal of the epoch had left
        self._last: BatchInfo | None = None
        self._account: EpochAccount | None = None

    def follow(self, other: Position) -> None:
        """Take over from the position of another loader of the same samples; of others, its number of the epoch."""
        if self._order == other._order and self._mode == other._mode:
            vars(self).update(vars(other), _given=deque())
        else:
            self.restart(other._epoch)

    def set_epoch(self, epoch: int, *, carry_on: bool) -> None:
        """Begin this epoch with the next pass, unless that goes on within it; `carry_on` as in `begin`."""
        if epoch != self._epoch or not (carry_on or self._loaded is not None):
            self.restart(epoch)

    def restart(self, epoch: int) -> None:
        """Begin this epoch with the next pass, whatever has gone before."""
        self._epoch, self._ledger, self._loaded = epoch, None, None
        self._next_step = None
        self._given.clear()
        self._deals, self._last = [], None

    def ahead(self, *, carry_on: bool) -> tuple[int, int]:
        """Number of the first step of the next pass, and views of its epoch that are done; `carry_on` as in `begin`."""
        state = self._loaded
        if state is not None:
            bits = [np.asarray(state[name], np.uint8) for name in ("before", "done") if name in state]
            done = int(np.unpackbits(np.concatenate(bits)).sum())
            return (self._next_step or 0) if carry_on else state["steps"], done
        return (self._next_step or 0) if carry_on else 0, self.samples_done if carry_on else 0

    @property
    def ending(self) -> bool:
        """Whether the last pass has come to its end with batches that are not trained on yet."""
        return self._ended and bool(self._given)

    def skip_epoch(self) -> None:
        """Begin the epoch after this one with the next pass."""
        self.restart(self._epoch + 1)

    def begin(self, world_size: int, *, carry_on: bool, accumulation: int, limit: int | None) -> EpochStart:
        """Begin a pass.

        Args:
            world_size: number of data-parallel ranks.
            carry_on: whether a pass goes on with an epoch that was broken off; otherwise only one that follows a
                `load_state_dict` does.
            accumulation: micro-batches of an accumulation window.
            limit: number of the step at which the trainer ends the epoch.
        """
        begun = self._given or (self._ledger is not None and self._ledger.done_views)  # one that gave nothing was none
        if begun and not carry_on and self._loaded is None:
            self.restart(self._epoch + 1)
        state = self._loaded
        if state is None and self._ledger is not None and self._ledger.done_views:
            state = self._ledger.state_dict()
        if state is not None and self._order.get("stream_sharding") == "dataset" and state["world_size"] != world_size:
            raise _other_samples("world_size", state["world_size"], world_size)
        # As long as nothing is trained on, another pass begins where this one does.
        first_step = (self._next_step or 0) if carry_on or state is None else state["steps"]
        self._ledger = open_ledger(
            self._num_samples, world_size=world_size, mode=self._mode, epoch=self._epoch, state=state
        )
        self._given.clear()
        self._limit = limit
        self._ended = self._limited = limit is not None and first_step >= limit
        return EpochStart(epoch=self._epoch, accumulation=accumulation, first_step=first_step, limit=limit, state=state)

    def give(self, info: BatchInfo, views: Views) -> None:
        """A batch is given out; at the limit the trainer asks for no more, not even for the end.

        Raises:
            RuntimeError: if another epoch was begun meanwhile.
        """
        if self._ledger is None or info.epoch != self._epoch:
            raise RuntimeError("set_epoch was called within a pass over the loader: call it between two")
        self._given.append((info, views))
        if info.batch_idx + 1 == self._limit:
            self._ended = self._limited = True

    def settle(self, *, through: int) -> None:
        """Batches up to this number are trained on: enter them, whole accumulation windows at a time."""
        full = [i for i, (info, _) in enumerate(self._given) if info.ends_window and info.batch_idx <= through]
        for _ in range(full[-1] + 1 if full else 0):
            self._enter(*self._given.popleft())
        if self._ended and not self._given:
            self._close_epoch()

    def _enter(self, info: BatchInfo, views: Views) -> None:
        assert self._ledger is not None
        if self._last is not None and info.deal > self._last.deal and self._last.samples_total is not None:
            self._deals.append(self._last.samples_total - self._last.samples_done)
        self._last = info
        self._ledger.mark(views)
        self._ledger.steps = info.batch_idx + 1
        self._ledger.dropped = info.samples_dropped
        self._loaded = self._next_step = None

    def end(self) -> None:
        """A pass came to its end; the epoch has once all its batches are trained on."""
        if self._ledger is not None:
            self._ended = True
            self.settle(through=-1)

    def _close_epoch(self) -> None:
        if isinstance(self._ledger, EpochLedger) and not self._limited:
            # What no step could tell of, since none came after: samples that were drawn last, and dropped.
            self._ledger.drop_the_rest()
        account = self.account
        self.restart(self._epoch + 1)
        self._ended, self._account = False, account

    @property
    def samples_done(self) -> int:
        """Views of the epoch under way that are done; 0 between two."""
        return 0 if self._ledger is None else self._ledger.done_views

    @property
    def account(self) -> EpochAccount | None:
        """What the epoch under way has covered, or the last one between epochs; None for an iterable dataset."""
        ledger = self._ledger
        if not isinstance(ledger, EpochLedger):
            return self._account
        return EpochAccount(
            epoch=self._epoch,
            samples=ledger.num_samples,
            # In `non_join` a sample's last repeats are not in the ledger, which has it once.
            emitted=max(ledger.done_views, self._last.samples_done if self._last else 0),
            dropped=ledger.dropped,
            identities=ledger.num_samples - ledger.samples_left,
            deals=len(self._deals) + 1,
            largest_remainder=max(self._deals, default=0),
        )

    def samples_per_epoch(self, world_size: int) -> int | None:
        """Samples that an epoch draws over all ranks, the repeats included."""
        if self._num_samples is None:
            return None
        if isinstance(self._ledger, EpochLedger):
            return self._ledger.total
        return self._num_samples + (-self._num_samples % world_size if self._mode == "join" else 0)

    def state_dict(self, *, next_step: int | None) -> dict[str, Any]:
        """Plain values and tensors of packed bits.

        Args:
            next_step: by which number a trainer that goes on from here will call the next batch; None for the number
                within the epoch.
        """
        state: dict[str, Any] = {"epoch": self._epoch, "steps": 0}
        if self._loaded is not None:
            state = self._loaded
        elif self._ledger is not None and self._ledger.done_views:
            state = {**self._ledger.state_dict(), "order": self._order}
        state = {name: torch.from_numpy(v) if hasattr(v, "dtype") else v for name, v in state.items()}
        return {**state, "next_step": state["steps"] if next_step is None else next_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state with the next pass.

        Raises:
            ValueError: if it is no state of a loader, or of another dataset or order.
        """
        state = {name: v.numpy() if isinstance(v, torch.Tensor) else v for name, v in state.items()}
        if not {"epoch", "steps", "next_step"} <= state.keys():
            raise ValueError(f"this is no state of a loader of this version: its keys are {sorted(state)}")
        for name, value in state.get("order", {}).items():
            if self._order.get(name) != value:
                what = "a dataset of so many samples" if name == "dataset" else name
                raise _other_samples(what, value, self._order.get(name))
        self.restart(state["epoch"])
        self._next_step = state["next_step"]
        if "order" in state:
            self._loaded = state


def _other_samples(what: str, then: Any, now: Any) -> ValueError:
    return ValueError(
        f"the checkpoint was written within an epoch with {what}={then}, and this loader has {now}: it would go on "
        "with other samples. Resume with the same, or from a checkpoint of an epoch's end"
    )
