"""What carries rows between the workers of a pool: a process group, or threads of one process.

The executor knows `Transport` alone, so that the same code runs over NCCL, over gloo, and with many workers in one
process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist


class Handle(Protocol):
    """A transfer under way."""

    def wait(self) -> object:
        """Return when the output may be used; on CUDA, when work queued from now on may use it."""


class Transport(Protocol):
    """Workers that exchange rows. All call the same operations in the same order."""

    @property
    def rank(self) -> int:
        """Number of this worker, from 0."""

    @property
    def size(self) -> int:
        """Number of workers."""

    def all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
    ) -> Handle:
        """Begin to send each worker its part of `input` and to receive each worker's part into `output`.

        Both are contiguous and cut along dimension 0, in order of the workers; parts may be empty. Neither may be
        touched before the handle has been waited for.
        """


class GroupTransport:
    """A process group of `torch.distributed`."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
    ) -> Handle:
        """See `Transport.all_to_all`."""
        work: Handle = dist.all_to_all_single(
            output, input, list(output_splits), list(input_splits), group=self._group, async_op=True
        )
        return work
