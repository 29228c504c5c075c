"""DeepSpeed on processes of a CPU, which Lightning's strategy refuses: a device for tests."""

from __future__ import annotations

import os
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy
from typing_extensions import override

from odb_libra_lightning.strategies.deepspeed import ODBDeepSpeedStrategy


class CPUDeepSpeedStrategy(ODBDeepSpeedStrategy):
    """Without the check of the accelerator. `precision` is "32-true"; DeepSpeed has no float64."""

    def __init__(self, **settings: Any) -> None:
        os.environ["DS_ACCELERATOR"] = "cpu"  # read when deepspeed is first imported
        super().__init__(**settings)
        import deepspeed.ops

        # Shared memory between ranks of a node; else it is compiled now, which takes 20 s.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

    @override
    def setup_environment(self) -> None:
        self.parallel_devices = [torch.device("cpu", i) for i in range(len(self.parallel_devices or ()))]
        DDPStrategy.setup_environment(self)


def cpu_libra_deepspeed(**settings: Any) -> Any:
    """`LibraDeepSpeedStrategy`, likewise."""
    from odb_libra_lightning.strategies import LibraDeepSpeedStrategy

    # In the order of resolution this is behind Libra's own methods and before DeepSpeed's.
    strategy = type("CPULibraDeepSpeedStrategy", (LibraDeepSpeedStrategy, CPUDeepSpeedStrategy), {})
    return strategy(**settings)
