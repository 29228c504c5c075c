"""How monitors bring the figures of all ranks together."""

from __future__ import annotations

import lightning as L
import torch
import torch.distributed as dist


def gather(trainer: L.Trainer, values: torch.Tensor) -> torch.Tensor:
    """`[k]` of every rank as `[W, k]`, on the CPU; `k` is the same on all of them, who all call it."""
    if trainer.world_size == 1:
        return values[None]
    values = values.to(trainer.strategy.root_device)
    everyone = [torch.empty_like(values) for _ in range(trainer.world_size)]
    dist.all_gather(everyone, values)
    return torch.stack(everyone).cpu()
