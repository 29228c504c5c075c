"""FSDP2 for a module that does not shard itself: one unit a transformer block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import lightning as L
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard


def shard_blocks(module: L.LightningModule) -> None:
    """Shard a module over all processes: each of its transformer blocks, then each of its submodules as a whole.

    Blocks are what transformers says may not be split, else the elements of every `ModuleList` whose elements are of
    one class. Under `bf16-mixed` they are gathered in bf16 and reduced in float32. Called again, as Lightning does for
    every stage, it changes nothing.

    Args:
        module: a LightningModule whose parameters all lie in submodules, and whose forward pass calls these.

    Raises:
        ValueError: parameters that lie in the module itself, or in two of its submodules.
    """
    if any(isinstance(part, FSDPModule) for part in module.modules()):
        return
    remedy = f"override configure_model in {type(module).__name__} and shard it there by fully_shard"
    own = [name for name, _ in module.named_parameters(recurse=False)]
    if own:
        raise ValueError(
            f"{', '.join(own)} of {type(module).__name__} lie in no submodule, and FSDP2 shards those: {remedy}"
        )
    units = list(_called(module))
    owners = Counter(id(parameter) for unit in units for parameter in unit.parameters())
    shared = [name for name, parameter in module.named_parameters() if owners[id(parameter)] > 1]
    if shared:
        raise ValueError(f"{shared[0]} belongs to several submodules, which FSDP2 would shard apart: {remedy}")
    mesh = module.device_mesh
    assert mesh is not None
    policy = _policy(module)
    for unit in units:
        for part in (*_blocks(unit), unit):
            if any(True for _ in part.parameters()):
                fully_shard(part, mesh=mesh["data_parallel"], mp_policy=policy)


def _called(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost submodules that are called: a container is not, what it holds is."""
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _called(child)
        else:
            yield child


def _blocks(unit: nn.Module) -> list[nn.Module]:
    """The outermost blocks of a unit; lists within a block, as of experts, are a part of it."""
    named = {name for part in unit.modules() for name in getattr(part, "_no_split_modules", None) or ()}
    found: list[nn.Module] = []

    def search(part: nn.Module) -> None:
        for child in part.children():
            if type(child).__name__ in named:
                found.append(child)
            elif not named and isinstance(child, nn.ModuleList) and len({type(block) for block in child}) == 1:
                found.extend(child)
            else:
                search(child)

    search(unit)
    return found


def _policy(module: L.LightningModule) -> MixedPrecisionPolicy:
    """Under `bf16-mixed` parameters are gathered in bf16.

    Autocast alone would gather them in float32, and keep its own copy of every weight until the end of the step.
    """
    if module._trainer is not None and module.trainer.precision == "bf16-mixed":
        return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return MixedPrecisionPolicy()
