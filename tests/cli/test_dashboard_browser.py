"""What a person sees: the dashboard of a run in Chromium.

`check_curve` takes any folder of runs, so that it can look at a real training, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import lightning as L
import numpy as np
import pytest
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from odb_libra_lightning.callbacks.panels import PANELS, DashboardPanels
from tests.cli.conftest import Training

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
CHROMIUM, CHROMEDRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.timeout(150),
    pytest.mark.skipif(
        (CHROMIUM is None or CHROMEDRIVER is None) and not os.environ.get("REQUIRE_BROWSER"),
        reason="chromium and chromedriver are not both installed, and REQUIRE_BROWSER does not ask for them",
    ),
]

SCRIPT = Path(sysconfig.get_path("scripts")) / "odb-libra"
MARK = "ODB_LIBRA_BROWSER_TEST"
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1400,1000",
]
# The charts of the Custom Scalars tab lie in nested shadow roots, which no CSS selector passes. A chart is
# found by its heading; of its lines we take the corners, and of those only lines that are on the screen.
LINES_OF_CHART = """
const find = (node, selector) => [
  ...(node.matches && node.matches(selector) ? [node] : []),
  ...[...(node.shadowRoot ? node.shadowRoot.childNodes : []), ...node.childNodes]
    .flatMap(child => find(child, selector)),
];
const card = find(document.body, "tf-custom-scalar-multi-line-chart-card")
  .find(card => find(card, "tf-card-heading").some(heading => heading.displayName === arguments[0]));
if (!card) return [];
card.scrollIntoView({block: "center"});
return find(card, "path.line")
  .filter(line => line.checkVisibility() && line.getBoundingClientRect().width > 50)
  .map(line => line.getAttribute("d").slice(1).split("L").map(corner => corner.split(",").map(Number)));
"""


class LogCurves(L.Callback):
    """Log every key of the panels at every step, as the monitors do; only one is `padding_ratio`."""

    def on_train_batch_end(self, trainer: L.Trainer, *args: object) -> None:
        step = trainer.global_step
        straight_lines = {key: float(step) for charts in PANELS.values() for key in charts.values()}
        assert trainer.logger is not None
        trainer.logger.log_metrics(
            {**straight_lines, "odb/padding_ratio": padding_ratio(step), "progress/samples": 8.0 * step}, step=step
        )


def padding_ratio(step: int) -> float:
    return 0.1 + 0.05 * float(np.sin(step / 3)) + 0.002 * step


def write_run(root: Path) -> list[float]:
    """Train 20 steps into `root/demo/<timestamp>/tensorboard`; return the padding ratios logged."""
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=20,
        limit_val_batches=0,
        logger=TensorBoardLogger(root / "demo" / "2026-01-01_12-00-00", name="", version="tensorboard"),
        callbacks=[DashboardPanels(), LogCurves()],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(BoringModel())
    return [padding_ratio(step) for step in range(1, 21)]


def check_curve(runs: Path, title: str, values: list[float], *, screenshot: Path) -> None:
    """Assert that the chart `title` draws `values`, one a step, for a run in `runs`; take a picture of it.

    The values must not be all the same, because a picture has no scale to compare them on.
    """
    with dashboard(runs) as url, browser(screenshot.parent) as page:
        page.get(url)
        deadline = time.monotonic() + 60
        lines = page.execute_script(LINES_OF_CHART, title)
        while not any(draws(line, values) for line in lines) and time.monotonic() < deadline:
            time.sleep(0.2)
            lines = page.execute_script(LINES_OF_CHART, title)
        page.save_screenshot(str(screenshot))

    assert any(draws(line, values) for line in lines), f"{title!r} draws {lines}, not {values}"


def draws(line: list[list[float]], values: list[float]) -> bool:
    """Whether a line on the screen is the curve of `values`, whatever its place and size."""
    if len(line) != len(values):
        return False
    x, y = np.array(line).T
    height = (y.max() - y) / np.ptp(y)  # on a screen y grows downwards
    return bool(
        np.all(np.diff(x) > 0) and np.allclose(height, (np.array(values) - min(values)) / np.ptp(values), atol=1e-3)
    )


@contextlib.contextmanager
def dashboard(runs: Path) -> Iterator[str]:
    # env: a pytest started in the background of a shell ignores Ctrl-C, and so would its children. `timeout`
    # ends the server even if this process is killed.
    command = ["env", "--default-signal=INT", "timeout", "--signal=KILL", "120", SCRIPT, "dashboard", runs]
    process = subprocess.Popen(
        [*command, "--port", "0", "--json", "--no-open"],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    with process.stdout as stdout:
        try:
            yield json.loads(stdout.readline())["url"]
        finally:
            process.send_signal(signal.SIGINT)
            check_ended(process)


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in [*FLAGS, f"--user-data-dir={folder / 'profile'}"]:
        options.add_argument(flag)
    service = webdriver.ChromeService(
        CHROMEDRIVER, env={**os.environ, MARK: str(folder)}, popen_kw={"start_new_session": True}
    )
    try:
        with webdriver.Chrome(options, service) as page:
            page.set_page_load_timeout(60)
            page.set_script_timeout(30)
            yield page
    finally:
        check_ended(service.process, mark=f"{MARK}={folder}")


def check_ended(leader: subprocess.Popen[str], *, mark: str | None = None) -> None:
    """Assert that a process and all it has started end, now that they were asked to; kill what does not."""
    deadline = time.monotonic() + 30
    while (left := living(leader, mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in left:
        os.kill(int(pid), signal.SIGKILL)
    leader.wait()
    assert left == {}


def living(leader: subprocess.Popen[str], mark: str | None) -> dict[str, str]:
    """Return the command line of every living process of a session, or with a variable set, by process id.

    Both, because Chromium's crash handler leaves the session, and its zygotes overwrite their environment.
    """
    leader.poll()
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            state, _parent, _group, session = (entry / "stat").read_text().rpartition(") ")[2].split()[:4]
            variables = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
            if state != "Z" and (int(session) == leader.pid or mark in variables):
                found[entry.name] = (entry / "cmdline").read_text().replace("\0", " ")
    return found


def test_the_padding_panel_shows_the_logged_curve(tmp_path: Path) -> None:
    values = write_run(tmp_path / "runs")

    check_curve(tmp_path / "runs", "Padding ratio", values, screenshot=tmp_path / "panels.png")


def test_a_real_training_shows_its_padding_ratio(quickstart: Training, tmp_path: Path) -> None:
    events = EventAccumulator(str(quickstart.folder / "tensorboard"))
    events.Reload()
    values = [event.value for event in events.Scalars("odb/padding_ratio")]
    check_curve(quickstart.folder, "Padding ratio", values, screenshot=tmp_path / "training.png")
