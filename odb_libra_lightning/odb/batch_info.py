"""What the loader knows of a batch: the one value that the batching side hands to the training side."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class BatchInfo:
    """Facts about one step's batch on one rank, complete before the batch is released.

    Attributes:
        epoch: number of the epoch, from 0.
        batch_idx: number of the step within the epoch, from 0; the same on every rank.
        round: grouping round that formed the batch, from 0.
        deal: how often what was left of the epoch had been dealt out anew (`non_join`), from 0.
        indices: dataset indices of this rank's samples in the step; empty where it has no data left. They are not
            those in the batch where none of their labels bears loss, and in a step without data: the batch is then a
            stand-in, and `loss_weight` is 0.
        lengths: their realized lengths, tokens.
        padded_tokens: samples times longest sample; where the batch is a pack, which has no padding, its tokens.
        loss_tokens: labels of this rank's samples that bear loss, under every loss scaling.
        loss_weight: factor for the local mean loss; exactly 0 in a zero-weight step.
        accumulation: micro-batches of a full accumulation window, which the weight assumes.
        ends_window: whether the batch is the last of its accumulation window.
        window_loss_tokens: loss-bearing tokens of the batch's accumulation window, over all ranks.
        global_samples: samples of the step over all ranks.
        global_tokens: their realized lengths summed, tokens.
        global_padded_tokens: padded tokens over all ranks.
        global_loss_tokens: loss-bearing tokens over all ranks.
        idle_ranks: ranks that take a zero-weight step for want of data.
        samples_done: samples of this epoch that are trained on or dropped once this step is done, all ranks.
        samples_dropped: samples among them that a policy dropped.
        samples_total: samples that the epoch draws, all ranks; None for an iterable dataset.
        exchange_s: seconds spent in exchanges with other ranks so far in this epoch.
        exchange_bytes: bytes that this rank received in them so far.
        wait_s: seconds that the training process waited for this batch.
        elapsed_s: seconds since it was given the batch before; for an epoch's first batch, the wait alone.
    """

    epoch: int
    batch_idx: int
    round: int
    deal: int
    indices: tuple[int, ...]
    lengths: tuple[int, ...]
    padded_tokens: int
    loss_tokens: int
    loss_weight: float
    accumulation: int
    ends_window: bool
    window_loss_tokens: int
    global_samples: int
    global_tokens: int
    global_padded_tokens: int
    global_loss_tokens: int
    idle_ranks: int
    samples_done: int
    samples_dropped: int
    samples_total: int | None
    exchange_s: float = 0.0
    exchange_bytes: int = 0
    wait_s: float = 0.0
    elapsed_s: float = 0.0

    @property
    def samples(self) -> int:
        """Samples that this rank trains on in the step."""
        return len(self.indices)

    @property
    def tokens(self) -> int:
        """Their realized lengths summed."""
        return sum(self.lengths)
