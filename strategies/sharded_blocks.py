"""FSDP2 for a module that does not shard itself: one unit a transformer block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import lightning as L
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard


def shard_blocks(module: L.LightningModule) -> None:
    """Shard a module over all processes: each of its transformer blocks, then each of its submodules as a whole.

    Blocks are what transformers says may not be split, else the elements of every `ModuleList` whose elements are of
    one class. Called again, as Lightning does for every stage, it changes nothing.

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
    for unit in units:
        for block in _blocks(unit):
            fully_shard(block, mesh=mesh["data_parallel"])
        if any(True for _ in unit.parameters()):
            fully_shard(unit, mesh=mesh["data_parallel"])


def _called(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost submodules that are called: a container is not, what it holds is."""
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _called(child)
        else:
            yield child


def _blocks(unit: nn.Module) -> list[nn.Module]:
    named = {name for part in unit.modules() for name in getattr(part, "_no_split_modules", None) or ()}
    if named:
        return [part for part in unit.modules() if type(part).__name__ in named and part is not unit]
    lists = [part for part in unit.modules() if isinstance(part, nn.ModuleList)]
    return [block for blocks in lists if len({type(block) for block in blocks}) == 1 for block in blocks]
