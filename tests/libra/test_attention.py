"""`libra_attention` against attention by an explicit mask in one process: output and all gradients."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor

from odb_libra_lightning.libra.attention import libra_attention
from odb_libra_lightning.libra.kernels import kernel_for
from odb_libra_lightning.libra.segments import Segments
from odb_libra_lightning.libra.thread_transport import ThreadTransport
from tests.libra.attention_of_pools import (
    LONE,
    POOL,
    Results,
    Rows,
    anywhere,
    assert_close,
    assert_same_bits,
    by_libra,
    dense,
    documents_of,
    on_workers,
    rows_of,
    together,
)
from tests.libra.oracles import Pool, random_pool
from tests.libra.plans import plan_of
from tests.libra.poisoned_transport import PoisonedTransport

HEADS = [
    (heads, kv_heads, shards, chunks)
    for heads, kv_heads in ((8, 1), (8, 2), (8, 8), (28, 7), (12, 4))
    for shards in range(1, heads + 1)
    if heads % shards == 0
    for chunks in range(1, heads // shards + 1)
    if heads // shards % chunks == 0
]


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(s, marks=pytest.mark.full) for s in range(6, 60))])
def test_random_pools_equal_dense_attention(seed: int) -> None:
    rng = random.Random(seed)
    for number in range(16):
        pool = random_pool(rng)
        plan = plan_of(pool)
        if number % 3 == 0:
            plan = anywhere(rng, plan)
        rows, scale = rows_of(pool, seed=number), rng.choice([None, 0.3, 2.0])
        right = dense(pool, rows, scale=scale)
        remember = rng.choice(["keep", "refetch"])
        assert_close(by_libra(pool, plan, rows, scale=scale, remember=remember), right, 1e-10, pool)


@pytest.mark.parametrize("heads", HEADS, ids=lambda heads: "-".join(map(str, heads)))
def test_every_division_of_the_heads_equals_dense_attention(heads: tuple[int, int, int, int]) -> None:
    names = ("num_heads", "num_kv_heads", "head_shards", "chunks")
    pool = dataclasses.replace(
        POOL,
        **dict(zip(names, heads, strict=True)),  # type: ignore[arg-type]
        head_dim=2,
        placement="paper" if sum(heads) % 2 else "home_first",
        fetch="document" if heads[2] % 2 else "prefix",
    )
    plan = plan_of(pool)
    assert len(plan.queries)
    assert len(plan.keys)
    rows = rows_of(pool)
    assert_close(by_libra(pool, plan, rows), dense(pool, rows), 1e-10)


@pytest.mark.parametrize("window", [None, 6])
def test_float32_and_large_logits(window: int | None) -> None:
    pool = dataclasses.replace(POOL, window=window)
    plan, rows = plan_of(pool), rows_of(pool)
    single = rows.to(torch.float32)
    assert_close(by_libra(pool, plan, single), dense(pool, single.to(torch.float64)), 1e-5)
    # Scores that are a hundred times as large make softmax a choice of one key.
    large = rows._replace(q=100 * rows.q)
    assert_close(by_libra(pool, plan, large), dense(pool, large), 1e-10)
    single = large.to(torch.float32)
    ours, right, kernel = by_libra(pool, plan, single), dense(pool, single.to(torch.float64)), by_kernel(pool, single)
    for mine, exact, other in zip(ours, right, kernel, strict=True):
        # A score of 1,000 is rounded by up to 3e-5 before anything is done with it.
        assert error(mine, exact) <= 1.5 * error(other, exact)


def error(rows: Tensor, right: Tensor) -> float:
    """Root mean square of the differences."""
    return (rows.double() - right).square().mean().sqrt().item()


@pytest.mark.parametrize("thrown", [False, True], ids=["planned", "thrown"])
def test_rounding_of_bfloat16_does_not_grow_with_the_workers(thrown: bool) -> None:
    """Against attention by a mask, which rounds at every step, and against one call of the kernel, which rounds once.

    What adds up to a key's gradient is rounded by the kernel, on its way home, and as a sum. Parts may be larger than
    their sum, and with them what they are rounded by, most of all where tiles are thrown on any worker.
    """
    found = {}
    for workers in (1, 2, 4, 8):
        pool = dataclasses.replace(
            POOL,
            documents=((70, 3, 100, 19, 1, 40, 23),),
            context_parallel=workers,
            block_size=16,
            head_dim=16,
            sequence_length=None,
        )
        rows, plan = rows_of(pool, dtype=torch.bfloat16), plan_of(pool)
        if thrown:
            plan = anywhere(random.Random(0), plan)
        ours = by_libra(pool, plan, rows)
        right, masked = dense(pool, rows.to(torch.float64)), dense(pool, rows)
        bare = by_kernel(pool, rows)
        for name, mine, exact, other, kernel in zip(Results._fields, ours, right, masked, bare, strict=True):
            assert mine.dtype == torch.bfloat16
            found[workers, name] = error(mine, exact)
            assert found[workers, name] <= error(other, exact), (workers, name)
            times = 1.1 if name in ("out", "dq") else 2.0
            assert found[workers, name] <= times * error(kernel, exact), (workers, name)
    for name in Results._fields:
        assert found[8, name] <= 1.25 * found[2, name], (name, found)


def by_kernel(pool: Pool, rows: Rows) -> Results:
    """One bare call of the kernel on whole documents."""
    inside = (documents_of(pool) >= 0).nonzero().flatten()
    lengths = tuple(length for sequence in pool.documents for length in sequence)
    kernel, segments = kernel_for(torch.device("cpu")), Segments(query_lengths=lengths, key_lengths=lengths)
    mask: dict[str, Any] = {"causal": True, "scale": pool.head_dim**-0.5, "window": pool.window}
    q, k, v, grad = (each[inside] for each in rows)
    out, lse = kernel.forward(q, k, v, segments, **mask)
    found = out, *kernel.backward(grad, q, k, v, out, lse, segments, **mask)
    shapes = rows.q, rows.q, rows.k, rows.v
    return Results(*(torch.zeros_like(a).index_copy(0, inside, b) for a, b in zip(shapes, found, strict=True)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_gradients_have_the_dtype_and_shape_of_their_inputs(dtype: torch.dtype) -> None:
    rows = rows_of(POOL, dtype=dtype)
    ours = by_libra(POOL, plan_of(POOL), rows)
    assert [each.dtype for each in ours] == [dtype] * 4
    assert [each.shape for each in ours] == [rows.q.shape, rows.q.shape, rows.k.shape, rows.v.shape]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_repeated_refetched_and_poisoned_runs_give_the_same_bits(dtype: torch.dtype) -> None:
    rng = random.Random(0)
    for _ in range(6):
        pool = random_pool(rng)
        plan, rows = anywhere(rng, plan_of(pool)), rows_of(pool, dtype=dtype)
        first = by_libra(pool, plan, rows)
        for options in ({}, {"remember": "refetch"}, {"wrap": PoisonedTransport}):
            assert_same_bits(by_libra(pool, plan, rows, **options), first)  # type: ignore[arg-type]
        assert_same_bits(by_libra(pool, plan, rows, wrap=PoisonedTransport, remember="refetch"), first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_token_of_one_document_changes_no_bit_of_another(dtype: torch.dtype) -> None:
    documents, rng = documents_of(POOL), random.Random(0)
    plans = [plan_of(POOL), anywhere(rng, plan_of(POOL))]
    for plan in plans:
        rows = rows_of(POOL, dtype=dtype)
        before = by_libra(POOL, plan, rows)
        # The middle of the long document, whose rows two workers share; the ends of short ones; a row at a home's edge.
        for row in (21, 22, 40, 43 + 1, 44 + 10, 44 + 30, 88, 88 + 22):
            changed = Rows(*(each.clone() for each in rows))
            for each in changed:
                each[row] += 3
            after, others = by_libra(POOL, plan, changed), documents != documents[row]
            for name, mine, theirs in zip(Results._fields, after, before, strict=True):
                assert torch.equal(mine[others], theirs[others]), (row, name)
                # A document of one token has nothing to choose from: its queries and keys do not matter.
                assert not torch.equal(mine, theirs) or name in ("dq", "dk"), (row, name)


@pytest.mark.parametrize("pool", [POOL, LONE], ids=["travels", "stays"])
def test_padding_gives_zero_whatever_stands_in_it(pool: Pool) -> None:
    rows, padding = rows_of(pool), documents_of(pool) < 0
    assert padding.any()
    right = dense(pool, rows)
    for each in rows:
        each[padding] = torch.nan
    ours = by_libra(pool, plan_of(pool), rows)
    assert_close(ours, right, 1e-10)
    assert not any(each[padding].any() for each in ours)


@pytest.mark.parametrize("pool", [POOL, LONE], ids=["travels", "stays"])
@pytest.mark.parametrize("order", [(1, 0, 2), (0, 2, 1), (2, 1, 0), (2, 0, 1)], ids=str)
def test_layout_of_the_inputs_in_memory_does_not_matter(pool: Pool, order: tuple[int, int, int]) -> None:
    plan, back = plan_of(pool), [order.index(dim) for dim in range(3)]

    def work(transport: ThreadTransport, rows: Rows) -> Results:
        q, k, v, grad = (each.detach().permute(order).contiguous().permute(back) for each in rows)
        out = libra_attention(*(each.requires_grad_() for each in (q, k, v)), plan, transport=transport)
        return Results(out.detach(), *torch.autograd.grad(out, (q, k, v), grad))

    rows = rows_of(pool, dtype=torch.float32)
    assert_same_bits(together(on_workers(pool, rows, work)), by_libra(pool, plan, rows))


@pytest.mark.parametrize("pool", [POOL, LONE], ids=["travels", "stays"])
def test_a_sum_as_loss_whose_gradient_is_one_number_repeated(pool: Pool) -> None:
    plan, rows = plan_of(pool), rows_of(pool)

    def work(transport: ThreadTransport, rows: Rows) -> Results:
        out = libra_attention(*rows[:3], plan, transport=transport)
        return Results(out.detach(), *torch.autograd.grad(out.sum(), rows[:3]))

    right = dense(pool, rows._replace(grad=torch.ones_like(rows.grad)))
    assert_close(together(on_workers(pool, rows, work)), right, 1e-10)


def test_homes_without_a_row() -> None:
    pool = Pool(documents=((1,), (3,)), context_parallel=4, block_size=1, num_heads=4, num_kv_heads=2, chunks=2)
    rng = random.Random(0)
    rows = rows_of(pool)
    for plan in (plan_of(pool), *(anywhere(rng, plan_of(pool)) for _ in range(5))):
        assert_close(by_libra(pool, plan, rows), dense(pool, rows), 1e-10)
