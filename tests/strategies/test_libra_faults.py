"""What goes wrong on one process of a pool ends all within the time limit, with an error and with its own text."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from odb_libra_lightning import ODBDataModule
from odb_libra_lightning.data.collators import PackingCollator
from tests.launch import start_ranks
from tests.strategies.dense_decoder import Pack
from tests.strategies.libra_runs import Case, CoreDecoder, trainer_of
from tests.strategies.packs import Listed, alone, mixed

# Ranks that are killed for going on longer end by SIGKILL. They share two cores with whatever else runs.
LIMIT_S, POOL_TIMEOUT_S = 100, 15.0
FAULTY, LAST_GOOD_STEP = 1, 2


class Faulty(CoreDecoder):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault

    def meet(self, fault: str, batch_idx: int) -> None:
        if (self.fault, self.global_rank, batch_idx) == (fault, FAULTY, LAST_GOOD_STEP + 1):
            if fault == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError("disk on fire")

    def on_before_batch_transfer(self, batch: Pack, dataloader_idx: int) -> Pack:
        self.meet("before the step", len(self.losses))
        return super().on_before_batch_transfer(batch, dataloader_idx)

    def training_step(self, batch: Pack, batch_idx: int) -> torch.Tensor:
        self.meet("killed", batch_idx)
        self.meet("before attention", batch_idx)
        loss = super().training_step(batch, batch_idx)
        self.meet("after attention", batch_idx)
        return loss

    def on_after_backward(self) -> None:
        self.meet("after backward", len(self.losses) - 1)


class Unreadable(Listed):
    def __getitem__(self, index: int) -> Any:
        if index == len(self) - 1:
            raise OSError("disk on fire")
        return super().__getitem__(index)


def fit_faulty(fault: str, dp: int, cp: int, pool: int) -> None:
    trainer = trainer_of(Case(dp=dp, cp=cp, pool=pool, options={"pool_timeout": POOL_TIMEOUT_S}))
    packs = mixed(8 * dp)
    if fault == "unreadable, online":
        documents = Unreadable([{name: values[0] for name, values in pack.items()} for pack in packs])
        data = ODBDataModule(documents, PackingCollator(), l_max=60, num_workers=1, buffer_size=4, shuffle=False)
        trainer.fit(CoreDecoder(), datamodule=data)
        return
    dataset = Unreadable(packs) if fault == "unreadable" else Listed(packs)
    trainer.fit(Faulty(fault), train_dataloaders=DataLoader(dataset, collate_fn=alone))


@pytest.mark.parametrize(
    ("fault", "dp", "cp", "pool"),
    [
        ("unreadable, online", 1, 2, 1),
        *(
            pytest.param(fault, dp, cp, pool, marks=pytest.mark.full)
            for fault in ("killed", "before the step", "before attention", "after attention", "after backward")
            for dp, cp, pool in ((1, 2, 1), (2, 1, 2), (2, 1, 1), (2, 2, 2))
        ),
        *(
            pytest.param(fault, dp, cp, pool, marks=pytest.mark.full)
            for fault in ("unreadable", "unreadable, online")
            for dp, cp, pool in ((1, 2, 1), (2, 2, 2))
        ),
    ],
)
def test_a_fault_of_one_process_ends_all(fault: str, dp: int, cp: int, pool: int, tmp_path: Path) -> None:
    ends = start_ranks(fit_faulty, dp * cp, tmp_path, fault=fault, dp=dp, cp=cp, pool=pool, timeout=LIMIT_S)
    for rank, end in enumerate(ends):
        if fault == "killed" and rank == FAULTY:
            assert end.code == -signal.SIGKILL
        else:
            assert end.code not in (0, -signal.SIGKILL), f"rank {rank} goes on, or ends well:\n{end.output}"
            assert "Error" in end.output
    if fault != "killed":
        assert any("disk on fire" in end.output for end in ends)
