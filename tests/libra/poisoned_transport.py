"""A transport that shows who breaks the contract of `Transport.all_to_all`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from odb_libra_lightning.libra.transport import Handle, Transport


class PoisonedTransport:
    """A transport whose outputs are NaN until they have been waited for.

    So whoever reads an output too early gets NaN, and `wait()` raises where an output or an input was written to
    meanwhile. Reading an input while it is under way is allowed, and after `wait()` it is the caller's again.
    """

    def __init__(self, inner: Transport) -> None:
        self.rank = inner.rank
        self.size = inner.size
        self._inner = inner

    def all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
    ) -> Handle:
        """See `Transport.all_to_all`.

        Raises:
            ValueError: elements that cannot be NaN.
        """
        if not (output.is_floating_point() and input.is_floating_point()):
            raise ValueError(f"only floating-point buffers can be poisoned, got {output.dtype} and {input.dtype}")
        received = torch.empty_like(output)
        output.fill_(torch.nan)
        return _Poisoned(
            rank=self.rank,
            inner=self._inner.all_to_all(received, input.clone(), output_splits, input_splits),
            buffers=(output, input, received, input.clone()),
        )


class _Poisoned:
    """A handle whose first `wait()` judges the buffers and fills the output."""

    def __init__(self, *, rank: int, inner: Handle, buffers: tuple[torch.Tensor, ...]) -> None:
        self._rank, self._inner = rank, inner
        self._buffers: tuple[torch.Tensor, ...] | None = buffers

    def wait(self) -> None:
        if self._buffers is None:
            return
        self._inner.wait()
        output, input, received, before = self._buffers
        self._buffers = None
        if not output.isnan().all():
            raise RuntimeError(f"worker {self._rank} has written to an output before it was complete")
        if not torch.equal(input.nan_to_num(), before.nan_to_num()):
            raise RuntimeError(f"worker {self._rank} has written to an input before it was sent")
        output.copy_(received)
