"""Texts from what people have: a folder of files, one file of text, JSON Lines, or Parquet; read in one stream."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from odb_libra_lightning.data.source_files import find_files


@dataclass(frozen=True, kw_only=True)
class Text:
    """A document.

    Attributes:
        where: where it is from, for errors.
        text: its text.
        done: how much of the source is read once it is: files of a folder, bytes or rows of a file.
        total: how much there is.
    """

    where: str
    text: str
    done: int
    total: int


def read_texts(
    source: str | Path, *, pattern: str = "*.txt", column: str = "text", separator: str | None = None
) -> Iterator[Text]:
    """Documents of a source, in its order, one at a time.

    Args:
        source: a folder, of which each file that matches is a document; a `.jsonl` file of objects with a text each;
            a `.parquet` file with a column of texts; or any other file, which is plain text.
        pattern: files of a folder to take, as in `fnmatch`; those below it too.
        column: the field or column that holds the text.
        separator: a line that ends a document of plain text and is none of it; None: the whole file is a document.

    Raises:
        ValueError: nothing of that name, or something that is not what its name says; it names the line.
        ModuleNotFoundError: a Parquet file, and pyarrow is missing.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        return _folder(path, pattern)
    if not path.is_file():
        raise ValueError(f"{source}: no such file or folder")
    if path.suffix.lower() == ".jsonl":
        return _json_lines(path, column)
    if path.suffix.lower() == ".parquet":
        return _parquet(path, column)
    return _plain(path, separator)


def _folder(folder: Path, pattern: str) -> Iterator[Text]:
    files = find_files(folder, pattern)
    for number, path in enumerate(files, 1):
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise ValueError(f"{path}: cannot be read ({error.strerror})") from error
        yield Text(where=str(path), text=text, done=number, total=len(files))


def _plain(path: Path, separator: str | None) -> Iterator[Text]:
    total, done = path.stat().st_size, 0
    if separator is None:
        yield Text(where=str(path), text=path.read_text(encoding="utf-8", errors="replace"), done=total, total=total)
        return
    lines: list[str] = []
    number = first = 1
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            done += len(raw)
            line = raw.decode("utf-8", errors="replace")
            if line.rstrip("\r\n") != separator:
                lines.append(line)
                continue
            yield Text(where=f"{path}, line {first}", text="".join(lines), done=done, total=total)
            lines, first = [], number + 1
    if lines:
        yield Text(where=f"{path}, line {first}", text="".join(lines), done=total, total=total)


def _json_lines(path: Path, column: str) -> Iterator[Text]:
    total, done = path.stat().st_size, 0
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            done += len(raw)
            if not raw.strip():
                continue
            where = f"{path}, line {number}"
            try:
                value = json.loads(raw)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{where}: not JSON ({error})") from error
            yield Text(where=where, text=_text_of(value, column, where), done=done, total=total)


def _parquet(path: Path, column: str) -> Iterator[Text]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{path}: reading Parquet needs pyarrow: pip install 'odb-libra-lightning[simulate]'"
        ) from error
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            if column not in file.schema_arrow.names:
                raise ValueError(f"{path}: no column {column!r}, only {', '.join(file.schema_arrow.names[:8])}")
            row, total = 0, file.metadata.num_rows
            for batch in file.iter_batches(batch_size=64, columns=[column]):
                for text in batch.column(0).to_pylist():
                    row += 1
                    where = f"{path}, row {row}"
                    yield Text(where=where, text=_text_of({column: text}, column, where), done=row, total=total)
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path}: not a readable Parquet file ({error})") from error


def _text_of(value: Any, column: str, where: str) -> str:
    if not isinstance(value, dict) or column not in value:
        found = f"only {', '.join(sorted(map(str, value))[:8])}" if isinstance(value, dict) else type(value).__name__
        raise ValueError(
            f"{where}: expected an object with a text {column!r}, got {found}; name its field by column (--column)"
        )
    if not isinstance(value[column], str):
        raise ValueError(f"{where}: {column!r} is of type {type(value[column]).__name__}, expected text")
    return str(value[column])
