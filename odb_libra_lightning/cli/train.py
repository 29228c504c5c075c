"""Train a recipe from the command line: read the arguments, build what the recipe names, fit it."""

from __future__ import annotations

import argparse
import difflib
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import lightning
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig

from odb_libra_lightning.cli.loggers import finish_loggers
from odb_libra_lightning.cli.recipe import RecipeError, compose_recipe, one_line, recipe_yaml, resolve_recipe
from odb_libra_lightning.odb.errors import ODBError
from odb_libra_lightning.strategies.libra import ContextParallelStrategy

_RUN_DIR_VARIABLE = "ODB_LIBRA_RUN_DIR"
_GRACE_S = 5.0
_USAGE = "python train.py --config RECIPE [--debug] [override ...]"
_EXAMPLES = """\
overrides, in Hydra's grammar:
  a.b=1              change a value that the recipe sets
  +a.b=1             add a value that it does not set
  ~a.b               drop a value
  trainer=cpu_ddp2   choose a file of a group, here recipes/trainer/cpu_ddp2.yaml

examples:
  python train.py --config recipes/quickstart.yaml
  python train.py --config recipes/quickstart.yaml trainer=cpu_single trainer.max_epochs=3 run.name=longer
  python train.py --config recipes/quickstart.yaml logger.mode=online monitoring=none
  python train.py --config runs/quickstart/2026-01-31_12-00-00/config.yaml
  torchrun --nproc_per_node 2 train.py --config recipes/quickstart.yaml
"""


@dataclass(frozen=True)
class Experiment:
    """What a recipe names, built and ready for `trainer.fit`."""

    trainer: lightning.Trainer
    module: lightning.LightningModule
    data: lightning.LightningDataModule | None
    resume: str | None


def main(argv: Sequence[str] | None = None) -> int:
    """Train a recipe.

    Args:
        argv: The arguments after the program's name; those of the process by default.

    Returns:
        0 after training, 1 after an `ODBError`, 2 for a recipe or an argument that cannot be used. Any other
        exception of the training itself passes through.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    # Lightning's own, about a class of torch's that a user of recipes never meets.
    warnings.filterwarnings("ignore", message=".*LeafSpec.*is deprecated")
    try:
        options = _parse(arguments)
        recipe = compose_recipe(options.config, options.overrides)
        config = resolve_recipe(recipe, run_dir=_run_dir_of_rank_zero())
        experiment = build_experiment(config)
        if experiment.trainer.is_global_zero:
            _open_run_dir(Path(config.run.dir), recipe_yaml(recipe))
    except RecipeError as error:
        _report(error, debug=debug)
        return 2
    return _fit(experiment, debug=debug)


def build_experiment(config: DictConfig) -> Experiment:
    """Instantiate the sections of a resolved recipe.

    Raises:
        RecipeError: A target refused its arguments, or made something that Lightning cannot use.
    """
    if config.get("seed") is not None:
        with _section("seed"):
            lightning.seed_everything(config.seed, workers=True, verbose=False)
    resume = config.get("resume")
    is_file = resume not in (None, "last", "hpc") and not resume.startswith("registry") and "://" not in resume
    if is_file and not Path(resume).exists():
        raise RecipeError(f"resume: there is no checkpoint {resume}")
    data = _build("data", config.get("data"), expected=lightning.LightningDataModule)
    module = _build("module", config.module, expected=lightning.LightningModule)
    callbacks = _flatten(_build(f"callbacks.{key}", node) for key, node in (config.get("callbacks") or {}).items())
    loggers = _flatten([_build("logger", config.get("logger"))])
    with _section("trainer"):
        # As a partial first: Hydra would copy objects that are passed to it.
        make_trainer = instantiate(config.trainer, _convert_="all", _partial_=True)
        trainer = make_trainer(callbacks=callbacks, logger=loggers or False)
    if isinstance(trainer.strategy, ContextParallelStrategy):
        with _section("trainer.strategy"):  # before other processes are started, which would say it once more each
            trainer.strategy.check(module)
    return Experiment(trainer=trainer, module=module, data=data, resume=resume)


def _build(section: str, node: DictConfig | None, *, expected: type | None = None) -> Any:
    """Instantiate one node; targets get plain lists and dicts unless the node says otherwise."""
    if node is None:
        return None
    with _section(section):
        built = instantiate(node, _convert_=node.get("_convert_", "all"))
    if expected is not None and not isinstance(built, expected):
        raise RecipeError(
            f"{section}: {node._target_} made a {type(built).__name__}, but a lightning.{expected.__name__} is expected"
        )
    return built


def _flatten(built: Any) -> list[Any]:
    """Callbacks and loggers come one by one or as a list."""
    groups = (item if isinstance(item, (list, tuple)) else [item] for item in built if item is not None)
    return [item for group in groups for item in group]


@contextmanager
def _section(name: str) -> Iterator[None]:
    """Turn whatever a target raises into one sentence that begins with its section."""
    try:
        yield
    except Exception as error:
        cause = error.__cause__ if isinstance(error, InstantiationException) and error.__cause__ else error
        raise RecipeError(f"{name}: {one_line(cause)}") from error


def _fit(experiment: Experiment, *, debug: bool) -> int:
    trainer, exit_code = experiment.trainer, 1
    try:
        trainer.fit(experiment.module, datamodule=experiment.data, ckpt_path=experiment.resume)
        exit_code = 0
    except ODBError as error:
        _report(error, debug=debug)
        if trainer.strategy.launcher is not None:
            # The processes that Lightning started have nothing to add, and its SIGTERM handler in them would wait for
            # this one.
            trainer.strategy.launcher.kill(signal.SIGKILL)
    finally:
        os.environ.pop(_RUN_DIR_VARIABLE, None)
        finish_loggers(exit_code=exit_code)
    return exit_code


def _run_dir_of_rank_zero() -> str | None:
    """The folder rank 0 chose, in the processes Lightning starts: `${now:}` has moved on by then."""
    return os.environ.get(_RUN_DIR_VARIABLE) if _rank() > 0 else None


def _open_run_dir(run_dir: Path, recipe: str) -> None:
    """Make the folder of the run, keep the recipe in it, and tell the other ranks of this machine."""
    with _section("run.dir"):
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "config.yaml").write_text(recipe, encoding="utf-8")
    os.environ[_RUN_DIR_VARIABLE] = str(run_dir)
    print(f"Run folder: {run_dir}", flush=True)


def _report(error: Exception, *, debug: bool) -> None:
    """Print an error once: rank 0 at once, another rank only if it is still alive after a while.

    Launchers end every process when one fails. The wait lets rank 0 speak before that happens, and a rank
    that outlives it has something to say that rank 0 has not.
    """
    rank = _rank()
    if rank > 0:
        time.sleep(_GRACE_S)
    if debug:
        traceback.print_exception(type(error), error, error.__traceback__)
    print(f"[rank {rank}] error: {error}" if rank > 0 else f"error: {error}", file=sys.stderr, flush=True)


def _rank() -> int:
    """The rank that the launcher gave this process, as Lightning read it from the environment."""
    return int(getattr(rank_zero_only, "rank", 0))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise RecipeError(f"{message} (usage: {self.usage})")


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = _Parser(
        prog="train.py",
        usage=_USAGE,
        description="Train a recipe: a YAML file that names a LightningModule, its data and a Trainer.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="RECIPE", help="the recipe, a .yaml file")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error as well")
    # Overrides may stand anywhere, and `-x` among them is an option that does not exist.
    options, overrides = parser.parse_known_args(arguments)
    for argument in overrides:
        if argument.startswith("-"):
            name = argument.partition("=")[0]
            nearest = difflib.get_close_matches(name, ["--config", "--debug", "--help"], n=1)
            parser.error(f"unknown option {name}" + (f"; did you mean {nearest[0]}?" if nearest else ""))
    if options.config is None:
        parser.error("--config is required")
    options.overrides = overrides
    return options
