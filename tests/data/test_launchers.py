"""Every way in which Lightning itself starts the ranks: each trains on its share, and leaves nothing behind."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from odb_libra_lightning import ODBDataModule, ODBLoader
from odb_libra_lightning.callbacks import TokenLossScaling
from tests.launch import session_ends, start, wait_all
from tests.modules import BigramModel, quiet_trainer
from tests.samples import Documents, pad

EPOCHS, SIZE = 2, 61


class WritesWhatItSaw(BigramModel):
    """Each rank writes its own file: a launcher can end well while a rank has died."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def on_train_end(self) -> None:
        (Path(self.folder) / f"rank{self.global_rank}.json").write_text(json.dumps(self.seen))


def main(strategy: str, where: str, folder: str) -> None:
    settings: dict[str, Any] = {"l_max": 600, "num_workers": 1, "buffer_size": 20}
    trainer = quiet_trainer(devices=2, strategy=strategy, max_epochs=EPOCHS, callbacks=[TokenLossScaling()])
    if where == "hook":
        trainer.fit(WritesWhatItSaw(folder), datamodule=ODBDataModule(Documents(SIZE), pad, **settings))
    else:
        trainer.fit(WritesWhatItSaw(folder), train_dataloaders=ODBLoader(Documents(SIZE), pad, **settings))


@pytest.mark.parametrize(
    ("strategy", "where"),
    [
        ("ddp", "outside"),
        pytest.param("ddp_spawn", "hook", marks=pytest.mark.full),
        pytest.param("ddp_spawn", "outside", marks=pytest.mark.full),
        ("ddp_fork", "hook"),
    ],
)
def test_both_ranks_of_every_launcher_share_the_samples(strategy: str, where: str, tmp_path: Path) -> None:
    with (tmp_path / "log").open("w+") as log:
        process = start([sys.executable, "-m", "tests.data.test_launchers", strategy, where, str(tmp_path)], log)
        try:
            code = process.wait(150)
            ended = session_ends(process)
        finally:
            wait_all([process], 1)
        log.seek(0)
        assert code == 0, log.read()
    assert ended, "a process is left"
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert len(ranks[0]) == len(ranks[1])
    counts = Counter(i for rank in ranks for batch in rank for i in batch)
    assert set(counts) == set(range(SIZE))
    assert counts.total() == EPOCHS * (SIZE + 1)


if __name__ == "__main__":
    main(*sys.argv[1:])
