"""Tokenized documents in a folder: ids memory-mapped, written in one stream and whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import ArrayLike, NDArray

from odb_libra_lightning.data.collators import IGNORED

_FORMAT = "odb-libra token files"
_VERSION = 1
_META, _TOKENS, _OFFSETS, _MASK = "meta.json", "tokens.bin", "offsets.npy", "loss_mask.bin"
_DTYPES = ("uint16", "uint32")


class TokenFiles:
    """Documents of token ids in a folder that `TokenWriter` or `odb-libra tokenize` wrote.

    Opening reads the offsets and the description; ids are mapped into memory, and their pages read when they are used.

    Example:
        >>> files = TokenFiles("corpus-tokens")  # doctest: +SKIP
        >>> files[0], files.lengths.sum()  # doctest: +SKIP

    Args:
        folder: the folder.

    Attributes:
        folder: its absolute path.
        meta: what is known of it: `dtype`, `documents`, `tokens`, `vocab_size`, `tokenizer` and others.

    Raises:
        ValueError: it is no such folder, of another version, or truncated.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder).expanduser().resolve()
        self.meta = _read_meta(self.folder)
        documents, tokens = self.meta["documents"], self.meta["tokens"]
        self._check_size(_TOKENS, tokens * np.dtype(self.meta["dtype"]).itemsize)
        if self.meta["loss_mask"]:
            self._check_size(_MASK, tokens)
        try:
            self._offsets: NDArray[np.int64] = np.load(self.folder / _OFFSETS, allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise ValueError(f"{self.folder}: {_OFFSETS} cannot be read ({error}): tokenize again") from error
        fits = self._offsets.dtype == np.int64 and self._offsets.shape == (documents + 1,)
        if not fits or self._offsets[0] != 0 or self._offsets[-1] != tokens or (np.diff(self._offsets) < 1).any():
            raise ValueError(
                f"{self.folder}: {_OFFSETS} does not fit {documents} documents of {tokens} tokens together: the files "
                "are not of one writing; tokenize again"
            )
        self._map()

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "meta": self.meta, "_offsets": self._offsets}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._map()

    def _map(self) -> None:
        self._tokens = np.memmap(self.folder / _TOKENS, dtype=self.meta["dtype"], mode="r")
        self._mask = np.memmap(self.folder / _MASK, dtype=np.uint8, mode="r") if self.meta["loss_mask"] else None

    def __len__(self) -> int:
        """Number of documents."""
        return len(self._offsets) - 1

    def __getitem__(self, document: int) -> NDArray[Any]:
        """Token ids of a document, uint16 or uint32 `[tokens]`: a view of the file, not to be written.

        Raises:
            IndexError: no such document.
        """
        start, stop = self._rows(document)
        return self._tokens[start:stop]

    def loss_mask(self, document: int) -> NDArray[np.uint8] | None:
        """1 for each token of a document that bears loss, 0 for others: a view `[tokens]`; None: all bear loss.

        Raises:
            IndexError: no such document.
        """
        start, stop = self._rows(document)
        return None if self._mask is None else self._mask[start:stop]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each document: int64 `[documents]`."""
        return np.diff(self._offsets)

    def read(self, document: int, start: int, stop: int) -> tuple[NDArray[Any], NDArray[Any] | None]:
        """Token ids of rows `[start, stop)` of a document, and its labels; None: the ids are the labels."""
        ids, mask = self[document][start:stop], self.loss_mask(document)
        return ids, None if mask is None else np.where(mask[start:stop] != 0, ids.astype(np.int64), IGNORED)

    def loss_tokens(
        self, document: NDArray[np.int64], start: NDArray[np.int64], length: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Labels that bear loss in each of many pieces: all tokens but the first, less those that are masked.

        Args:
            document: document of each piece, int64 `[pieces]`.
            start: its first row in the document.
            length: its rows.
        """
        if self._mask is None:
            return length - 1
        first = (self._offsets[document] + start).tolist()
        return np.array(
            [np.count_nonzero(self._mask[at + 1 : at + n]) for at, n in zip(first, length.tolist(), strict=True)],
            np.int64,
        )

    def _rows(self, document: int) -> tuple[int, int]:
        if not 0 <= document < len(self):
            raise IndexError(f"document {document}: there are {len(self)}, counted from 0")
        return int(self._offsets[document]), int(self._offsets[document + 1])

    def _check_size(self, name: str, size: int) -> None:
        path = self.folder / name
        found = path.stat().st_size if path.is_file() else -1
        if found != size:
            what = "is missing" if found < 0 else f"has {found} bytes, and {size} were written"
            raise ValueError(f"{self.folder}: {name} {what}: copy the folder again, or tokenize again")


class TokenWriter:
    """Writes a folder of token files, document by document, in constant memory but for 8 bytes a document.

    It writes beside the folder, and renames at the end: the folder appears whole, or, if the `with` block raises or the
    process dies, not at all.

    Example:
        >>> with TokenWriter("corpus-tokens", vocab_size=4096) as writer:  # doctest: +SKIP
        ...     writer.add([17, 4, 250, 0])

    Args:
        folder: the folder to make.
        vocab_size: number of token ids; up to 65,536 they are stored as uint16, above as uint32.
        loss_mask: whether documents come with masks of the tokens that bear loss.
        overwrite: replace a folder of token files that is there.
        facts: what else to say in its description, such as the tokenizer; plain JSON values.

    Raises:
        ValueError: the folder is there already, or cannot be made.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        vocab_size: int,
        loss_mask: bool = False,
        overwrite: bool = False,
        facts: dict[str, Any] | None = None,
    ) -> None:
        if not 1 <= vocab_size <= 2**32:
            raise ValueError(f"vocab_size={vocab_size}: token ids are stored in 32 bits at the most")
        self.folder = Path(folder).expanduser().resolve()
        self._vocab_size = vocab_size
        self._dtype = np.dtype("<u2" if vocab_size <= 2**16 else "<u4")
        self._facts = facts or {}
        self._overwrite = overwrite
        self._offsets = [0]
        if self.folder.exists():
            if not overwrite:
                raise ValueError(f"{self.folder} is there already: name another folder, or overwrite it")
            _read_meta(self.folder)  # nothing else than token files is ever replaced
        try:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            self._beside = Path(tempfile.mkdtemp(prefix=f".{self.folder.name}-", dir=self.folder.parent))
            self._tokens: BinaryIO = (self._beside / _TOKENS).open("wb")
            self._mask: BinaryIO | None = (self._beside / _MASK).open("wb") if loss_mask else None
        except OSError as error:
            raise ValueError(f"{self.folder}: cannot be written ({error.strerror})") from error

    def add(self, ids: Sequence[int] | ArrayLike, *, loss_mask: Sequence[int] | ArrayLike | None = None) -> None:
        """Append a document.

        Args:
            ids: its token ids `[tokens]`, at least one, each below `vocab_size`.
            loss_mask: whether each token bears loss, `[tokens]`; None: all do.

        Raises:
            ValueError: no ids, one out of range, or a mask that does not fit.
        """
        number = len(self._offsets) - 1
        array = np.asarray(ids)
        if array.ndim != 1 or not array.size or array.dtype.kind not in "iu":
            raise ValueError(f"document {number}: expected token ids [tokens], got {array.dtype} {list(array.shape)}")
        if array.min() < 0 or array.max() >= self._vocab_size:
            wrong = int(array.min() if array.min() < 0 else array.max())
            raise ValueError(f"document {number}: token id {wrong} is not below vocab_size={self._vocab_size}")
        if self._mask is None:
            if loss_mask is not None:
                raise ValueError(f"document {number} has a loss mask, and the files have none: pass loss_mask=True")
        else:
            bears = np.ones(array.size, np.uint8) if loss_mask is None else np.asarray(loss_mask).astype(bool)
            if bears.shape != array.shape:
                raise ValueError(f"document {number}: a mask of {bears.size} for {array.size} tokens")
            self._mask.write(bears.astype(np.uint8).tobytes())
        self._tokens.write(array.astype(self._dtype).tobytes())
        self._offsets.append(self._offsets[-1] + array.size)

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            for file in (self._tokens, self._mask):
                if file is not None:
                    file.flush()
                    os.fsync(file.fileno())
                    file.close()
            if kind is None:
                self._finish()
        finally:
            shutil.rmtree(self._beside, ignore_errors=True)

    def _finish(self) -> None:
        if len(self._offsets) == 1:
            raise ValueError(f"{self.folder}: no document was written")
        np.save(self._beside / _OFFSETS, np.array(self._offsets, np.int64))
        meta = {
            "format": _FORMAT,
            "version": _VERSION,
            "dtype": self._dtype.name,
            "documents": len(self._offsets) - 1,
            "tokens": self._offsets[-1],
            "vocab_size": self._vocab_size,
            "loss_mask": self._mask is not None,
            **self._facts,
        }
        (self._beside / _META).write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
        self._beside.chmod(0o777 & ~_umask())
        if self._overwrite and self.folder.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{self.folder.name}-", dir=self.folder.parent))
            self.folder.rename(old / "old")
            self._beside.rename(self.folder)
            shutil.rmtree(old, ignore_errors=True)
        else:
            self._beside.rename(self.folder)


def _read_meta(folder: Path) -> dict[str, Any]:
    path = folder / _META
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; odb-libra tokenize makes folders of token files")
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{folder} is no folder of token files: {_META} is missing or no JSON; odb-libra tokenize makes them"
        ) from error
    if not isinstance(meta, dict) or meta.get("format") != _FORMAT:
        raise ValueError(f"{folder} is no folder of token files: its {_META} is of something else")
    if meta.get("version") != _VERSION:
        raise ValueError(f"{folder} is of version {meta.get('version')}, and this package reads {_VERSION}")
    counts = [meta.get(name) for name in ("documents", "tokens")]
    if meta.get("dtype") not in _DTYPES or not all(type(n) is int and n > 0 for n in counts) or "loss_mask" not in meta:
        raise ValueError(f"{folder}: {_META} has been changed: tokenize again")
    return meta


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
