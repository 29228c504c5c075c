"""What a varlen kernel is called on: runs of queries, each with the keys they belong to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import torch


@dataclass(frozen=True, kw_only=True)
class Segments:
    """Runs of queries that stand one after another in `q`, each with a run of keys in `k` and `v`.

    Causal attention is aligned to the *bottom right*: the last query of a segment sees all its keys, each earlier one
    a key fewer.

    Attributes:
        query_lengths: queries of each segment, at least 1.
        key_lengths: keys of each segment, at least 1; where attention is causal, no fewer than its queries.

    Raises:
        ValueError: not as many of one as of the other, or a length below 1.
    """

    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    _on_device: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if len(self.query_lengths) != len(self.key_lengths):
            raise ValueError(f"{len(self.query_lengths)} runs of queries, and {len(self.key_lengths)} of keys")
        for at, (queries, keys) in enumerate(zip(self.query_lengths, self.key_lengths, strict=True)):
            if min(queries, keys) < 1:
                raise ValueError(f"segment {at} has {queries} queries and {keys} keys; it needs at least 1 of each")

    def __len__(self) -> int:
        return len(self.query_lengths)

    @cached_property
    def query_starts(self) -> tuple[int, ...]:
        """`cu_seqlens` of the queries, `len(self) + 1` numbers."""
        return _starts(self.query_lengths)

    @cached_property
    def key_starts(self) -> tuple[int, ...]:
        """`cu_seqlens` of the keys."""
        return _starts(self.key_lengths)

    @cached_property
    def max_query_length(self) -> int:
        """Queries of the longest segment; 0 where there is none."""
        return max(self.query_lengths, default=0)

    @cached_property
    def max_key_length(self) -> int:
        """Keys of the longest segment; 0 where there is none."""
        return max(self.key_lengths, default=0)

    def cu_seqlens(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """`query_starts` and `key_starts` as int32 on a device; copied there once."""
        if device not in self._on_device:
            starts = (self.query_starts, self.key_starts)
            queries, keys = (to_device(torch.tensor(each, dtype=torch.int32), device) for each in starts)
            self._on_device[device] = queries, keys
        return self._on_device[device]


def to_device(index: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on a device; the host does not wait for the copy."""
    return index.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else index.to(device)


def _starts(lengths: Sequence[int]) -> tuple[int, ...]:
    return tuple(accumulate(lengths, initial=0))
