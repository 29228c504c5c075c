"""Sums over batches, which monitors, bar and summary draw their figures from."""

from __future__ import annotations

from dataclasses import dataclass

from odb_libra_lightning.odb.batch_info import BatchInfo
from odb_libra_lightning.odb.padding import padding_ratio


@dataclass
class Totals:
    """What all ranks consumed, and how long this rank waited for it.

    Attributes:
        samples: samples trained on.
        tokens: their realized lengths summed.
        padded_tokens: the same with padding.
        zero_weight_steps: steps that ranks took without data of their own.
        waited_s: seconds that this rank waited for the loader.
        elapsed_s: seconds from one batch given out to the next, summed.
    """

    samples: int = 0
    tokens: int = 0
    padded_tokens: int = 0
    zero_weight_steps: int = 0
    waited_s: float = 0.0
    elapsed_s: float = 0.0

    def add(self, info: BatchInfo) -> None:
        """Count a batch."""
        self.samples += info.global_samples
        self.tokens += info.global_tokens
        self.padded_tokens += info.global_padded_tokens
        self.zero_weight_steps += info.idle_ranks
        self.waited_s += info.wait_s
        self.elapsed_s += info.elapsed_s

    @property
    def padding_ratio(self) -> float:
        """Share of padding in what was computed on."""
        return padding_ratio(self.tokens, self.padded_tokens)
