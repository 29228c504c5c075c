"""Lightning strategies: context-parallel training with balanced attention, and DeepSpeed with exact accumulation."""

from __future__ import annotations

from odb_libra_lightning.strategies.deepspeed import ODBDeepSpeedStrategy
from odb_libra_lightning.strategies.libra import (
    LibraDeepSpeedStrategy,
    LibraFSDPStrategy,
    LibraStrategy,
    register_strategies,
)

__all__ = ["LibraDeepSpeedStrategy", "LibraFSDPStrategy", "LibraStrategy", "ODBDeepSpeedStrategy"]

register_strategies()
