"""`train.py` in this process, in one of its own, and in two under each launcher."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only

from odb_libra_lightning.cli import train
from odb_libra_lightning.cli.loggers import run_loggers

ROOT = Path(__file__).parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]

TARGETS = """\
import json
from pathlib import Path

import torch
from lightning.pytorch import Callback
from lightning.pytorch.demos.boring_classes import BoringModel

from odb_libra_lightning.odb.errors import ODBError


class Model(BoringModel):
    def __init__(self, options: dict | None = None, fail: str = ""):
        super().__init__()
        assert type(options) in (dict, type(None)), "targets get plain containers"
        self.fail = fail
        self.first_weight = float(self.layer.weight.detach()[0, 0])

    def training_step(self, batch, batch_idx):
        if self.fail == "data":
            raise ODBError("sample 3 is empty; drop it")
        if self.fail == "code":
            raise RuntimeError("a bug of the model")
        return super().training_step(batch, batch_idx)


class WriteResult(Callback):
    def __init__(self, folder: str, run_dir: str):
        self.folder, self.run_dir = folder, run_dir

    def on_train_end(self, trainer, pl_module):
        result = {
            "run_dir": self.run_dir,
            "world_size": trainer.world_size,
            "steps": trainer.global_step,
            "first_weight": pl_module.first_weight,
            "weight": pl_module.layer.weight.detach().double().sum().item(),
        }
        Path(self.folder, f"rank{trainer.global_rank}.json").write_text(json.dumps(result))


def several(folder: str, run_dir: str):
    return [WriteResult(folder, run_dir), Callback()]


def broken(text: str = "no such width"):
    raise ValueError(text)


def keyless():
    return {}["width"]
"""

RECIPE = """\
hydra:
  searchpath: [file://{root}/recipes]
defaults:
  - base
  - trainer: cpu_single
  - logger: none
  - monitoring: none
  - _self_
run: {{name: test, root: {folder}/runs}}
module: {{_target_: train_targets.Model, options: {{a: [1, 2]}}}}
data: {{_target_: lightning.pytorch.demos.boring_classes.BoringDataModule}}
callbacks:
  result: {{_target_: train_targets.several, folder: {folder}, run_dir: '${{run.dir}}'}}
trainer: {{limit_train_batches: 3, limit_val_batches: 0, enable_progress_bar: false}}
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train_targets.py").write_text(TARGETS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "train_targets", raising=False)
    for variable in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS", "WANDB_MODE"):
        monkeypatch.setenv(variable, "")  # so that what a run leaves in the environment is taken back
        monkeypatch.delenv(variable)
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.format(root=ROOT, folder=tmp_path))
    return path


def run_process(command: list[str], *, folder: Path, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """Run a command in a process group of its own and kill all of it when time is up."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONWARNINGS": "ignore"}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        start_new_session=True,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 2) -> str:
    capsys.readouterr()
    assert train.main(list(arguments)) == code
    err = capsys.readouterr().err
    lines = [line for line in err.splitlines() if "error: " in line]
    assert len(lines) == 1
    assert "Traceback" not in err
    return lines[0].removeprefix("error: ")


def test_a_run_leaves_a_recipe_that_runs_again(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(["--config", str(recipe), "seed=5", "+trainer.max_steps=2"]) == 0
    first = json.loads((recipe.parent / "rank0.json").read_text())
    assert capsys.readouterr().out == f"Run folder: {first['run_dir']}\n"
    assert first["steps"] == 2
    assert "ODB_LIBRA_RUN_DIR" not in os.environ

    saved = Path(first["run_dir"], "config.yaml")
    assert train.main(["--config", str(saved), "run.name=again"]) == 0
    again = json.loads((recipe.parent / "rank0.json").read_text())
    assert again["run_dir"].startswith(f"{recipe.parent}/runs/again/")
    assert Path(again["run_dir"], "config.yaml").exists()
    assert {**again, "run_dir": ""} == {**first, "run_dir": ""}


def test_the_seed_decides_the_first_weights(recipe: Path) -> None:
    def first_weight(seed: int) -> float:
        config = train.resolve_recipe(train.compose_recipe(recipe, [f"seed={seed}"]))
        return train.build_experiment(config).module.first_weight

    assert first_weight(1) == first_weight(1) != first_weight(2)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("module._target_=train_targets.broken", "module: no such width"),
        ("module._target_=train_targets.keyless", "module: KeyError: 'width'"),
        ("+callbacks.extra._target_=train_targets.broken", "callbacks.extra: no such width"),
        ("seed=-1", "seed: -1 is not in bounds"),
        ("trainer.max_epochs=-5", "trainer: `max_epochs` must be a non-negative integer or -1"),
        ("trainer.accelerator=nonsense", "trainer: You selected an invalid accelerator name"),
        ("resume=missing.ckpt", "resume: there is no checkpoint missing.ckpt"),
        ("run.dir=/proc/nowhere", "run.dir: "),
        (
            "++data={_target_: train_targets.WriteResult, folder: x, run_dir: x}",
            "data: train_targets.WriteResult made a WriteResult, but a lightning.LightningDataModule is expected",
        ),
    ],
)
def test_a_target_that_refuses_gives_one_sentence_with_its_section(
    recipe: Path, capsys: pytest.CaptureFixture[str], override: str, said: str
) -> None:
    drop = ["~module.options"] if override.startswith("module") else []
    assert error_of(capsys, "--config", str(recipe), *drop, override).startswith(said)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--config is required (usage: python train.py --config RECIPE"),
        (["--config"], "argument --config: expected one argument (usage"),
        (["--cofig", "x.yaml"], "unknown option --cofig; did you mean --config?"),
        (["--config", "x.yaml", "--multirun"], "unknown option --multirun (usage"),
        (["--config", "recipes/bas.yaml"], "recipe recipes/bas.yaml does not exist; did you mean recipes/base.yaml?"),
        (["--config", "recipes/base.yaml"], "run.name must be given"),
    ],
)  # fmt: skip
def test_wrong_arguments_give_one_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    monkeypatch.chdir(ROOT)
    assert error_of(capsys, *arguments).startswith(said)


def test_overrides_and_options_mix(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = error_of(capsys, "~trainer.precision", "--config", str(recipe), "+module.fail=x", "trainer.max_epoch=1")
    assert said == "trainer.max_epoch is not in the recipe; did you mean trainer.max_epochs?"


def test_debug_shows_the_traceback_as_well(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(["--config", str(recipe), "trainer.max_epoch=1", "--debug"]) == 2
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.splitlines()[-1].startswith("error: trainer.max_epoch is not in the recipe")


def test_another_rank_waits_for_rank_zero_and_names_itself(
    recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    monkeypatch.setattr(train.time, "sleep", waited.append)
    assert train.main(["--config", str(recipe), "sed=1"]) == 2
    assert waited == [train._GRACE_S]
    assert capsys.readouterr().err == "[rank 1] error: sed is not in the recipe; did you mean seed?\n"


def test_a_data_error_is_its_message_and_exit_code_1(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--config", str(recipe), "+module.fail=data"]
    assert error_of(capsys, *arguments, code=1) == "sample 3 is empty; drop it"
    assert train.main([*arguments, "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_an_error_of_the_training_keeps_its_traceback(recipe: Path) -> None:
    with pytest.raises(RuntimeError, match="a bug of the model"):
        train.main(["--config", str(recipe), "+module.fail=code"])


def test_help_shows_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        train.main(["--help"])
    assert stopped.value.code == 0
    assert "python train.py --config recipes/quickstart.yaml trainer=cpu_single" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("mode", "variable", "expected"),
    [
        ("offline", None, "offline"),
        ("online", None, "online"),
        ("offline", "online", "online"),
        ("online", "offline", "offline"),
        ("online", "dryrun", "offline"),
        ("online", "disabled", None),
    ],
)
def test_wandb_mode_in_the_environment_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, variable: str | None, expected: str | None
) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    if variable is not None:
        monkeypatch.setenv("WANDB_MODE", variable)
    loggers = run_loggers(run_dir=str(tmp_path), name="test", mode=mode)
    assert isinstance(loggers[0], TensorBoardLogger)
    assert [logger._wandb_init["mode"] for logger in loggers if isinstance(logger, WandbLogger)] == (
        [expected] if expected else []
    )
    assert os.environ.get("WANDB_MODE") == variable


def test_a_wandb_mode_that_does_not_exist_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "onlin")
    with pytest.raises(ValueError, match="WANDB_MODE=onlin is not one of online, run, offline"):
        run_loggers(run_dir=str(tmp_path), name="test")


@pytest.mark.parametrize("launcher", [None, "lightning", "torchrun"])
def test_every_process_trains_the_same_model_and_one_of_them_logs(recipe: Path, launcher: str | None) -> None:
    command = [*(TORCHRUN if launcher == "torchrun" else [sys.executable]), "train.py", "--config", str(recipe)]
    trainer = "cpu_ddp2" if launcher else "cpu_single"
    run = run_process([*command, f"trainer={trainer}", "logger=offline"], folder=recipe.parent)
    assert run.returncode == 0, run.stderr

    world_size = 2 if launcher else 1
    results = [json.loads((recipe.parent / f"rank{rank}.json").read_text()) for rank in range(world_size)]
    assert [(result["world_size"], result["steps"]) for result in results] == [(world_size, 3)] * world_size
    assert len({result["weight"] for result in results}) == 1
    if launcher == "lightning":  # which starts rank 1 seconds later, when `${now:}` has moved on
        assert results[0]["run_dir"] == results[1]["run_dir"]

    run_dir = Path(results[0]["run_dir"])
    assert list(recipe.parent.glob("runs/test/*")) == [run_dir]
    assert (run_dir / "config.yaml").exists()
    assert len(list(run_dir.glob("wandb/offline-run-*/*.wandb"))) == 1
    assert len(list(run_dir.glob("tensorboard/events.out.tfevents.*"))) == 1
    assert run.stdout.count("Run folder: ") == 1
    assert "wandb:" not in run.stdout + run.stderr


@pytest.mark.full
def test_torchrun_prints_a_mistake_once(recipe: Path) -> None:
    run = run_process([*TORCHRUN, "train.py", "--config", str(recipe), "sed=1"], folder=recipe.parent)
    assert run.returncode != 0
    assert run.stderr.count("sed is not in the recipe; did you mean seed?") == 1
    assert not (recipe.parent / "runs").exists()
