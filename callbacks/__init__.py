"""Lightning callbacks: exact loss weighting, schedules that follow samples, and what a run shows of itself."""

from __future__ import annotations

import lightning as L

from odb_libra_lightning.callbacks.batching import PaddingMonitor, SamplesPerUpdateMonitor, StepsPerEpochMonitor
from odb_libra_lightning.callbacks.epoch_means import ExactEpochMeans
from odb_libra_lightning.callbacks.libra_monitor import LibraMonitor
from odb_libra_lightning.callbacks.loader_access import batch_info
from odb_libra_lightning.callbacks.loss_scaling import TokenLossScaling, ZeroWeightSteps
from odb_libra_lightning.callbacks.lr_schedule import SampleLRSchedule
from odb_libra_lightning.callbacks.monitor import Monitor
from odb_libra_lightning.callbacks.panels import DashboardPanels
from odb_libra_lightning.callbacks.progress_bar import SampleProgressBar
from odb_libra_lightning.callbacks.summary import RunSummary
from odb_libra_lightning.callbacks.timing import DataWaitMonitor, StragglerMonitor
from odb_libra_lightning.callbacks.token_loss import TokenLossMonitor
from odb_libra_lightning.callbacks.validation_interval import ValidateEverySamples

__all__ = [
    "DashboardPanels",
    "DataWaitMonitor",
    "ExactEpochMeans",
    "LibraMonitor",
    "Monitor",
    "PaddingMonitor",
    "RunSummary",
    "SampleLRSchedule",
    "SampleProgressBar",
    "SamplesPerUpdateMonitor",
    "StepsPerEpochMonitor",
    "StragglerMonitor",
    "TokenLossMonitor",
    "TokenLossScaling",
    "ValidateEverySamples",
    "ZeroWeightSteps",
    "batch_info",
    "monitoring",
]


def monitoring(*, progress_bar: bool = True) -> list[L.Callback]:
    """All monitors, the dashboard's panels, the closing table and the progress bar, for `Trainer(callbacks=...)`.

    Args:
        progress_bar: False leaves the bar out, as a trainer with `enable_progress_bar=False` demands.
    """
    callbacks: list[L.Callback] = [
        PaddingMonitor(),
        SamplesPerUpdateMonitor(),
        StepsPerEpochMonitor(),
        DataWaitMonitor(),
        StragglerMonitor(),
        LibraMonitor(),
        TokenLossMonitor(),
        DashboardPanels(),
    ]
    if progress_bar:
        callbacks.append(SampleProgressBar())
    return [*callbacks, RunSummary()]  # last, so that the bar is closed when it prints
