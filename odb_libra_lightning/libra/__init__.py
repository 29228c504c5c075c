"""Load-balanced context-parallel attention: planning in NumPy alone, and the attention that follows a plan.

Source: "Libra: Taming Attention Workload Skew in Long-Context LLM Training with Bounded Sequence Pool"
(arXiv:2607.23250). Planning is a pure function of lengths and settings, so that every rank computes the same.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from odb_libra_lightning.libra.layout import PoolLayout
from odb_libra_lightning.libra.load import attention_load, imbalance_floor, pool_imbalance
from odb_libra_lightning.libra.pool_plan import PoolPlan, plan_pool
from odb_libra_lightning.libra.sequence_placement import place_sequences

if TYPE_CHECKING:
    from odb_libra_lightning.libra.active_attention import core_attention
    from odb_libra_lightning.libra.attention import libra_attention
    from odb_libra_lightning.libra.planner import Planner
    from odb_libra_lightning.libra.process_groups import new_pool_groups

__all__ = [
    "Planner",
    "PoolLayout",
    "PoolPlan",
    "attention_load",
    "core_attention",
    "imbalance_floor",
    "libra_attention",
    "new_pool_groups",
    "place_sequences",
    "plan_pool",
    "pool_imbalance",
]


_HOMES = {
    "core_attention": "odb_libra_lightning.libra.active_attention",
    "Planner": "odb_libra_lightning.libra.planner",
    "libra_attention": "odb_libra_lightning.libra.attention",
    "new_pool_groups": "odb_libra_lightning.libra.process_groups",
}


def __getattr__(name: str) -> Any:
    """Import what needs torch on first use, so that planning loads without it."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
