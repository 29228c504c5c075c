"""The command `odb-libra`.

Every command follows one contract, kept here: results on stdout (with `--json`, one JSON object and nothing
else), notices on stderr, and on bad input one sentence on stderr with exit code 2. A command raises
`ValueError` with that sentence; any other exception is a bug and keeps its traceback.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import threading
import traceback
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager
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


@app.command(name="simulate")
def simulate_command(
    lengths: Annotated[
        str, typer.Argument(metavar="LENGTHS", help="A file of document lengths, a named mix, or a recipe (.yaml).")
    ],
    sequence_length: Annotated[str, typer.Option(help="Tokens of a packed sequence, L; 256K and 1M count.")] = "256K",
    global_batch: Annotated[int, typer.Option(help="Packed sequences of an optimizer step, GBS.")] = 128,
    data_parallel: Annotated[int, typer.Option(help="Replicas, DP.")] = 16,
    context_parallel: Annotated[int, typer.Option(help="Workers of a replica, CP.")] = 8,
    pool_size: Annotated[
        str | None, typer.Option(help="Replicas of a pool, P; several: 4,8. Default: of these those that divide DP.")
    ] = None,
    block_size: Annotated[str, typer.Option(help="Rows of a block, B; several.")] = "4K,8K",
    head_shards: Annotated[str, typer.Option(help="Shards of the query heads, H; several.")] = "2,4,8",
    chunks: Annotated[str, typer.Option(help="Slices of a tile's heads, M; several.")] = "4",
    num_heads: Annotated[int, typer.Option(help="Query heads.")] = 32,
    num_kv_heads: Annotated[int, typer.Option(help="KV heads.")] = 4,
    head_dim: Annotated[int, typer.Option(help="Elements of a head.")] = 128,
    bytes_per_element: Annotated[int, typer.Option(help="2 for bf16.")] = 2,
    window: Annotated[str | None, typer.Option(help="Keys a query sees (sliding window). Default: all.")] = None,
    packing: Annotated[str, typer.Option(help="sequential, or best_fit: documents whole.")] = "sequential",
    methods: Annotated[
        str, typer.Option(help="Methods to compare, with commas.")
    ] = "ulysses,ulysses_sorted,ring,wlb,distca,tap,tap_vrsp,libra",
    steps: Annotated[int, typer.Option(help="Optimizer steps to replay.")] = 4,
    documents: Annotated[int | None, typer.Option(help="Documents to take at most. Default: as needed.")] = None,
    column: Annotated[str | None, typer.Option(help="Field of a .jsonl or .parquet file.")] = None,
    calibration: Annotated[Path | None, typer.Option(help="Figures of the cluster, a JSON file.")] = None,
    seed: Annotated[int, typer.Option(help="Of the order of documents.")] = 0,
    scaling: Annotated[str | None, typer.Option(help="Also compare data-parallel degrees: 1,2,4,8,16.")] = None,
    linear_seconds: Annotated[
        float, typer.Option(help="For --scaling: seconds of all but attention, a token of a worker and layer.")
    ] = 0.0,
    csv: Annotated[Path | None, typer.Option(help="Write all figures to this file.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw them: a .svg or .png file.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Predict balance, communication and latency of Libra on LENGTHS, and choose a pool size."""
    from odb_libra_lightning.cli import simulate

    results = simulate.run_simulation(
        simulate.SimulateOptions(
            lengths=lengths,
            sequence_length=sequence_length,
            global_batch=global_batch,
            data_parallel=data_parallel,
            context_parallel=context_parallel,
            pool_size=pool_size,
            block_size=block_size,
            head_shards=head_shards,
            chunks=chunks,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            bytes_per_element=bytes_per_element,
            window=window,
            packing=packing,
            methods=methods,
            steps=steps,
            documents=documents,
            column=column,
            calibration=calibration,
            seed=seed,
            scaling=scaling,
            linear_seconds=linear_seconds,
            csv=csv,
            picture=picture,
        ),
        notice=lambda text: typer.echo(text, err=True),
    )
    with _stdout_that_can_be_full():
        if as_json:
            typer.echo(json.dumps(simulate.as_json(results), allow_nan=False))
        else:
            simulate.print_results(results)
            sys.stdout.flush()


@app.command(name="tokenize")
def tokenize_command(
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="A folder of text files, or a .txt, .jsonl or .parquet file.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder of token files to make.")],
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="A tokenizer.json, or a Hugging Face tokenizer's folder. Default: one trained on SOURCE."),
    ] = None,
    vocab_size: Annotated[int, typer.Option(help="Tokens of a tokenizer that is trained.")] = 4096,
    pattern: Annotated[str, typer.Option(help="Files of a folder to take.")] = "*.txt",
    column: Annotated[str, typer.Option(help="Field of a .jsonl or .parquet file that holds the text.")] = "text",
    separator: Annotated[
        str | None, typer.Option(help="Line between the documents of a .txt file. Default: the file is one document.")
    ] = None,
    eos: Annotated[bool, typer.Option("--eos/--no-eos", help="End each document with the end-of-text token.")] = True,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace token files that OUT holds.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Turn the texts of SOURCE into token files in OUT, for training on packed documents."""
    from odb_libra_lightning.cli import tokenize

    results = tokenize.run_tokenize(
        tokenize.TokenizeOptions(
            source=source,
            out=out,
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            pattern=pattern,
            column=column,
            separator=separator,
            eos=eos,
            overwrite=overwrite,
        )
    )
    with _stdout_that_can_be_full():
        if as_json:
            typer.echo(json.dumps(results))
        else:
            tokenize.print_results(results)
            sys.stdout.flush()


@contextmanager
def _stdout_that_can_be_full() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno == errno.EPIPE:  # who reads has gone, which Click knows
            raise
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115  # what is left would be written, and fail, at exit again
        raise ValueError(f"the results cannot be written to stdout: {error.strerror}") from error


def _has_display() -> bool:
    return sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


if __name__ == "__main__":
    app()
