"""Lengths from a file that somebody else wrote: NumPy, JSON, JSON Lines, Parquet or plain text."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from odb_libra_lightning.libra.load import checked_lengths

FIELDS = ("length", "num_tokens", "tokens", "input_ids")

_FORMATS = (
    ".npy, .json (a flat list), .jsonl (a number or an object a line), .parquet, or text with one whole number a line"
)


def read_lengths(path: str | Path, *, column: str | None = None) -> NDArray[np.int64]:
    """Lengths in the order of the file: int64 `[lengths]`, tokens, each at least 1.

    The ending of the name says the format, and nothing else is read into it:

    - `.npy`: a flat array of whole numbers, never unpickled;
    - `.json`: a flat list of whole numbers;
    - `.jsonl`: a line each, a whole number or an object with a field `length`, `num_tokens`, `tokens` or `input_ids`,
      whichever comes first in this order; a list counts its elements;
    - `.parquet`: the only column of whole numbers, or the one named; a column of lists counts their elements. Needs
      pyarrow: `pip install 'odb-libra-lightning[simulate]'`;
    - any other: text, one whole number a line, blank lines left out.

    Args:
        path: the file.
        column: the field or column to take, for `.jsonl` and `.parquet`.

    Raises:
        ValueError: no such file, one that is not what its name says, no lengths in it, or a length below 1.
        ModuleNotFoundError: a Parquet file, and pyarrow is not installed.

    Complexity: O(file); of a Parquet file only the column is read, a batch of rows at a time.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: {'a folder' if path.is_dir() else 'no such file'}; expected {_FORMATS}")
    read = _READERS.get(path.suffix.lower(), _text)
    if column is not None and read not in (_json_lines, _parquet):
        raise ValueError(f"{path}: column={column!r} is for .jsonl and .parquet; this file has no columns")
    try:
        return checked_lengths(read(path, column), where=str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read ({error}); expected {_FORMATS}") from error


def _npy(path: Path, column: str | None) -> NDArray[Any]:
    try:
        array = np.load(path, allow_pickle=False)
    except Exception as error:  # of a file that is something else NumPy raises one of many
        raise ValueError(f"{path}: not a .npy file of whole numbers ({error})") from error
    if not isinstance(array, np.ndarray):
        raise ValueError(f"{path}: an archive of arrays; expected a single array, as numpy.save writes it")
    return array


def _text(path: Path, column: str | None) -> Sequence[int]:
    lengths = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            lengths.append(int(line))
        except ValueError:
            raise ValueError(
                f"{path}, line {number}: expected a whole number, got {line.strip()[:40]!r}; other formats are told by "
                f"the ending of the name: {_FORMATS}"
            ) from None
    return lengths


def _json(path: Path, column: str | None) -> Sequence[int]:
    lengths = _parsed(path.read_text(encoding="utf-8"), where=str(path))
    if not isinstance(lengths, list):
        raise ValueError(f"{path}: expected a flat list of whole numbers, got {type(lengths).__name__}")
    for position, length in enumerate(lengths):
        if type(length) is not int:
            raise ValueError(f"{path}: expected a whole number at position {position}, got {_short(length)}")
    return lengths


def _json_lines(path: Path, column: str | None) -> Sequence[int]:
    lengths = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            value = _parsed(line, where=where)
            if isinstance(value, dict):
                name = next((field for field in ((column,) if column else FIELDS) if field in value), None)
                if name is None:
                    raise ValueError(
                        f"{where}: no field {column or ', '.join(FIELDS)}, only {_short(sorted(value))}; name one with "
                        "column"
                    )
                where, value = f"{where}, field {name}", value[name]
                value = len(value) if isinstance(value, list) else value
            if type(value) is not int:
                raise ValueError(f"{where}: expected a whole number, or an object with one, got {_short(value)}")
            lengths.append(value)
    return lengths


def _parsed(text: str, *, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON ({error})") from error


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:60]}..."


def _parquet(path: Path, column: str | None) -> NDArray[Any]:
    try:
        import pyarrow
        import pyarrow.compute
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{path}: reading Parquet needs pyarrow: pip install 'odb-libra-lightning[simulate]'"
        ) from error
    types = pyarrow.types
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            schema = file.schema_arrow
            whole = [field.name for field in schema if types.is_integer(field.type)]
            if column is None and len(whole) != 1:
                raise ValueError(
                    f"{path}: {len(whole)} columns of whole numbers among {_short(schema.names)}; name one with column"
                )
            name = whole[0] if column is None else column
            if name not in schema.names:
                raise ValueError(f"{path}: no column {name!r}, only {_short(schema.names)}")
            kind = schema.field(name).type
            counted = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
            if not (counted or types.is_integer(kind)):
                raise ValueError(f"{path}: column {name!r} holds {kind}; expected whole numbers or lists")
            parts = []
            for batch in file.iter_batches(columns=[name]):
                values = pyarrow.compute.list_value_length(batch.column(0)) if counted else batch.column(0)
                if values.null_count:
                    raise ValueError(f"{path}: column {name!r} has {values.null_count} rows without a value")
                parts.append(values.to_numpy(zero_copy_only=False))
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path}: not a readable Parquet file ({error})") from error
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


_READERS: Mapping[str, Callable[[Path, str | None], ArrayLike]] = MappingProxyType(
    {".npy": _npy, ".json": _json, ".jsonl": _json_lines, ".parquet": _parquet}
)
