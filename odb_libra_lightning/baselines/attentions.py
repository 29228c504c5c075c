"""The attentions by name, all called alike: on the same shards, with the same plan and the same groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol

from torch import Tensor

from odb_libra_lightning.baselines.ring import ring_attention
from odb_libra_lightning.baselines.ulysses import ulysses_attention
from odb_libra_lightning.libra.attention import Remember, libra_attention
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
        remember: Remember = "keep",
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
            remember: as in `libra_attention`. Attentions that stay in a replica know `keep` alone.
        """


def _pooled(*, whole_run: bool) -> Attention:
    """Libra's attention, in the pools of the run or in one of all replicas."""

    def attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plan: PoolPlan | PreparedPlan,
        *,
        groups: PoolGroups,
        kernel: str | AttentionKernel | None = None,
        scale: float | None = None,
        remember: Remember = "keep",
    ) -> Tensor:
        if whole_run and groups.layout.num_pools != 1:
            raise ValueError(
                f"distca has one pool of all replicas, and pool_size={groups.layout.pool_size} makes "
                f"{groups.layout.num_pools} of them; {groups.layout.num_replicas} would fit"
            )
        return libra_attention(q, k, v, plan, transport=groups.pool, kernel=kernel, scale=scale, remember=remember)

    return attention


def _in_replica(attend: Callable[..., Tensor]) -> Attention:
    """An attention that stays inside a replica, on that replica's part of the pool's plan."""

    def attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plan: PoolPlan | PreparedPlan,
        *,
        groups: PoolGroups,
        kernel: str | AttentionKernel | None = None,
        scale: float | None = None,
        remember: Remember = "keep",
    ) -> Tensor:
        if remember != "keep":
            raise ValueError(f"remember={remember!r}: an attention that stays in a replica knows 'keep' alone")
        plan = plan.plan if isinstance(plan, PreparedPlan) else plan
        replica = groups.layout.replica_of(groups.rank) % groups.layout.pool_size
        return attend(q, k, v, plan, transport=groups.replica, replica=replica, kernel=kernel, scale=scale)

    return attention


ATTENTIONS: Mapping[str, Attention] = MappingProxyType(
    {
        "libra": _pooled(whole_run=False),
        "ulysses": _in_replica(ulysses_attention),
        "ring": _in_replica(ring_attention),
        "distca": _pooled(whole_run=True),
    }
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
