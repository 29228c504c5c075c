"""TensorBoard on a folder of runs, with the panels of this package laid out."""

from __future__ import annotations

import errno
import json
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensorboard import default, program
from tensorboard.backend.event_processing.io_wrapper import GetLogdirSubdirectories
from tensorboard.plugins.custom_scalar.custom_scalars_plugin import CustomScalarsPlugin
from typing_extensions import override

from odb_libra_lightning.callbacks.panels import PANELS

_PORTS_TRIED = 100


class DashboardError(ValueError):
    """The dashboard cannot be shown as asked; the message says what to change."""


@dataclass(frozen=True, kw_only=True)
class Dashboard:
    """A dashboard that is being served.

    Attributes:
        url: The page with the panels.
        port: The port it listens on.
        logdir: Absolute path of the folder shown.
        runs: Names of the runs at the start, relative to `logdir`; `"."` is the folder itself.
    """

    url: str
    port: int
    logdir: str
    runs: list[str]


class PanelsPlugin(CustomScalarsPlugin):  # type: ignore[misc]
    """TensorBoard's Custom Scalars tab with our panels first, whether or not a run has logged a layout."""

    @override
    def is_active(self) -> bool:
        return True

    @override
    def layout_impl(self, ctx: Any, experiment: str) -> dict[str, Any]:
        # {} where no run has logged a layout, JSON text where one has.
        logged = super().layout_impl(ctx, experiment) or "{}"
        return {"category": _with_panels(json.loads(logged).get("category", []))}


def find_runs(folder: Path) -> list[str]:
    """Return the names that TensorBoard gives to the runs under a folder.

    Args:
        folder: One run, or a root with many at any depth.

    Returns:
        Sorted paths relative to `folder` of the directories that hold event files.

    Raises:
        DashboardError: If `folder` is no readable folder, or holds no event files.
    """
    if not folder.is_dir():
        raise DashboardError(f"There is no folder {str(folder)!r}; give the folder that training wrote to.")
    try:
        # TensorBoard's own search, so that this list is what the page shows.
        runs = sorted(os.path.relpath(run, folder) for run in GetLogdirSubdirectories(str(folder)))
    except OSError as error:
        raise DashboardError(
            f"{error.filename!r} cannot be read ({error.strerror}); change its permissions."
        ) from error
    if not runs:
        raise DashboardError(
            f"There are no TensorBoard event files under {str(folder)!r}; give the folder of a run that logs "
            "with TensorBoardLogger."
        )
    return runs


def find_port(host: str, port: int) -> int:
    """Return the first port from `port` on that can be listened on.

    Args:
        host: An address of this machine.
        port: Where to begin; 0 leaves the choice to the operating system, and is returned.

    Raises:
        DashboardError: If the port is out of range, the host cannot be listened on, or 100 ports are taken.
    """
    if not 0 <= port <= 65535:
        raise DashboardError(f"Port {port} is out of range; choose one from 1024 to 65535, or 0 for any.")
    if not host:
        # To the operating system an empty host is every interface; nobody asks for that by leaving it empty.
        raise DashboardError("The host is empty; give 127.0.0.1, or 0.0.0.0 to listen on every interface.")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for candidate in range(port, min(port + _PORTS_TRIED, 65536)):
        try:
            # TensorBoard's web server ends the process where it cannot bind, so we try first, as it does.
            with socket.socket(family) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, candidate))
            return candidate
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise DashboardError(
                    f"Cannot listen on host {host!r}, port {candidate} ({error.strerror}); give an address "
                    "of this machine with --host and a port above 1023 with --port."
                ) from error
    raise DashboardError(f"Ports {port} to {candidate} are all taken on {host}; choose another start with --port.")


def start_dashboard(folder: Path, *, host: str = "127.0.0.1", port: int = 6006) -> Dashboard:
    """Serve TensorBoard on a folder from a daemon thread of this process.

    Args:
        folder: One run, or a root with many. Runs that appear later are shown, too.
        host: Address of this machine to listen on.
        port: Port to listen on; where it is taken, the next free one. 0: any free one.

    Returns:
        What is served, and where.

    Raises:
        DashboardError: If the folder, the host or the port will not do.
    """
    runs = find_runs(folder)
    plugins = [PanelsPlugin if plugin is CustomScalarsPlugin else plugin for plugin in default.get_plugins()]
    board = program.TensorBoard(plugins=plugins)
    # load_fast=false reads the event files in this process. The fast way starts a data server that may
    # outlive us; scalars need no such speed.
    board.configure(logdir=str(folder.resolve()), host=host, port=find_port(host, port), load_fast="false")
    try:
        url: str = board.launch()
    except program.TensorBoardServerException as error:
        raise DashboardError(f"{error.msg}; choose another port with --port.") from error
    return Dashboard(
        url=f"{url}#custom_scalars",
        port=int(url.rstrip("/").rpartition(":")[2]),
        logdir=board.flags.logdir,
        runs=runs,
    )


def _with_panels(logged: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put our panels before the charts that runs have logged themselves, and once where a run has logged ours."""
    merged: dict[str, dict[str, Any]] = {
        category: {
            "title": category,
            "chart": [{"title": title, "multiline": {"tag": [key]}} for title, key in charts.items()],
        }
        for category, charts in PANELS.items()
    }
    for category in logged:
        known = merged.setdefault(category["title"], category)
        known["chart"] += [chart for chart in category["chart"] if chart not in known["chart"]]
    return list(merged.values())
