"""DeepSpeed with accumulation windows that are the trainer's own."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override


class ODBDeepSpeedStrategy(DeepSpeedStrategy):
    """Lightning's `DeepSpeedStrategy`, exact under `accumulate_grad_batches`; without accumulation the two are equal.

    Lightning's own divides each loss by the size of the window, and so does DeepSpeed's engine. And the engine counts
    micro-batches across the end of an epoch, where Lightning's window, and that of the loss weights, is a short one.
    Here the trainer alone divides and says where a window ends, as it does for every other strategy. So a short
    last window is an update of its own, and `global_step` and schedulers count it.

    Example:
        >>> L.Trainer(strategy=ODBDeepSpeedStrategy(stage=2), accumulate_grad_batches=4)  # doctest: +SKIP
    """

    @property
    @override
    def handles_gradient_accumulation(self) -> bool:
        return False

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None]:
        yield  # the engine knows by its boundary what it must not reduce yet

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        assert self.lightning_module is not None
        ends_window = not self.lightning_module.trainer.fit_loop._should_accumulate()
        self.deepspeed_engine.set_gradient_accumulation_boundary(ends_window)
        return super().backward(closure_loss, optimizer, *args, scale_wrt_gas=False, **kwargs)
