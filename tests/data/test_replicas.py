"""Processes that share a data-parallel rank, as in context and tensor parallelism: one loads, all get the same."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

from odb_libra_lightning import ODBDataModule, ODBLoader
from tests.launch import run_ranks, start_ranks
from tests.modules import BigramModel, quiet_trainer
from tests.samples import Documents, pad


class Noisy(Documents):
    """Draws noise from a generator of its own, which every process seeds differently."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {**super().__getitem__(index), "noise": torch.seed() * torch.ones(1, dtype=torch.float64)}


def pad_noisy(samples: list[Any]) -> Any:
    return {**pad(samples), "noise": torch.stack([sample["noise"] for sample in samples])}


def two_of_two(mode: str) -> Any:
    """Four processes are two ranks of two."""
    dist.init_process_group("gloo")
    rank = dist.get_rank() // 2
    loader = ODBLoader(
        Noisy(41),
        pad_noisy,
        l_max=600,
        buffer_size=8,
        num_workers=1,
        rank=rank,
        world_size=2,
        replica_size=2,
        mode=mode,
    )
    epochs = []
    for _ in range(2):
        epochs.append([[loader.info.indices, batch["noise"].tolist()] for batch in loader])
    state = loader.state_dict()["epoch"]
    processes = loader._feed
    loader.close()
    dist.destroy_process_group()
    return {"epochs": epochs, "state": state, "loads": type(processes).__name__}


@pytest.mark.parametrize("mode", ["join", pytest.param("non_join", marks=pytest.mark.full)])
def test_members_of_a_rank_get_its_batches_and_ranks_different_ones(mode: str, tmp_path: Path) -> None:
    results = run_ranks(two_of_two, 4, tmp_path, mode=mode, timeout=150)
    for leader, follower in (results[:2], results[2:]):
        assert leader["epochs"] == follower["epochs"], "random augmentation too"
        assert leader["state"] == follower["state"] == 2
    for epoch in range(2):
        counts = Counter(i for rank in results[::2] for indices, _ in rank["epochs"][epoch] for i in indices)
        assert set(counts) == set(range(41))
        assert counts.total() <= 42


class Sharded(BigramModel):
    def configure_model(self) -> None:
        mesh = self.device_mesh
        assert mesh is not None
        fully_shard(self.embedding, mesh=mesh["data_parallel", "tensor_parallel"]._flatten("dp_cp"))


def fit_on_a_mesh(data_parallel: int) -> Any:
    module = Sharded()
    size = dist.get_world_size() if dist.is_initialized() else None
    assert size is None, "the trainer makes the group"
    trainer = quiet_trainer(
        devices=2 * data_parallel,
        strategy=ModelParallelStrategy(data_parallel_size=data_parallel, tensor_parallel_size=2),
        max_epochs=2,
    )
    trainer.fit(module, datamodule=ODBDataModule(Documents(31), pad, l_max=900, buffer_size=8, num_workers=0))
    return module.seen


@pytest.mark.parametrize("data_parallel", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_mesh_of_the_trainer_tells_who_shares_a_rank(data_parallel: int, tmp_path: Path) -> None:
    seen = run_ranks(fit_on_a_mesh, 2 * data_parallel, tmp_path, data_parallel=data_parallel, timeout=150)
    for rank in range(data_parallel):
        assert seen[2 * rank] == seen[2 * rank + 1]
    counts = Counter(i for member in seen[::2] for batch in member for i in batch)
    assert set(counts) == set(range(31))
    assert counts.total() >= 62


def leader_fails() -> None:
    class Broken(Documents):
        def __getitem__(self, index: int) -> Any:
            if index == 7:
                raise OSError("unreadable")
            return super().__getitem__(index)

    dist.init_process_group("gloo")
    list(ODBLoader(Broken(20), pad, num_workers=0, rank=0, world_size=1, replica_size=2))


def test_a_fault_of_the_leader_stops_all_its_members_with_its_text(tmp_path: Path) -> None:
    for end in start_ranks(leader_fails, 2, tmp_path):
        assert end.code != 0
        assert "sample 7: OSError: unreadable" in end.output


def leader_cannot_start() -> None:
    class Unpicklable(Documents):
        def __reduce__(self) -> Any:
            raise TypeError("not to be sent")

    dist.init_process_group("gloo")
    settings = {"num_workers": 1, "start_method": "spawn"}
    list(ODBLoader(Unpicklable(20), pad, rank=0, world_size=1, replica_size=2, **settings))


def test_a_leader_that_cannot_start_tells_its_members(tmp_path: Path) -> None:
    for end in start_ranks(leader_cannot_start, 2, tmp_path, timeout=60):
        assert end.code not in (0, -9)
        assert "not to be sent" in end.output


def wrong_size() -> None:
    dist.init_process_group("gloo")
    list(ODBLoader(Documents(20), pad, num_workers=0, rank=dist.get_rank(), world_size=2, replica_size=2))


def test_a_replica_size_that_does_not_fit_the_processes_is_refused(tmp_path: Path) -> None:
    for end in start_ranks(wrong_size, 2, tmp_path):
        assert end.code != 0
        assert "replica_size" in end.output
