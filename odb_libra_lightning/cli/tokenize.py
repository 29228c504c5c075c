"""What `odb-libra tokenize` does: texts into a folder of token files, once, for training on packed documents."""

from __future__ import annotations

import hashlib
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from odb_libra_lightning.data.source_files import find_files
from odb_libra_lightning.data.text_sources import read_texts
from odb_libra_lightning.data.token_files import TokenFiles, TokenWriter
from odb_libra_lightning.data.tokenizers import TokenizerFile, train_tokenizer

# A tokenizer is trained on so much text of a file, cut into pieces of which each is read whole.
_TRAINING_CHARACTERS, _PIECE_CHARACTERS = 2_000_000, 8_000


@dataclass(frozen=True, kw_only=True)
class TokenizeOptions:
    """The options of the command, as they are written on the command line; `docs/data.md` explains them."""

    source: Path
    out: Path
    tokenizer: Path | None = None
    vocab_size: int = 4096
    pattern: str = "*.txt"
    column: str = "text"
    separator: str | None = None
    eos: bool = True
    overwrite: bool = False


def run_tokenize(options: TokenizeOptions) -> dict[str, Any]:
    """Tokenize, and write the folder.

    Returns:
        What it holds: `folder`, `documents`, `tokens`, `longest`, `dtype`, `vocab_size`, `tokenizer`, and `skipped`,
        the number of texts without anything in them.

    Raises:
        ValueError: an option that cannot be used, or a source that cannot be read; one sentence.
    """
    try:
        tokenizer = TokenizerFile(_tokenizer_path(options))
        facts = {
            "source": str(options.source),
            "tokenizer": str(tokenizer.path),
            "tokenizer_sha256": _hash(tokenizer.path),
            "end_of_text": tokenizer.end_of_text if options.eos else None,
        }
        writer = TokenWriter(options.out, vocab_size=tokenizer.vocab_size, overwrite=options.overwrite, facts=facts)
        skipped = _write(writer, tokenizer, options)
    except ModuleNotFoundError as error:
        raise ValueError(str(error)) from error
    except OSError as error:
        raise ValueError(f"{error.filename or options.out}: {error.strerror}") from error
    except ValueError as error:
        if "is there already" in str(error):
            raise ValueError(f"{options.out} is there already: name another folder, or give --overwrite") from error
        raise
    files = TokenFiles(options.out)
    return {
        "folder": str(files.folder),
        "documents": len(files),
        "tokens": files.meta["tokens"],
        "longest": int(files.lengths.max()),
        "dtype": files.meta["dtype"],
        "vocab_size": files.meta["vocab_size"],
        "tokenizer": files.meta["tokenizer"],
        "skipped": skipped,
    }


def print_results(results: dict[str, Any]) -> None:
    """A table on stdout."""
    table = Table(title="Token files", show_header=False, title_justify="left", box=None)
    for name in ("folder", "documents", "tokens", "longest", "vocab_size", "dtype", "tokenizer"):
        value = results[name]
        table.add_row(name.replace("_", " "), f"{value:,}" if isinstance(value, int) else value)
    if results["skipped"]:
        table.add_row("skipped, empty", f"{results['skipped']:,}")
    Console(soft_wrap=True).print(table)


def _write(writer: TokenWriter, tokenizer: TokenizerFile, options: TokenizeOptions) -> int:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    skipped = 0
    with writer, Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("Tokenizing", total=None)
        for document in _texts(options):
            ids = tokenizer.encode(document.text) if document.text.strip() else []
            if not options.eos:
                ids = ids[:-1]
            if ids:
                writer.add(ids)
            else:
                skipped += 1
            bar.update(task, completed=document.done, total=document.total)
    return skipped


def _texts(options: TokenizeOptions) -> Any:
    return read_texts(options.source, pattern=options.pattern, column=options.column, separator=options.separator)


def _tokenizer_path(options: TokenizeOptions) -> Path:
    if options.tokenizer is not None:
        return options.tokenizer
    if options.source.is_dir():
        return train_tokenizer(find_files(options.source, options.pattern), vocab_size=options.vocab_size)
    with tempfile.TemporaryDirectory(prefix="odb-libra-") as folder:
        files: list[Path] = []
        left = _TRAINING_CHARACTERS
        for document in _texts(options):
            text = document.text[:left]
            for at in range(0, len(text), _PIECE_CHARACTERS):
                files.append(Path(folder, f"{len(files):06d}.txt"))
                files[-1].write_text(text[at : at + _PIECE_CHARACTERS], encoding="utf-8", errors="replace")
            left -= len(text)
            if left <= 0:
                break
        if not files:
            raise ValueError(f"{options.source} holds no text")
        return train_tokenizer(files, vocab_size=options.vocab_size)


def _hash(path: Path) -> str:
    return hashlib.sha256((path / "tokenizer.json" if path.is_dir() else path).read_bytes()).hexdigest()
