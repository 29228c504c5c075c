"""Every attention by its name gives what dense attention gives, whatever the pools."""

from __future__ import annotations

import pytest
import torch

from odb_libra_lightning.baselines import ATTENTIONS, attention_for
from odb_libra_lightning.libra.pool_plan import plan_pool
from odb_libra_lightning.libra.process_groups import PoolGroups, RankLayout
from odb_libra_lightning.libra.thread_transport import Hub, run_workers
from odb_libra_lightning.libra.transport import Transport
from tests.libra.dense import dense_attention, documents_of_rows, gather, home_starts, split

DOCUMENTS = [[37, 3], [1, 1, 38], [20, 20], [40]]
HEADS = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 8, "bytes_per_element": 8}


@pytest.mark.parametrize(
    ("name", "pool_size"),
    [("libra", 1), ("libra", 2), ("libra", 4), ("ulysses", 2), ("ulysses", 4), ("ring", 2), ("distca", 4)],
)
def test_an_attention_by_name_equals_dense_attention(name: str, pool_size: int) -> None:
    layout = RankLayout(world_size=8, context_parallel=2, pool_size=pool_size)
    pooled = [DOCUMENTS[first : first + pool_size] for first in range(0, 4, pool_size)]
    plans = [
        plan_pool(documents, context_parallel=2, block_size=8, head_shards=2, chunks=2, **HEADS) for documents in pooled
    ]
    generator = torch.Generator().manual_seed(0)
    inputs = [
        [
            torch.randn(40 * pool_size, heads, 8, generator=generator, dtype=torch.float64, requires_grad=True)
            for heads in (8, 2, 2, 8)
        ]
        for _ in plans
    ]
    pools = [Hub(layout.num_workers, timeout=30) for _ in plans]
    replicas = [Hub(2, timeout=30) for _ in DOCUMENTS]

    def worker(everyone: Transport) -> list[torch.Tensor]:
        rank = everyone.rank
        pool, at = layout.pool_of(rank), layout.worker_of(rank)
        groups = PoolGroups(
            layout=layout,
            rank=rank,
            pool=pools[pool].transport(at),
            replica=replicas[layout.replica_of(rank)].transport(layout.cp_rank_of(rank)),
        )
        q, k, v, grad = (split(tensor.detach(), home_starts(pooled[pool], 2))[at] for tensor in inputs[pool])
        leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
        out = attention_for(name)(*leaves, plans[pool], groups=groups)
        out.backward(grad)
        return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    results = run_workers(worker, 8, timeout=60)
    for pool, (q, k, v, grad) in enumerate(inputs):
        expected = dense_attention(q, k, v, documents_of_rows(pooled[pool]))
        expected.backward(grad.detach())
        mine = [results[rank] for rank in layout.pool_ranks(pool)]
        for i, wanted in enumerate((expected.detach(), q.grad, k.grad, v.grad)):
            got = gather([result[i] for result in mine])
            torch.testing.assert_close(got, wanted, rtol=0, atol=1e-10)


def test_names_and_pools_that_do_not_fit_are_refused() -> None:
    assert sorted(ATTENTIONS) == ["distca", "libra", "ring", "ulysses"]
    with pytest.raises(ValueError, match="no attention is called 'wlb': there are libra, ulysses, ring, distca"):
        attention_for("wlb")
    hub = Hub(2)
    groups = PoolGroups(
        layout=RankLayout(world_size=4, context_parallel=1, pool_size=2),
        rank=0,
        pool=hub.transport(0),
        replica=hub.transport(1),
    )
    plan = plan_pool([[4], [4]], context_parallel=1, block_size=4, head_shards=1, chunks=2, **HEADS)
    q = torch.zeros(4, 8, 8)
    with pytest.raises(ValueError, match=r"one pool of all replicas, and pool_size=2 makes 2 of them; 4 would fit"):
        attention_for("distca")(q, q[:, :2], q[:, :2], plan, groups=groups)
