"""A module without `configure_model` under FSDP2: sharded by blocks, exact, or refused with a sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.distributed.fsdp import FSDPModule

from odb_libra_lightning.strategies.sharded_blocks import shard_blocks
from tests.launch import run_ranks
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
