"""Pools with tensors: their attention by an explicit mask, and by `libra_attention` on a thread a worker."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from odb_libra_lightning.libra.attention import libra_attention
from odb_libra_lightning.libra.exchange_plan import key_transfers, query_transfers
from odb_libra_lightning.libra.pool_plan import PoolPlan
from odb_libra_lightning.libra.thread_transport import ThreadTransport, run_workers
from odb_libra_lightning.libra.transport import Handle, Transport
from tests.libra.dense import dense_attention, documents_of_rows, home_starts, split
from tests.libra.oracles import Pool

Result = TypeVar("Result")
Wrap = Callable[[ThreadTransport], Transport]


# A document over three homes, many small ones, padding: tiles travel, and keys to several workers.
POOL = Pool(
    documents=((40, 3), (5, 5, 1, 20), (2,) * 21),
    context_parallel=2,
    block_size=4,
    num_heads=8,
    num_kv_heads=2,
    head_shards=2,
    chunks=2,
    head_dim=4,
    sequence_length=44,
)
LONE = dataclasses.replace(POOL, documents=((20, 3),), context_parallel=1)


class Rows(NamedTuple):
    """Queries, keys and values of a whole pool, and the gradient of the output; `[rows, heads, D]`."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor

    def to(self, dtype: torch.dtype) -> Rows:
        return Rows(*(each.to(dtype) for each in self))


class Results(NamedTuple):
    """The output and the gradients of a whole pool."""

    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def rows_of(pool: Pool, *, dtype: torch.dtype = torch.float64, seed: int = 0) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    rows = sum(pool.rows(sequence) for sequence in range(len(pool.documents)))
    heads = (pool.num_heads, pool.num_kv_heads, pool.num_kv_heads, pool.num_heads)
    return Rows(*(torch.randn(rows, h, pool.head_dim, generator=generator, dtype=torch.float64) for h in heads)).to(
        dtype
    )


def documents_of(pool: Pool) -> Tensor:
    return documents_of_rows(pool.documents, pool.sequence_length)


def starts_of(pool: Pool) -> list[int]:
    return home_starts(pool.documents, pool.context_parallel, pool.sequence_length)


def dense(pool: Pool, rows: Rows, *, scale: float | None = None) -> Results:
    q, k, v = (each.detach().clone().requires_grad_() for each in rows[:3])
    out = dense_attention(q, k, v, documents_of(pool), window=pool.window, scale=scale)
    return Results(out.detach(), *torch.autograd.grad(out, (q, k, v), rows.grad))


def on_workers(pool: Pool, rows: Rows, function: Callable[[ThreadTransport, Rows], Result]) -> list[Result]:
    """What a function returns on each worker, given its shard: queries, keys and values are leaves."""
    starts = starts_of(pool)
    shards = [split(each.detach().requires_grad_(each is not rows.grad), starts) for each in rows]
    return run_workers(lambda t: function(t, Rows(*(each[t.rank] for each in shards))), pool.num_workers)


def by_libra(
    pool: Pool, plan: PoolPlan, rows: Rows, *, wrap: Wrap = lambda transport: transport, **options: Any
) -> Results:
    """Results of all workers together; `wrap` makes the transport that each of them uses."""

    def work(transport: ThreadTransport, rows: Rows) -> Results:
        out = libra_attention(rows.q, rows.k, rows.v, plan, transport=wrap(transport), **options)
        return Results(out.detach(), *torch.autograd.grad(out, rows[:3], rows.grad))

    return together(on_workers(pool, rows, work))


def together(results: Sequence[Results]) -> Results:
    return Results(*(torch.cat(each) for each in zip(*results, strict=True)))


def assert_close(ours: Results, right: Results, tolerance: float, about: object = "") -> None:
    """No element differs by more, measured by the largest element where that is above 1."""
    for name, mine, other in zip(Results._fields, ours, right, strict=True):
        assert mine.shape == other.shape
        if other.numel():
            error = ((mine.double() - other.double()).abs().max() / other.abs().max().clamp(min=1)).item()
            assert error <= tolerance, f"{name} is off by {error:.1e}: {about}"


def assert_same_bits(ours: Results, other: Results) -> None:
    for name, mine, theirs in zip(Results._fields, ours, other, strict=True):
        assert torch.equal(mine, theirs), name


def with_placement(plan: PoolPlan, tile_worker: Sequence[int]) -> PoolPlan:
    """The same tiles on other workers."""
    placed = np.array(tile_worker, np.int32)
    return dataclasses.replace(
        plan,
        tile_worker=placed,
        queries=query_transfers(plan.tiles, placed, plan.layout),
        keys=key_transfers(plan.tiles, placed, plan.layout),
    )


def anywhere(rng: random.Random, plan: PoolPlan) -> PoolPlan:
    """The tiles of a plan on any workers, some of which may get none."""
    workers = rng.sample(range(plan.num_workers), rng.randint(1, plan.num_workers))
    return with_placement(plan, [rng.choice(workers) for _ in plan.tile_worker])


class Recorded:
    """A transport that writes down what it is asked for: dtype and width of the rows that are sent."""

    def __init__(self, inner: Transport, calls: list[tuple[str, int]]) -> None:
        self.rank, self.size = inner.rank, inner.size
        self._inner, self._calls = inner, calls

    def all_to_all(
        self, output: Tensor, input: Tensor, output_splits: Sequence[int], input_splits: Sequence[int]
    ) -> Handle:
        assert output.dtype == input.dtype
        assert output.shape[1:] == input.shape[1:]
        self._calls.append((str(input.dtype), input.shape[1]))
        return self._inner.all_to_all(output, input, output_splits, input_splits)
