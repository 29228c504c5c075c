"""A module without `configure_model` under FSDP2: sharded by blocks, exact, or refused with a sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader

from odb_libra_lightning.libra.active_attention import core_attention
from odb_libra_lightning.strategies.sharded_blocks import shard_blocks
from tests.launch import run_ranks
from tests.modules import quiet_trainer
from tests.strategies.libra_runs import Case, CoreDecoder, check, fit_case

CASE = Case(flavour="fsdp2", dp=1, cp=2, count=4, accumulate=2, clip=0.2)


def fit_unsharded() -> dict[str, Any]:
    module = CoreDecoder()
    record = fit_case(CASE, module=module)
    units = sorted(name for name, part in module.named_modules() if isinstance(part, FSDPModule))
    return record | {"units": units, "overridden": is_overridden("configure_model", module)}


def test_blocks_are_sharded_and_the_weights_are_those_of_one_process(tmp_path: Path) -> None:
    ranks = run_ranks(fit_unsharded, 2, tmp_path, timeout=120)
    check(CASE, ranks)
    layers = len(CoreDecoder().layers)
    for rank in ranks:
        assert rank["units"] == sorted(["embedding", "head", *(f"layers.{layer}" for layer in range(layers))])
        assert not rank["overridden"]  # the module is as it was


class Experts(nn.Module):
    """A block with a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts[0](x) + self.experts[1](x)


class Nested(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(4, 4), nn.ModuleDict({"blocks": nn.ModuleList([Experts(), Experts()])}))
        self.dtypes: list[str] = []

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        x = batch["x"]
        for block in self.model[1]["blocks"]:  # type: ignore[index]
            x = block(x)
        self.dtypes.append(str(x.dtype))
        core_attention(x[..., None], x[..., None], x[..., None])
        return x.float().square().mean() + 0 * core_attention(x[..., None], x[..., None], x[..., None]).float().sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def units_of_nested_blocks(precision: Any) -> dict[str, Any]:
    from odb_libra_lightning.strategies import LibraFSDPStrategy

    module = Nested()
    trainer = quiet_trainer(devices=2, strategy=LibraFSDPStrategy(), max_steps=1, precision=precision)
    data = [{"x": torch.randn(4, 4), "input_ids": torch.arange(4), "labels": torch.arange(4)} for _ in range(2)]
    trainer.fit(module, DataLoader(data, batch_size=1))
    units = sorted(name for name, part in module.named_modules() if isinstance(part, FSDPModule))
    return {"units": units, "dtypes": module.dtypes, "kept": str(next(module.parameters()).dtype)}


@pytest.mark.parametrize(
    ("precision", "computed"),
    [pytest.param("32-true", "torch.float32", marks=pytest.mark.full), ("bf16-mixed", "torch.bfloat16")],
)
def test_lists_within_a_block_are_a_part_of_it(precision: str, computed: str, tmp_path: Path) -> None:
    for rank in run_ranks(units_of_nested_blocks, 2, tmp_path, precision=precision):
        assert rank["units"] == ["model", "model.1.blocks.0", "model.1.blocks.1"]
        assert rank["dtypes"] == [computed]
        assert rank["kept"] == "torch.float32"


class OwnParameter(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(nn.Linear(1, 1).weight)
        self.head = nn.Linear(2, 2)


class Shared(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 4)
        self.head = nn.Linear(4, 4)
        self.head.weight = self.embedding.weight


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (OwnParameter(), "scale of OwnParameter lie in no submodule, .*: override configure_model in OwnParameter"),
        (Shared(), r"embedding\.weight belongs to several submodules, .*: override configure_model in Shared"),
    ],
)
def test_parameters_that_fsdp_would_not_reduce_rightly_are_refused(module: L.LightningModule, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        shard_blocks(module)
