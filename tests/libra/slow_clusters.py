"""Clusters on which only one thing costs anything, so that a latency is a sum done by hand."""

from __future__ import annotations

import dataclasses

from odb_libra_lightning.libra.calibration import Calibration

NOTHING = 1e-30  # a cost that vanishes beside any other
WITHOUT_END = 1e30

# One FLOP a second, nothing else costs anything.
SLOW_KERNEL = Calibration(
    source="test",
    peak_flops=1.0,
    efficiency_rows=(1,),
    efficiency_heads=(1,),
    efficiency=((1.0,),),
    backward_ratio=2.5,
    launch_seconds=NOTHING,
    workers_per_node=8,
    intra_node_alpha=NOTHING,
    intra_node_beta=WITHOUT_END,
    inter_node_alpha=NOTHING,
    inter_node_beta=WITHOUT_END,
)
# One byte a second within a node and a tenth of one across, nothing else costs anything.
SLOW_LINKS = dataclasses.replace(
    SLOW_KERNEL, peak_flops=WITHOUT_END, workers_per_node=4, intra_node_beta=1.0, inter_node_beta=0.1
)
