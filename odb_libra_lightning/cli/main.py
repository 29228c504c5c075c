"""The command `odb-libra`.

Every command follows one contract, kept here: results on stdout (with `--json`, one JSON object and nothing
else), notices on stderr, and on bad input one sentence on stderr with exit code 2. A command raises
`ValueError` with that sentence; any other exception is a bug and keeps its traceback.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
import webbrowser
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typing_extensions import override

from odb_libra_lightning import __version__

_DEBUG = "odb_libra_lightning.debug"


class OneSentenceErrors(TyperGroup):
    """A group whose commands report a `ValueError` as one sentence and exit with code 2."""

    @override
    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        try:
            return super().invoke(ctx)
        except ValueError as error:
            if ctx.meta.get(_DEBUG):
                traceback.print_exc()
            typer.echo(f"odb-libra: {error}", err=True)
            raise typer.Exit(2) from error


def _keep_traceback(ctx: typer.Context, value: bool) -> None:
    ctx.meta[_DEBUG] = value


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"odb-libra {__version__}")
        raise typer.Exit


# The options every command takes.
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Debug = Annotated[bool, typer.Option("--debug", callback=_keep_traceback, help="Show the traceback of an error.")]

# Typer's own traceback prints the values of local variables, which may be a person's data.
app = typer.Typer(cls=OneSentenceErrors, no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Batches of very unequal sample lengths on PyTorch Lightning: look at runs and compare them."""


@app.command()
def dashboard(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="One run, or a folder of many.")],
    host: Annotated[str, typer.Option(help="Address of this machine to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; where it is taken, the next free one. 0: any.")] = 6006,
    open_browser: Annotated[
        bool | None,
        typer.Option("--open/--no-open", help="Open a browser. Default: where there is a display."),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Open TensorBoard on FOLDER with the panels laid out, until Ctrl-C."""
    # TensorBoard and Lightning take seconds to import, which `odb-libra --help` should not.
    from odb_libra_lightning.cli.dashboard import start_dashboard

    running = start_dashboard(folder, host=host, port=port)
    if port not in (0, running.port):
        typer.echo(f"Port {port} is taken; using {running.port}.", err=True)
    if as_json:
        typer.echo(json.dumps({"url": running.url, "logdir": running.logdir, "runs": running.runs}))
    else:
        typer.echo(f"{len(running.runs)} run(s) in {running.logdir}\n{running.url}\nCtrl-C to stop.")
    if open_browser is None:
        open_browser = _has_display()
    if open_browser and not webbrowser.open(running.url):
        typer.echo(f"No browser could be opened; open {running.url} in one.", err=True)
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        # The server is a daemon thread of this process and has no children: it ends with the process.
        typer.echo(err=True)


def _has_display() -> bool:
    return sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
