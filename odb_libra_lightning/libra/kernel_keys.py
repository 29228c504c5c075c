"""Keys and values as a worker's kernel is called with them, and their gradients on the way back.

Keys and values stand side by side, `[rows * h_kv, 2 * D]`: those at home, and those that came from other workers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from odb_libra_lightning.libra.prepared_plan import PreparedPlan


class KernelKeys:
    """Keys and values as the kernel is called with them, chunk by chunk; the last ones are kept for the next."""

    def __init__(self, plan: PreparedPlan, pairs: Tensor, received: Tensor) -> None:
        self._plan, self._pairs, self._received = plan, pairs, received
        self._last: tuple[Tensor, Tensor] | None = None

    def of(self, m: int) -> tuple[Tensor, Tensor]:
        """`k` and `v`, `[Tk, heads, D]` each."""
        keys = self._plan.work.keys[m]
        if self._last is None or not keys.same_as_before:
            index = self._plan.index(self._pairs.device).keys[m]
            rows = self._plan.segments.key_starts[-1]
            pairs = self._pairs.new_empty(rows * keys.heads, self._pairs.shape[1])
            pairs.index_copy_(0, index.home_at, self._pairs.index_select(0, index.home))
            pairs.index_copy_(0, index.remote_at, self._received.index_select(0, index.remote))
            k, v = pairs.view(rows, keys.heads, 2, self._pairs.shape[1] // 2).unbind(2)
            self._last = k, v
        return self._last


class KeyGradients:
    """Gradients of keys and values, summed in float32 at least, always in the same order."""

    def __init__(self, plan: PreparedPlan, pairs: Tensor) -> None:
        self._plan, self._dtype, self._index = plan, pairs.dtype, plan.index(pairs.device)
        wide = torch.promote_types(pairs.dtype, torch.float32)
        self._home = torch.zeros_like(pairs, dtype=wide)
        self._remote = pairs.new_zeros(plan.work.received_keys, pairs.shape[1], dtype=wide)

    def add(self, m: int, dk: Tensor, dv: Tensor) -> None:
        """Add what the kernel gave for a chunk, `[Tk, heads, D]` each."""
        index = self._index.keys[m]
        pairs = torch.stack((dk, dv), dim=2).view(-1, self._home.shape[1]).to(self._home.dtype)
        for rows, at in index.home_rounds:
            self._home.index_add_(0, rows, pairs.index_select(0, at))
        for rows, at in index.remote_rounds:
            self._remote.index_add_(0, rows, pairs.index_select(0, at))

    def complete(self, m: int) -> Tensor:
        """Gradients of received keys that no later chunk reads, as they go home."""
        return self._remote.index_select(0, self._index.keys[m].returned).to(self._dtype)

    def add_returned(self, m: int, pairs: Tensor) -> None:
        """Add what came home."""
        for rows, at in self._index.keys[m].added_rounds:
            self._home.index_add_(0, rows, pairs.index_select(0, at).to(self._home.dtype))

    def result(self, k: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of `k` and `v`."""
        dk, dv = self._home.to(self._dtype).view(*k.shape[:2], 2, k.shape[2]).unbind(2)
        return dk, dv
