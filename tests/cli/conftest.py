"""One small training of the quickstart, over two processes, that several tests look at."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.launch import session_ends, start, wait_all


@dataclass(frozen=True)
class Training:
    """How the training ended, what it printed, and its run folder."""

    code: int
    output: str
    folder: Path
    left_nothing: bool


@pytest.fixture(scope="session")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Training:
    """`train.py` on the quickstart's recipe, made small."""
    return train_recipe(
        "quickstart",
        tmp_path_factory.mktemp("quickstart"),
        *("data.train_dataset.limit=48", "data.train_dataset.max_length=256", "data.l_max=512"),
        *("module.hidden_size=48", "module.intermediate_size=96", "module.num_hidden_layers=1"),
    )


def train_recipe(name: str, root: Path, *overrides: str) -> Training:
    """`train.py` on a recipe of this project, in processes of its own."""
    command = [sys.executable, "train.py", "--config", f"recipes/{name}.yaml", *overrides]
    command += ["run.name=small", f"run.root={root}"]
    with (root / "output.txt").open("w+") as log:
        process = start(command, log)
        ended = False
        try:
            process.wait(200)
            ended = session_ends(process)
        finally:
            wait_all([process], 1)
        log.seek(0)
        output = log.read()
    folders = list((root / "small").iterdir()) if (root / "small").is_dir() else []
    assert len(folders) == 1, output
    return Training(process.returncode, output, folders[0], ended)
