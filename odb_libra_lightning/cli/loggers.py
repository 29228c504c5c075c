"""The loggers a recipe's `logger` section names."""

from __future__ import annotations

import os
import sys
from typing import Any, Literal

from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger

_WANDB_MODES = {
    "online": "online",
    "run": "online",
    "offline": "offline",
    "dryrun": "offline",
    "disabled": "",
}


def run_loggers(
    *,
    run_dir: str,
    name: str,
    project: str = "odb-libra-lightning",
    mode: Literal["offline", "online"] = "offline",
    wandb: bool = True,
    wandb_id: str | None = None,
    tensorboard: bool = True,
) -> list[Logger]:
    """Make the loggers of one run, all of them writing under its folder.

    Args:
        run_dir: The folder of the run; TensorBoard writes in `tensorboard/`, W&B in `wandb/`.
        name: The name of the run in W&B.
        project: The W&B project.
        mode: `offline` keeps W&B on disk and needs neither account nor network, `online` streams.
            The environment variable `WANDB_MODE` wins over it when set.
        wandb: Whether to log to Weights & Biases.
        wandb_id: The W&B run to go on with, as after `resume`; None begins a new one.
        tensorboard: Whether to log to TensorBoard.

    Raises:
        ValueError: `WANDB_MODE` holds a mode that is not known.
    """
    loggers: list[Logger] = []
    if tensorboard:
        # An empty version keeps the files in `tensorboard/` itself: the run folder is unique already.
        loggers.append(TensorBoardLogger(run_dir, name="tensorboard", version="", default_hp_metric=False))
    if wandb and (wandb_mode := _wandb_mode(mode)):
        from wandb import Settings

        # `mode` goes straight to `wandb.init`; with `offline=True` Lightning would write WANDB_MODE into the
        # environment, for every later run of this process. Capturing the console breaks up progress bars.
        settings = Settings(console="off", silent=wandb_mode == "offline")
        going_on: dict[str, Any] = {"id": wandb_id, "resume": "allow"} if wandb_id else {}
        logger = WandbLogger(
            name=name, project=project, save_dir=run_dir, mode=wandb_mode, settings=settings, **going_on
        )
        # Lightning hands over an option that W&B has retired and warns about in every run.
        vars(logger).get("_wandb_init", {}).pop("anonymous", None)
        loggers.append(logger)
    return loggers


def finish_loggers(*, exit_code: int) -> None:
    """Close the W&B run, which Lightning leaves open and the next run of the process would join."""
    wandb = sys.modules.get("wandb")
    if wandb is not None and wandb.run is not None:
        wandb.finish(exit_code=exit_code)


def _wandb_mode(mode: str) -> str:
    """The mode that holds, empty for no W&B: the only place where `WANDB_MODE` is read."""
    asked = os.environ.get("WANDB_MODE") or mode
    if asked not in _WANDB_MODES:
        raise ValueError(f"WANDB_MODE={asked} is not one of {', '.join(_WANDB_MODES)}")
    return _WANDB_MODES[asked]
