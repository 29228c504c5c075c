"""One packed sequence as a batch: ids, labels and positions of its documents, end to end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from odb_libra_lightning.data.collators import join_documents
from odb_libra_lightning.data.documents import Documents
from odb_libra_lightning.odb.errors import ODBError
from odb_libra_lightning.odb.wire import to_bytes


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """What a packed sequence is made of.

    Attributes:
        name: how to call it in an error.
        document: document of each piece: int64 `[pieces]`.
        offset: first token of each within its document.
        length: tokens of each.
    """

    name: str
    document: NDArray[np.int64]
    offset: NDArray[np.int64]
    length: NDArray[np.int64]


def stand_in_pack(length: int) -> dict[str, Tensor]:
    """A short pack for a replica without data; its loss is a number, and must be weighted by 0."""
    return join_documents([(np.zeros(length, np.int64), None)])


def unchanged(pack: Any) -> Any:
    """A pack as it was read, for a DataLoader that would convert it otherwise."""
    return pack


class PackDataset(Dataset[Any]):
    """Reads packs; its indices are `Pieces`.

    Args:
        documents: what to read from.
        stand_in_length: tokens of the pack for the index None.
        encode: give packs as bytes, for their way to other processes.
    """

    def __init__(self, documents: Documents, *, stand_in_length: int, encode: bool) -> None:
        self._documents = documents
        self._stand_in_length = stand_in_length
        self._encode = encode

    def __getitem__(self, pieces: Pieces | None) -> Any:
        """The pack of such pieces.

        Raises:
            ODBError: it cannot be read.
        """
        pack = stand_in_pack(self._stand_in_length) if pieces is None else self._read(pieces)
        return to_bytes(pack) if self._encode else pack

    def _read(self, pieces: Pieces) -> dict[str, Tensor]:
        rows = zip(pieces.document.tolist(), pieces.offset.tolist(), pieces.length.tolist(), strict=True)
        number = None
        try:
            read = []
            for number, start, length in rows:
                read.append(self._documents.read(number, start, start + length))
            return join_documents(read)
        except Exception as error:
            raise ODBError(f"{pieces.name}, document {number}: {type(error).__name__}: {error}") from error
