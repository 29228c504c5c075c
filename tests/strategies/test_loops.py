"""Loops without a Trainer: DDP by hand, Lightning Fabric, and the examples that show them."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch.nn.parallel import DistributedDataParallel

from odb_libra_lightning import ODBLoader
from odb_libra_lightning.strategies.gloo_exit import destroy_gloo_at_exit
from tests.callbacks.test_loss_scaling import LR, Masked, largest_difference, replay
from tests.launch import REPOSITORY, run_ranks, start, wait_all
from tests.modules import BigramModel
from tests.samples import pad
from tests.strategies.masked_runs import SIZE, WINDOWS, token_mean


def network() -> torch.nn.Module:
    module = BigramModel(LR)
    return torch.nn.Sequential(module.embedding, module.head)


def train(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    accumulation: int,
    backward: Callable[[torch.Tensor], Any],
    without_sync: Callable[[bool], AbstractContextManager[Any]],
) -> dict[str, Any]:
    loader = ODBLoader(
        Masked(SIZE, longest=60), pad, l_max=150, buffer_size=16, num_workers=0, accumulation=accumulation
    )
    indices = []
    for _ in range(2):
        for batch in loader:
            info = loader.info
            indices.append(list(info.indices))
            last = (info.batch_idx + 1) % info.accumulation == 0 or info.samples_done == info.samples_total
            with without_sync(not last):
                loss = token_mean(model(batch["input_ids"]), batch["labels"])
                backward(loss * info.loss_weight / info.accumulation)
            if last:
                optimizer.step()
                optimizer.zero_grad()
    return {"indices": indices, "weights": torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()}


def by_hand() -> Any:
    dist.init_process_group("gloo")
    results = []
    for window in WINDOWS:
        model = DistributedDataParallel(network())
        optimizer = torch.optim.SGD(model.parameters(), LR)

        def without_sync(enabled: bool, model: DistributedDataParallel = model) -> AbstractContextManager[Any]:
            return model.no_sync() if enabled else nullcontext()

        results.append(train(model, optimizer, window, torch.Tensor.backward, without_sync))
    dist.destroy_process_group()
    return results


def with_fabric() -> Any:
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    destroy_gloo_at_exit()
    results = []
    for window in WINDOWS:
        plain = network()
        model, optimizer = fabric.setup(plain, torch.optim.SGD(plain.parameters(), LR))

        def without_sync(enabled: bool, model: Any = model) -> AbstractContextManager[Any]:
            return fabric.no_backward_sync(model, enabled=enabled)

        results.append(train(model, optimizer, window, fabric.backward, without_sync))
    return results


@pytest.mark.parametrize("loop", [by_hand, with_fabric])
def test_weights_equal_one_process_on_the_token_mean(loop: Callable[[], Any], tmp_path: Path) -> None:
    for window, *ranks in zip(WINDOWS, *run_ranks(loop, 2, tmp_path), strict=True):
        expected = replay(ranks, SIZE, window)
        for rank in ranks:
            assert largest_difference(rank["weights"], expected) < 1e-10


def test_fabric_itself_refuses_the_loader() -> None:
    """A DataLoader it would share out; the loader has its share already."""
    with pytest.raises(TypeError, match="Only PyTorch DataLoader are currently supported"):
        Fabric(accelerator="cpu", devices=1).setup_dataloaders(ODBLoader(Masked(8), pad))


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.full), 2])
@pytest.mark.parametrize("name", ["raw_loop", "fabric_loop"])
def test_the_example_runs(name: str, ranks: int, tmp_path: Path) -> None:
    script = str(REPOSITORY / "examples" / f"{name}.py")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    with (tmp_path / "log").open("w+") as log:
        process = start([sys.executable, *torchrun, script], log, {"CUDA_VISIBLE_DEVICES": ""})
        wait_all([process], 120)
        log.seek(0)
        output = log.read()
    assert process.returncode == 0, output
    found = re.findall(r"rank (\d), epoch (\d): \d+ batches, 100 samples, loss ([\d.]+)", output)
    assert sorted((int(rank), int(epoch)) for rank, epoch, _ in found) == [(r, e) for r in range(ranks) for e in (0, 1)]
    losses = {(rank, epoch): float(loss) for rank, epoch, loss in found}
    assert losses["0", "1"] < losses["0", "0"], "it learns"
