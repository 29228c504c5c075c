"""Load-balanced context-parallel attention: the planning, in NumPy alone.

Source: "Libra: Taming Attention Workload Skew in Long-Context LLM Training with Bounded Sequence Pool"
(arXiv:2607.23250). Everything here is a pure function of lengths and settings, so that every rank computes the same.
"""

from odb_libra_lightning.libra.layout import PoolLayout
from odb_libra_lightning.libra.load import attention_load, imbalance_floor, pool_imbalance
from odb_libra_lightning.libra.pool_plan import PoolPlan, plan_pool
from odb_libra_lightning.libra.sequence_placement import place_sequences

__all__ = [
    "PoolLayout",
    "PoolPlan",
    "attention_load",
    "imbalance_floor",
    "place_sequences",
    "plan_pool",
    "pool_imbalance",
]
