"""Documents to pack: their lengths, known beforehand, and their tokens, read when a packed sequence is made."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from odb_libra_lightning.data.collators import IGNORED
from odb_libra_lightning.libra.load import checked_lengths

Progress = Callable[[int, int], None]


@runtime_checkable
class Documents(Protocol):
    """What can be packed: numbered documents of known lengths. Every process reads the same from it.

    `labels` are the ids themselves, or -100 where a token bears no loss. The first token of a piece bears none either,
    since nothing before it predicts it.
    """

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each document: int64 `[documents]`."""
        ...

    def read(self, document: int, start: int, stop: int) -> tuple[NDArray[Any], NDArray[Any] | None]:
        """Token ids of rows `[start, stop)` of a document, and its labels; None: the ids are the labels."""
        ...

    def loss_tokens(
        self, document: NDArray[np.int64], start: NDArray[np.int64], length: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Labels that bear loss in each of many pieces `[start, start + length)`, all int64 `[pieces]`."""
        ...


def open_documents(source: Any, *, progress: Progress | None = None) -> Documents:
    """The documents of whatever a person gives.

    Args:
        source: `TokenFiles` or any other `Documents`; the path of a folder of token files; or a sequence of documents,
            each a flat tensor, array or list of ids, or a mapping with `input_ids` and perhaps `labels`.
        progress: called with the documents of a sequence that have been read and are to be read.

    Raises:
        ValueError: what is none of these, or has no documents.
    """
    if isinstance(source, str | os.PathLike):
        from odb_libra_lightning.data.token_files import TokenFiles

        return TokenFiles(Path(source))
    if isinstance(source, Documents):
        return source
    if not (hasattr(source, "__getitem__") and hasattr(source, "__len__")):
        raise ValueError(
            f"documents to pack are TokenFiles, the folder of some, or a sequence of token ids with __getitem__ and "
            f"__len__; got a {type(source).__name__}"
        )
    return DocumentSequence(source, progress=progress)


class DocumentSequence:
    """Documents of a map-style dataset, each read once for its length, and again when it is trained on.

    Args:
        dataset: its items are ids `[tokens]`, or mappings with `input_ids` and perhaps `labels` of one length. An item
            is the same each time it is read: what is random in it would not fit the plan.
        progress: called with the documents that have been read and are to be read.

    Raises:
        ValueError: no documents, one without tokens, or one that cannot be read as ids and labels; it names its number.
    """

    def __init__(self, dataset: Sequence[Any], *, progress: Progress | None = None) -> None:
        self._dataset = dataset
        lengths = np.empty(len(dataset), np.int64)
        self._bearing: dict[int, NDArray[np.uint8]] = {}  # bits of the tokens that bear loss, where not all do
        for number in range(len(dataset)):
            ids, labels = self._item(number)
            lengths[number] = len(ids)
            if labels is not None and not (bears := labels != IGNORED).all():
                self._bearing[number] = np.packbits(bears)
            if progress is not None:
                progress(number + 1, len(dataset))
        self._lengths = checked_lengths(lengths, where="documents")

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each document: int64 `[documents]`."""
        return self._lengths

    def read(self, document: int, start: int, stop: int) -> tuple[NDArray[Any], NDArray[Any] | None]:
        """Token ids of rows `[start, stop)` of a document, and its labels; None: the ids are the labels.

        Raises:
            ValueError: the document is not as long as it was, or other labels bear loss.
        """
        ids, labels = self._item(document)
        if len(ids) != self._lengths[document] or not self._as_before(document, labels):
            raise ValueError(
                f"document {document} has {len(ids)} tokens, and had {self._lengths[document]}, or other labels bear "
                "loss: a document that is packed must be the same each time it is read"
            )
        return ids[start:stop], None if labels is None else labels[start:stop]

    def loss_tokens(
        self, document: NDArray[np.int64], start: NDArray[np.int64], length: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Labels that bear loss in each of many pieces, see `Documents`."""
        counts = length - 1
        for at in [i for i, number in enumerate(document.tolist()) if number in self._bearing]:
            bears = np.unpackbits(self._bearing[int(document[at])], count=int(self._lengths[document[at]]))
            counts[at] = np.count_nonzero(bears[start[at] + 1 : start[at] + length[at]])
        return counts

    def _as_before(self, document: int, labels: NDArray[Any] | None) -> bool:
        bits = self._bearing.get(document)
        if bits is None:
            return labels is None or bool((labels != IGNORED).all())
        return labels is not None and np.array_equal(np.packbits(labels != IGNORED), bits)

    def _item(self, number: int) -> tuple[NDArray[Any], NDArray[Any] | None]:
        item = self._dataset[number]
        found: list[NDArray[Any] | None] = []
        for name in ("input_ids", "labels"):
            value = item.get(name) if isinstance(item, Mapping) else item if name == "input_ids" else None
            array = None if value is None else np.asarray(value)
            if array is not None and (array.ndim != 1 or array.dtype.kind not in "iu"):
                raise ValueError(
                    f"document {number}: {name} of type {array.dtype} and shape {list(array.shape)}; expected whole "
                    "numbers [tokens]"
                )
            found.append(array)
        ids, labels = found
        if ids is None:
            raise ValueError(f"document {number} has no input_ids, only {sorted(cast('Mapping[str, Any]', item))}")
        if labels is not None and len(labels) != len(ids):
            raise ValueError(f"document {number} has {len(ids)} input_ids and {len(labels)} labels")
        if not len(ids):
            raise ValueError(f"document {number} has no tokens: leave it out")
        return ids, labels
