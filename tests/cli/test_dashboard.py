from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import webbrowser
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn
from urllib.request import urlopen

import pytest
from torch.utils.tensorboard import SummaryWriter

from odb_libra_lightning import __version__
from odb_libra_lightning.callbacks.panels import PANELS, custom_scalars_layout
from odb_libra_lightning.cli import dashboard, main

SCRIPT = Path(sysconfig.get_path("scripts")) / "odb-libra"
# A pytest started in the background of a shell ignores Ctrl-C, and so would its children.
COMMAND = ["env", "--default-signal=INT", str(SCRIPT), "dashboard"]

Run = Callable[..., tuple[int, str, str]]


def write_run(folder: Path, layout: dict[str, Any] | None = None) -> None:
    with SummaryWriter(str(folder)) as writer:
        for step in range(20):
            writer.add_scalar("odb/padding_ratio", step / 100, step)
        if layout is not None:
            writer.add_custom_scalars(layout)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A root as training leaves it: `<name>/<timestamp>/tensorboard`, with and without a layout."""
    root = tmp_path / "runs"
    write_run(root / "logged" / "0701" / "tensorboard", custom_scalars_layout())
    gradient_norm = {"Gradient norm": ["Multiline", ["grad_norm"]]}
    write_run(root / "mine" / "0702" / "tensorboard", {"Training": gradient_norm, "Mine": gradient_norm})
    write_run(root / "plain" / "0703" / "tensorboard")
    return root


@pytest.fixture
def odb_libra(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command in this process; return its exit code and what it wrote to stdout and stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as exit_:
            main.app(list(arguments), prog_name="odb-libra")
        assert isinstance(exit_.value.code, int)
        written = capsys.readouterr()
        return exit_.value.code, written.out, written.err

    return run


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def get(url: str) -> Any:
    with urlopen(url, timeout=30) as response:
        return json.load(response)


def wait_until_equal(read: Callable[[], Any], wanted: object) -> None:
    """Ask again until the answer is there: TensorBoard reads the files in the background."""
    for _ in range(600):
        if read() == wanted:
            return
        time.sleep(0.1)
    assert read() == wanted


def session_members(session: int) -> list[int]:
    members = []
    for pid in [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]:
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(pid) == session:
                members.append(pid)
    return members


def test_serves_the_panels_of_every_run_and_leaves_nothing_behind(runs: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, str(runs), "--port", "0", "--json"],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        started = json.loads(process.stdout.readline())
        names = [f"{name}/tensorboard" for name in ("logged/0701", "mine/0702", "plain/0703")]
        assert started == {"url": started["url"], "logdir": str(runs.resolve()), "runs": names}
        site = re.fullmatch(r"(http://127\.0\.0\.1:(\d+)/)#custom_scalars", started["url"])
        assert site is not None
        tab = f"{site[1]}data/plugin/custom_scalars"

        wait_until_equal(lambda: get(f"{site[1]}data/runs"), names)
        # Ours first and once, though one run has logged them; then what a run has logged of its own.
        wanted = {category: list(charts) for category, charts in PANELS.items()}
        wanted["Training"].append("Gradient norm")
        wanted["Mine"] = ["Gradient norm"]
        wait_until_equal(
            lambda: {
                category["title"]: [chart["title"] for chart in category["chart"]]
                for category in get(f"{tab}/layout")["category"]
            },
            wanted,
        )
        for name in names:
            query = f"{tab}/scalars?run={name}&tag=odb/padding_ratio"
            wait_until_equal(
                lambda query=query: {
                    tag: [step for _, step, _ in points] for tag, points in get(query)["tag_to_events"].items()
                },
                {"odb/padding_ratio": list(range(20))},
            )
        assert get(f"{site[1]}data/plugins_listing")["custom_scalars"]["enabled"]

        # No data server beside it, which could outlive it.
        assert session_members(process.pid) == [process.pid]
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=30)
        assert (process.returncode, rest) == (0, "")
        socket.create_server(("127.0.0.1", int(site[2]))).close()
    finally:
        process.kill()
        process.communicate()


def test_panels_are_there_when_no_run_logged_a_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard.CustomScalarsPlugin, "layout_impl", lambda *_: {})
    plugin = dashboard.PanelsPlugin.__new__(dashboard.PanelsPlugin)

    categories = plugin.layout_impl(None, "")["category"]

    assert plugin.is_active()
    assert {
        category["title"]: {chart["title"]: chart["multiline"]["tag"] for chart in category["chart"]}
        for category in categories
    } == {group: {title: [key] for title, key in charts.items()} for group, charts in PANELS.items()}


def test_a_single_run_is_named_as_tensorboard_names_it(runs: Path) -> None:
    assert dashboard.find_runs(runs / "plain" / "0703" / "tensorboard") == ["."]


def test_a_taken_port_moves_on_to_a_free_one(taken_port: int) -> None:
    port = dashboard.find_port("127.0.0.1", taken_port)

    assert port > taken_port
    socket.create_server(("127.0.0.1", port)).close()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["{tmp}/nowhere"], "There is no folder '{tmp}/nowhere'; give the folder that training wrote to."),
        (["{tmp}/file"], "There is no folder '{tmp}/file'; give the folder that training wrote to."),
        (
            ["{tmp}/empty"],
            "There are no TensorBoard event files under '{tmp}/empty'; give the folder of a run that logs "
            "with TensorBoardLogger.",
        ),
        (
            ["{tmp}/runs", "--port", "65536"],
            "Port 65536 is out of range; choose one from 1024 to 65535, or 0 for any.",
        ),
        (
            ["{tmp}/runs", "--port", "-1"],
            "Port -1 is out of range; choose one from 1024 to 65535, or 0 for any.",
        ),
        (
            ["{tmp}/runs", "--host", ""],
            "The host is empty; give 127.0.0.1, or 0.0.0.0 to listen on every interface.",
        ),
        (
            # 203.0.113.0/24 is set apart for documentation: no machine has such an address.
            ["{tmp}/runs", "--host", "203.0.113.1"],
            "Cannot listen on host '203.0.113.1', port 6006 (Cannot assign requested address); give an "
            "address of this machine with --host and a port above 1023 with --port.",
        ),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    runs: Path, odb_libra: Run, arguments: list[str], sentence: str
) -> None:
    tmp = runs.parent
    (tmp / "file").write_text("")
    (tmp / "empty").mkdir()

    result = odb_libra("dashboard", *(argument.format(tmp=tmp) for argument in arguments))

    assert result == (2, "", f"odb-libra: {sentence.format(tmp=tmp)}\n")


def test_a_port_that_needs_privileges_is_refused(runs: Path, odb_libra: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> NoReturn:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", refuse)

    code, out, err = odb_libra("dashboard", str(runs), "--port", "80")

    assert (code, out) == (2, "")
    assert err == (
        "odb-libra: Cannot listen on host '127.0.0.1', port 80 (Permission denied); give an address of this "
        "machine with --host and a port above 1023 with --port.\n"
    )


def test_ports_that_are_all_taken_are_refused(
    runs: Path, odb_libra: Run, taken_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dashboard, "_PORTS_TRIED", 1)

    code, out, err = odb_libra("dashboard", str(runs), "--port", str(taken_port))

    assert (code, out) == (2, "")
    assert err == (
        f"odb-libra: Ports {taken_port} to {taken_port} are all taken on 127.0.0.1; choose another start with --port.\n"
    )


def test_a_folder_that_cannot_be_read_is_refused(runs: Path, odb_libra: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> NoReturn:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(dashboard, "GetLogdirSubdirectories", refuse)

    code, out, err = odb_libra("dashboard", str(runs))

    assert (code, out) == (2, "")
    assert err == f"odb-libra: '{runs}' cannot be read (Permission denied); change its permissions.\n"


def test_debug_shows_the_traceback_and_keeps_the_exit_code(tmp_path: Path, odb_libra: Run) -> None:
    code, out, err = odb_libra("dashboard", str(tmp_path / "nowhere"), "--debug")

    assert (code, out) == (2, "")
    assert err.startswith("Traceback (most recent call last):")
    assert "DashboardError" in err
    assert err.splitlines()[-1].startswith("odb-libra: There is no folder")


def test_an_error_that_is_no_bad_input_keeps_its_traceback(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> NoReturn:
        raise KeyError("a bug")

    monkeypatch.setattr(dashboard, "start_dashboard", fail)

    with pytest.raises(KeyError, match="a bug"):
        main.app(["dashboard", str(runs)])


class InterruptedAtOnce:
    def wait(self) -> NoReturn:
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("display", "option", "opened"),
    [("", [], False), (":0", [], True), ("", ["--open"], True), (":0", ["--no-open"], False)],
)
def test_a_browser_opens_where_there_is_a_display_unless_told_otherwise(
    odb_libra: Run, monkeypatch: pytest.MonkeyPatch, display: str, option: list[str], opened: bool
) -> None:
    running = dashboard.Dashboard(url="http://there/#custom_scalars", port=6007, logdir="/runs", runs=["a"])
    seen: list[str] = []
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("DISPLAY", display)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    monkeypatch.setattr(webbrowser, "open", lambda url: seen.append(url) or True)
    monkeypatch.setattr(dashboard, "start_dashboard", lambda *_, **__: running)
    monkeypatch.setattr(main.threading, "Event", InterruptedAtOnce)

    code, out, err = odb_libra("dashboard", "runs", *option)

    assert (code, seen) == (0, [running.url] if opened else [])
    assert running.url in out.splitlines()
    assert err.splitlines()[0] == "Port 6006 is taken; using 6007."


def test_version(odb_libra: Run) -> None:
    assert odb_libra("--version") == (0, f"odb-libra {__version__}\n", "")


def test_help_names_the_command_and_does_not_wait_for_tensorboard() -> None:
    program = (
        "import sys; from odb_libra_lightning.cli.main import app; app(['--help'], standalone_mode=False);"
        "print('slow' if {'tensorboard', 'torch', 'lightning'} & set(sys.modules) else 'quick')"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, "NO_COLOR": "1"},
    )

    assert "dashboard" in result.stdout
    assert result.stdout.splitlines()[-1] == "quick"
