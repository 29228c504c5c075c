"""Lay out the dashboard of a run: which curves stand together, and over which x axis."""

from __future__ import annotations

import lightning as L
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from typing_extensions import override

from odb_libra_lightning.callbacks.timing import POOLS_SHOWN

# Category -> chart -> logged key. What batching does comes first, what it costs second, and the loss last,
# because the loss is the one curve every other dashboard shows already.
PANELS: dict[str, dict[str, str]] = {
    "Batching": {
        "Padding ratio": "odb/padding_ratio",
        "Samples per update": "odb/samples_per_update",
        "Tokens per update": "odb/tokens_per_update",
        "Steps per epoch (estimate)": "odb/steps_per_epoch",
    },
    "Waiting": {
        "Data wait fraction": "odb/data_wait_fraction",
        "Zero-weight steps": "odb/zero_weight_steps",
        "Round (ms)": "odb/round_ms",
        "Round (bytes)": "odb/round_bytes",
    },
    "Stragglers": {
        "Slowest rank (s)": "straggler/max_s",
        "Mean over ranks (s)": "straggler/mean_s",
        "Slowest over mean": "straggler/ratio",
        "Slowest of a pool (s)": "straggler/pool_max_s",
        "Slowest over mean in the worst pool": "straggler/pool_ratio",
        "Slowest over mean in each pool": "straggler/pools/",
    },
    "Libra": {
        "Busiest pool over mean, minus 1": "libra/pool_imbalance",
        "Busiest worker of a pool over mean, minus 1": "libra/tile_imbalance",
        "Moved per update (bytes a layer)": "libra/bytes_moved",
        "Planning (ms)": "libra/plan_ms",
        "Plan wait fraction": "libra/plan_wait_fraction",
    },
    "Training": {
        "Loss": "train/loss",
        "Loss of all tokens": "train/token_loss",
    },
}
SAMPLES = "progress/samples"


def custom_scalars_layout() -> dict[str, dict[str, list[object]]]:
    """Return `PANELS` in the form that `SummaryWriter.add_custom_scalars` takes.

    Returns:
        Category -> chart title -> `["Multiline", [key]]`. TensorBoard matches a key from the start of the
        logged name, so the chart of `train/loss` also draws the `train/loss_step` and `train/loss_epoch` of
        Lightning, and a key that ends in `/` stands for all that begin with it.
    """
    return {
        category: {title: ["Multiline", [key]] for title, key in charts.items()} for category, charts in PANELS.items()
    }


class DashboardPanels(L.Callback):
    """Register the panels of this package with the loggers of the trainer when a fit starts.

    TensorBoard gets the layout of its *Custom Scalars* tab; Weights & Biases gets samples seen as the x axis
    of every key in `PANELS`. Other loggers are left alone. Rank 0 does this alone.

    Example:
        >>> trainer = L.Trainer(callbacks=[DashboardPanels()], logger=False)
    """

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_custom_scalars(custom_scalars_layout())
            elif isinstance(logger, WandbLogger):
                # Names one by one, not `odb/*`: Lightning has defined `*` over trainer/global_step, and W&B
                # takes the first glob that matches, in no fixed order. A full name is preferred to any glob.
                logger.experiment.define_metric(SAMPLES)
                for charts in PANELS.values():
                    for key in charts.values():
                        for name in [f"{key}{pool}" for pool in range(POOLS_SHOWN)] if key.endswith("/") else [key]:
                            logger.experiment.define_metric(name, step_metric=SAMPLES)
