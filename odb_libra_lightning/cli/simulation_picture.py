"""A simulation as one picture: latency by method; communication and imbalance by pool size. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from odb_libra_lightning.libra.choice import at_choice
from odb_libra_lightning.libra.simulation_results import Choice, GridPoint, MethodFigures, Simulation

_BLUE, _ORANGE, _GREEN, _GREY = "#1f6fb4", "#e07b1a", "#3a923a", "#9aa5b1"


def draw_simulation(found: Simulation, choice: Choice | None, path: Path) -> None:
    """Write a picture; the ending of its name, `.svg` or `.png`, says the format."""
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    methods, pools = figure.subplots(1, 2)
    rows = at_choice(found, choice)
    for offset, colour, label, values in (
        (-0.2, _BLUE, "mean micro-step", [one.mean_latency * 1e3 for one in rows]),
        (0.2, _GREY, "worst micro-step", [one.worst_latency * 1e3 for one in rows]),
    ):
        bars = methods.bar([at + offset for at in range(len(rows))], values, 0.4, color=colour, label=label)
        methods.bar_label(bars, fmt="%.3g", fontsize=7)
    methods.set_xticks(range(len(rows)), [one.method for one in rows], rotation=20)
    methods.set_ylabel("predicted straggler latency, ms a layer")
    methods.set_title("Forward and backward attention")
    methods.legend(frameon=False)
    methods.spines[["top", "right"]].set_visible(False)

    sweep = _by_pool_size(found, choice)
    imbalance = pools.twinx()
    if sweep:
        sizes = [str(point.pool_size) for point, _ in sweep]
        figures = [one for _, one in sweep]
        moved = [one.bytes_moved / 2**30 for one in figures]
        inter, intra = ([getattr(one, name) for one in figures] for name in _IMBALANCES)
        pools.bar(sizes, moved, 0.5, color=_GREY, label="moved in forward (left)")
        imbalance.plot(sizes, inter, "o-", color=_ORANGE, label="between pools (right)")
        imbalance.plot(sizes, intra, "s-", color=_GREEN, label="within a pool, worst (right)")
        point = sweep[0][0]
        pools.set_title(f"Libra at H={point.head_shards}, B={point.block_size}")
        handles, labels = pools.get_legend_handles_labels()
        more, words = imbalance.get_legend_handles_labels()
        pools.set_ylim(0, 1.35 * max([*moved, 1e-9]))  # room for the legend
        imbalance.set_ylim(0, 1.35 * max([*inter, *intra, 0.01]))
        pools.legend(handles + more, labels + words, frameon=False, fontsize=8, ncols=2, loc="upper center")
    pools.set_xlabel("pool size P, replicas")
    pools.set_ylabel("communication, GiB a micro-step and layer")
    imbalance.set_ylabel("imbalance of attention work over the mean")
    imbalance.yaxis.set_major_formatter(PercentFormatter(1.0))
    for axes in (pools, imbalance):
        axes.spines["top"].set_visible(False)
    figure.savefig(path, dpi=150)


_IMBALANCES = ("inter_pool_imbalance", "worst_intra_pool_imbalance")


def _by_pool_size(found: Simulation, choice: Choice | None) -> list[tuple[GridPoint, MethodFigures]]:
    """Libra's figures at the chosen H, B and M, by pool size."""
    if choice is None:
        return []
    chosen = choice.point
    swept = [
        (one.point, one)
        for one in found.figures
        if one.method == "libra"
        and one.point is not None
        and (one.point.head_shards, one.point.block_size, one.point.chunks)
        == (chosen.head_shards, chosen.block_size, chosen.chunks)
    ]
    return sorted(swept, key=lambda pair: pair[0].pool_size)
