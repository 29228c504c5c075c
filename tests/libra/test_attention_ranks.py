"""`libra_attention` between processes, over gloo: equal to attention by a mask, and to the same workers as threads."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor

from odb_libra_lightning.libra.attention import libra_attention
from odb_libra_lightning.libra.transport import GroupTransport
from tests.launch import run_ranks
from tests.libra.attention_of_pools import (
    POOL,
    Recorded,
    Results,
    Rows,
    by_libra,
    dense,
    rows_of,
    starts_of,
    with_placement,
)
from tests.libra.oracles import Pool
from tests.libra.plans import plan_of
from tests.libra.poisoned_transport import PoisonedTransport

# For each number of processes, pools of as many workers. In the third of each, the last worker computes nothing.
POOLS = {
    world: [
        dataclasses.replace(POOL, documents=((40, 3),), context_parallel=world),
        dataclasses.replace(
            POOL, documents=((40, 3), (5, 5, 1, 20)), context_parallel=world // 2, window=7, fetch="document"
        )
        if world > 1
        else dataclasses.replace(POOL, documents=((40, 3),), context_parallel=1, window=7),
        dataclasses.replace(POOL, documents=((5, 5, 1, 20),), context_parallel=world),
    ]
    for world in (1, 2, 4, 8)
}


def attend(pool: Pool, number: int, dtype: str, *, poison: bool = False, **options: Any) -> Any:
    """This rank's part, the whole pool's rows, and what was asked of the transport."""
    plan = plan_of(pool)
    if number == 2 and pool.num_workers > 1:
        plan = with_placement(plan, [at % (pool.num_workers - 1) for at in range(len(plan.tile_worker))])
    rows, starts, calls = rows_of(pool, dtype=getattr(torch, dtype)), starts_of(pool), list[tuple[str, int]]()
    transport = GroupTransport()
    start, stop = starts[transport.rank : transport.rank + 2]
    q, k, v, grad = (each[start:stop].clone() for each in rows)
    q, k, v = (each.requires_grad_() for each in (q, k, v))

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        recorded = Recorded(PoisonedTransport(transport) if poison else transport, calls)
        return libra_attention(q, k, v, plan, transport=recorded, **options)

    checkpoint = options.pop("checkpoint", None)
    out = (
        attention(q, k, v)
        if checkpoint is None
        else torch.utils.checkpoint.checkpoint(attention, q, k, v, use_reentrant=checkpoint)
    )
    out.backward(grad)
    return plan, rows, slice(start, stop), Results(out.detach(), q.grad, k.grad, v.grad), calls  # type: ignore[arg-type]


def ranks_attend(world: int) -> list[Any]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = []
    for number, pool in enumerate(POOLS[world]):
        plan, rows, here, first, calls = attend(pool, number, "float64")
        right = dense(pool, rows)
        errors = [(a - b[here]).abs().max().item() if len(a) else 0.0 for a, b in zip(first, right, strict=True)]
        different = []
        for name, options in {
            "again": {},
            "refetch": {"remember": "refetch"},
            "poisoned": {"poison": True},
            "reentrant": {"checkpoint": True},
            "not reentrant": {"checkpoint": False},
            "both": {"checkpoint": False, "remember": "refetch", "poison": True},
        }.items():
            ours = attend(pool, number, "float64", **options)[3]
            different += [name for a, b in zip(ours, first, strict=True) if not torch.equal(a, b)]
        for dtype in ("bfloat16", "float32"):
            _, narrow, _, ours, _ = attend(pool, number, dtype)
            threads = by_libra(pool, plan, narrow)
            different += [dtype for a, b in zip(ours, threads, strict=True) if not torch.equal(a, b[here])]
        found.append([max(errors), different, calls])
    assert _default_transport(POOLS[world][0])
    dist.destroy_process_group()
    return found


def _default_transport(pool: Pool) -> bool:
    """All processes are the pool where no transport is given."""
    rows = Rows(*(each[slice(*starts_of(pool)[dist.get_rank() : dist.get_rank() + 2])] for each in rows_of(pool)))
    plan = plan_of(pool)
    ours = libra_attention(*rows[:3], plan)
    return torch.equal(ours, libra_attention(*rows[:3], plan, transport=GroupTransport()))


@pytest.mark.parametrize("world", [2, *(pytest.param(world, marks=pytest.mark.full) for world in (1, 4, 8))])
def test_processes_equal_dense_attention_and_threads(world: int, tmp_path: Path) -> None:
    ranks = run_ranks(ranks_attend, world, tmp_path, world=world)
    for number, of_pool in enumerate(zip(*ranks, strict=True)):
        for error, different, calls in of_pool:
            assert error <= 1e-10, number
            assert not different, number
            assert calls == of_pool[0][2], number
        assert bool(of_pool[0][2]) == (world > 1)
