"""The attentions by name, all called alike: on the same shards, with the same plan and the same groups."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from torch import Tensor

from odb_libra_lightning.baselines.ring import ring_attention
from odb_libra_lightning.baselines.ulysses import ulysses_attention
from odb_libra_lightning.libra.attention import libra_attention
from odb_libra_lightning.libra.kernel_interface import AttentionKernel
from odb_libra_lightning.libra.pool_plan import PoolPlan
from odb_libra_lightning.libra.prepared_plan import PreparedPlan
from odb_libra_lightning.libra.process_groups import PoolGroups


class Attention(Protocol):
    """Exact causal attention within documents, from the rows at home to the rows at home."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plan: PoolPlan | PreparedPlan,
        *,
        groups: PoolGroups,
        kernel: str | AttentionKernel | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """A collective of the pool, or of the replica for attentions that stay inside it.

        Args:
            q: queries of the rows at home, `[T, num_heads, head_dim]`.
            k: keys, `[T, num_kv_heads, head_dim]`.
            v: values, like `k`.
            plan: plan of the pool. Attentions that stay in a replica take only its documents and heads.
            groups: pools and replicas of the run.
            kernel: as in `libra_attention`.
            scale: as in `libra_attention`.
        """


def _libra(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: PoolPlan | PreparedPlan,
    *,
    groups: PoolGroups,
    kernel: str | AttentionKernel | None = None,
    scale: float | None = None,
) -> Tensor:
    return libra_attention(q, k, v, plan, transport=groups.pool, kernel=kernel, scale=scale)


def _distca(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: PoolPlan | PreparedPlan,
    *,
    groups: PoolGroups,
    kernel: str | AttentionKernel | None = None,
    scale: float | None = None,
) -> Tensor:
    if groups.layout.num_pools != 1:
        raise ValueError(
            f"distca has one pool of all replicas, and pool_size={groups.layout.pool_size} makes "
            f"{groups.layout.num_pools} of them; {groups.layout.num_replicas} would fit"
        )
    return libra_attention(q, k, v, plan, transport=groups.pool, kernel=kernel, scale=scale)


def _ulysses(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: PoolPlan | PreparedPlan,
    *,
    groups: PoolGroups,
    kernel: str | AttentionKernel | None = None,
    scale: float | None = None,
) -> Tensor:
    replica = groups.layout.replica_of(groups.rank) % groups.layout.pool_size
    return ulysses_attention(
        q, k, v, _pool_plan(plan), transport=groups.replica, replica=replica, kernel=kernel, scale=scale
    )


def _ring(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: PoolPlan | PreparedPlan,
    *,
    groups: PoolGroups,
    kernel: str | AttentionKernel | None = None,
    scale: float | None = None,
) -> Tensor:
    replica = groups.layout.replica_of(groups.rank) % groups.layout.pool_size
    return ring_attention(
        q, k, v, _pool_plan(plan), transport=groups.replica, replica=replica, kernel=kernel, scale=scale
    )


def _pool_plan(plan: PoolPlan | PreparedPlan) -> PoolPlan:
    return plan.plan if isinstance(plan, PreparedPlan) else plan


ATTENTIONS: Mapping[str, Attention] = MappingProxyType(
    {"libra": _libra, "ulysses": _ulysses, "ring": _ring, "distca": _distca}
)
"""`wlb` is none of them: it packs documents anew (`odb_libra_lightning.libra.wlb`) and runs under `ulysses`."""


def attention_for(name: str) -> Attention:
    """The attention of a name in `ATTENTIONS`.

    Raises:
        ValueError: there is no such name.
    """
    if name not in ATTENTIONS:
        raise ValueError(f"no attention is called {name!r}: there are {', '.join(ATTENTIONS)}")
    return ATTENTIONS[name]
