"""Load-balanced context-parallel attention: planning in NumPy alone, and the attention that follows a plan.

Source: "Libra: Taming Attention Workload Skew in Long-Context LLM Training with Bounded Sequence Pool"
(arXiv:2607.23250). Planning is a pure function of lengths and settings, so that every rank computes the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from odb_libra_lightning.libra.layout import PoolLayout
from odb_libra_lightning.libra.load import attention_load, imbalance_floor, pool_imbalance
from odb_libra_lightning.libra.pool_plan import PoolPlan, plan_pool
from odb_libra_lightning.libra.sequence_placement import place_sequences

if TYPE_CHECKING:
    from odb_libra_lightning.libra.attention import libra_attention

__all__ = [
    "PoolLayout",
    "PoolPlan",
    "attention_load",
    "imbalance_floor",
    "libra_attention",
    "place_sequences",
    "plan_pool",
    "pool_imbalance",
]


def __getattr__(name: str) -> Any:
    """Import the attention on first use, so that planning loads without torch."""
    if name == "libra_attention":
        from odb_libra_lightning.libra.attention import libra_attention

        return libra_attention
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
