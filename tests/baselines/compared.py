"""One replica's attention, computed by its ranks and in one piece, for tests to compare."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from odb_libra_lightning.libra.pool_plan import PoolPlan, plan_pool
from odb_libra_lightning.libra.thread_transport import run_workers
from odb_libra_lightning.libra.transport import Transport
from tests.libra.dense import dense_attention, documents_of_rows, gather, home_starts, split

Attention = Callable[..., Tensor]
NAMES = ("out", "dq", "dk", "dv")


@dataclass(frozen=True, kw_only=True)
class Replica:
    """A packed sequence with random queries, keys, values and gradient of the output.

    Attributes:
        lengths: of its documents.
        ranks: context-parallel degree.
        heads: query heads.
        kv_heads: KV heads.
        window: keys that a query sees at the most.
        padding: rows after the documents.
        dtype: of all tensors.
        head_dim: elements of a head.
        scale: factor of the scores.
        sharpness: queries are multiplied by it.
        seed: of the random numbers.
    """

    lengths: Sequence[int]
    ranks: int
    heads: int = 8
    kv_heads: int = 2
    window: int | None = None
    padding: int = 0
    dtype: torch.dtype = torch.float64
    head_dim: int = 4
    scale: float | None = None
    sharpness: float = 1.0
    seed: int = 0

    @property
    def rows(self) -> int:
        return sum(self.lengths) + self.padding

    def plan(self, replicas: int = 1) -> PoolPlan:
        return plan_pool(
            [self.lengths] * replicas,
            context_parallel=self.ranks,
            block_size=max(1, self.rows // self.ranks // 3),
            head_shards=1,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            bytes_per_element=self.dtype.itemsize,
            chunks=1,
            window=self.window,
            sequence_length=self.rows,
        )

    def tensors(self) -> tuple[Tensor, ...]:
        """Queries, keys, values and the gradient of the output, of all rows."""
        generator = torch.Generator().manual_seed(self.seed)
        shapes = [(self.rows, heads, self.head_dim) for heads in (self.heads, self.kv_heads, self.kv_heads, self.heads)]
        q, k, v, grad = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
        return tuple(each.to(self.dtype) for each in (q * self.sharpness, k, v, grad))

    def dense(self, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
        """Output and gradients of Q, K and V, computed in one piece in a dtype."""
        q, k, v, grad = (each.to(dtype) for each in self.tensors())
        inputs = tuple(each.requires_grad_() for each in (q, k, v))
        documents = documents_of_rows([self.lengths], self.rows)
        out = dense_attention(*inputs, documents, window=self.window, scale=self.scale)
        return out.detach(), *torch.autograd.grad(out, inputs, grad)

    def on_rank(
        self, attention: Attention, transport: Transport, *, reentrant: bool | None = None, **options: Any
    ) -> tuple[Tensor, ...]:
        """Output and gradients of a rank's shards; under a checkpoint unless `reentrant` is None."""
        starts = home_starts([self.lengths], self.ranks, self.rows)
        *inputs, grad = (split(each, starts)[transport.rank] for each in self.tensors())
        for each in inputs:
            each.requires_grad_()
        plan = options.pop("plan", None) or self.plan()

        def call(*shards: Tensor) -> Tensor:
            return attention(*shards, plan, transport=transport, scale=self.scale, **options)

        if reentrant is None:
            out = call(*inputs)
        else:
            out = checkpoint(call, *inputs, use_reentrant=reentrant, preserve_rng_state=False)
        out.backward(grad)
        return out.detach(), *(each.grad for each in inputs)

    def on_threads(self, attention: Attention, **options: Any) -> tuple[Tensor, ...]:
        """The same of all rows, computed by threads."""

        def work(transport: Transport) -> tuple[Tensor, ...]:
            return self.on_rank(attention, wrapped(transport), **options)

        wrapped = options.pop("wrapped", lambda transport: transport)
        return tuple(gather(shards) for shards in zip(*run_workers(work, self.ranks, timeout=40), strict=True))

    def errors(self, results: Sequence[Tensor]) -> list[float]:
        """Largest difference of output and gradients from dense attention in float64, relative to its largest value."""
        pairs = zip(results, self.dense(), strict=True)
        return [((ours - right).abs().max() / right.abs().max().clamp(min=1)).item() for ours, right in pairs]
