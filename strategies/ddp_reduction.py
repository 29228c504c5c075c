"""An error in place of a hang where a rank's backward pass left parameters without a gradient."""

from __future__ import annotations

from lightning.pytorch.strategies import Strategy
from torch.nn.parallel import DistributedDataParallel


def check_reduction_finished(strategy: Strategy) -> None:
    """Raise DDP's own error now, after the backward pass, and not in the next forward pass.

    Without `find_unused_parameters`, DDP waits for a gradient of every parameter on every rank. A rank on which some
    are not used goes on, and would be told so in its next forward pass. But Lightning's own broadcast comes before
    that, which the other ranks, still waiting in this backward pass, do not answer.

    Raises:
        RuntimeError: PyTorch's; it gives the numbers of the parameters and names `find_unused_parameters=True`, which
            is `Trainer(strategy="ddp_find_unused_parameters_true")`.
    """
    model = strategy.model
    if isinstance(model, DistributedDataParallel) and model.require_backward_grad_sync:
        model.reducer._rebuild_buckets()  # what the next forward pass begins with, and which checks this first
