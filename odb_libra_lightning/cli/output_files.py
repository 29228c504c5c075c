"""Files that a command writes: refused before the work where that can be known, and never left half-written."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path


def check_outputs(outputs: Mapping[str, Path | None], *, inputs: Mapping[str, Path | None]) -> None:
    """Check that files can be written and are neither each other nor one that is read.

    Args:
        outputs: path of each option that names a file to write; None: not asked for.
        inputs: path of each argument or option that names a file to read.

    Raises:
        ValueError: one that cannot be written, or that would replace another; the sentence names its option.
    """
    taken = {name: path for name, path in inputs.items() if path is not None}
    for option, path in outputs.items():
        if path is None:
            continue
        try:
            _check_one(path, option)
            twin = next((name for name, other in taken.items() if _same(path, other)), None)
        except OSError as error:
            raise ValueError(f"{option} {path}: cannot be written ({error.strerror})") from error
        if twin is not None:
            raise ValueError(f"{option} {path}: this is the file of {twin}; name another")
        taken[option] = path


def write_whole(path: Path, write: Callable[[Path], object], *, option: str) -> None:
    """Write a file beside the one asked for and rename it: the old content stays until the new is whole.

    Args:
        path: the file.
        write: called with the path to write to, which has the same ending.
        option: that named the file, for the error.

    Raises:
        ValueError: it cannot be written.
    """
    beside = _beside(path)
    try:
        try:
            write(beside)
            beside.replace(path.resolve())
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise ValueError(f"{option} {path}: cannot be written ({error.strerror or error})") from error


def _beside(path: Path) -> Path:
    """A name in the folder of the file, of a link in that of what it leads to."""
    return path.resolve().with_name(f".odb-libra-{os.getpid()}{path.suffix}")


def _check_one(path: Path, option: str) -> None:
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ValueError(f"{option} {path}: there is no folder {folder}")
    with suppress(FileNotFoundError):
        path.lstat()  # a name that is too long fails here
    if path.is_dir():
        raise ValueError(f"{option} {path}: this is a folder; name a file")
    if path.exists() and not path.is_file():
        raise ValueError(f"{option} {path}: this is a device or a pipe; name a file")
    if path.exists() and not os.access(path, os.W_OK):
        raise ValueError(f"{option} {path}: this file may not be written")
    beside = _beside(path)
    try:
        beside.touch()
    finally:
        beside.unlink(missing_ok=True)


def _same(path: Path, other: Path) -> bool:
    if path.resolve() == other.resolve():
        return True
    return path.exists() and other.exists() and path.samefile(other)
