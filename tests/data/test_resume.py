"""Training that is broken off and taken up again sees what an unbroken run sees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from odb_libra_lightning import ODBDataModule, ODBLoader
from tests.launch import run_ranks
from tests.modules import BigramModel, quiet_trainer
from tests.samples import Documents, identities, pad


def fit(folder: str, *, resume: str | None = None, **settings: Any) -> dict[str, Any]:
    module = BigramModel()
    trainer = quiet_trainer(
        devices=2,
        strategy="ddp",
        max_epochs=3,
        accumulate_grad_batches=2,
        enable_checkpointing=True,
        callbacks=[
            ModelCheckpoint(
                folder, filename="{step}", save_top_k=-1, every_n_train_steps=2, save_on_train_epoch_end=False
            ),
            ModelCheckpoint(folder, filename="end{epoch}", save_top_k=-1, save_on_train_epoch_end=True),
        ],
    )
    data = ODBDataModule(Documents(50), pad, l_max=900, num_workers=1, **settings)
    trainer.fit(module, datamodule=data, ckpt_path=resume)
    return {"seen": module.seen, "weights": module.weights()}


def fit_and_resume(folder: str) -> Any:
    whole = fit(folder)
    names = ["step=2.ckpt", "step=6.ckpt", "endepoch=0.ckpt", "endepoch=1.ckpt"]
    return {"whole": whole, "resumed": [fit(folder, resume=f"{folder}/{name}") for name in names]}


def test_a_run_resumed_within_an_epoch_or_at_its_end_is_the_unbroken_run(tmp_path: Path) -> None:
    for rank in run_ranks(fit_and_resume, 2, tmp_path, folder=str(tmp_path / "checkpoints")):
        whole = rank["whole"]
        for resumed in rank["resumed"]:
            rest = len(resumed["seen"])
            assert 0 < rest < len(whole["seen"])
            assert resumed["seen"] == whole["seen"][-rest:]
            assert resumed["weights"] == whole["weights"]


def test_a_checkpoint_of_an_epoch_s_last_step_goes_on_with_the_next_epoch(tmp_path: Path) -> None:
    def fit_once(resume: Path | None = None) -> BigramModel:
        module = BigramModel()
        steps = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, every_n_train_steps=1)
        trainer = quiet_trainer(devices=1, max_epochs=3, enable_checkpointing=True, callbacks=[steps])
        data = ODBDataModule(Documents(30), pad, l_max=900, num_workers=0)
        trainer.fit(module, datamodule=data, ckpt_path=resume)
        return module

    whole = fit_once()
    per_epoch = next(n for n in range(1, 99) if sum(map(len, whole.seen[:n])) == 30)
    resumed = fit_once(tmp_path / f"step={per_epoch}.ckpt")
    assert resumed.seen == whole.seen[per_epoch:]
    assert resumed.weights() == whole.weights()


def test_a_plain_loop_resumes_after_the_batch_at_hand() -> None:
    def loader(**settings: Any) -> ODBLoader:
        return ODBLoader(Documents(60), pad, **{"l_max": 600, "num_workers": 0, **settings})

    whole = loader()
    epochs = [[identities(batch) for batch in whole] for _ in range(2)]
    broken = loader()
    list(broken)
    for number, _ in enumerate(broken):
        if number == 4:
            state = broken.state_dict()
            break
    assert state["epoch"] == 1
    resumed = loader()
    resumed.load_state_dict(state)
    assert [identities(batch) for batch in resumed] == epochs[1][5:]
    assert resumed.info.samples_done == 60

    assert all(info.elapsed_s < 60 for info in resumed._recent), "no time from before the resume"

    other = loader(l_max=700, num_workers=1)
    other.load_state_dict(state)
    assert other.state_dict()["batches"] == 5, "not forgotten before the first batch"
    with pytest.raises(ValueError, match="within an epoch with l_max=600, and this loader has 700"):
        list(other)
    assert other._producer is None, "no process was started"


def test_a_checkpoint_of_an_epoch_s_end_allows_other_settings() -> None:
    first = ODBLoader(Documents(20), pad, l_max=600, num_workers=0)
    list(first)
    second = ODBLoader(Documents(20), pad, l_max=300, num_workers=0)
    second.load_state_dict(first.state_dict())
    list(second)
    assert second.info.epoch == 1
