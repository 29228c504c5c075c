"""What runs in a data worker: read one sample, learn its length, and make it ready to travel."""

from __future__ import annotations

import traceback
from typing import Any, NamedTuple

from torch.utils.data import Dataset

from odb_libra_lightning.odb.config import LoaderConfig
from odb_libra_lightning.odb.lengths import realized_length
from odb_libra_lightning.odb.wire import to_bytes


class Sample(NamedTuple):
    """A realized sample on its way to a batch.

    Attributes:
        identity: its dataset index.
        length: realized length, tokens; 0 for a sample that a policy drops.
        payload: the sample itself, as bytes; empty for a dropped one.
    """

    identity: int
    length: int
    payload: bytes

    @property
    def dropped(self) -> bool:
        """Whether a policy left the sample out."""
        return self.length == 0


class Failure(NamedTuple):
    """A sample that cannot be used: one sentence for a person, and the worker's traceback where it raised."""

    sentence: str
    traceback: str


class SampleReader(Dataset["Sample | Failure"]):
    """A map-style dataset of realized samples over the user's own.

    It returns failures instead of raising them, so that the sentence and the traceback reach every rank as
    they were written, not wrapped by each process on the way.
    """

    def __init__(self, dataset: Any, config: LoaderConfig) -> None:
        self.dataset = dataset
        self.config = config

    def __getitem__(self, index: int) -> Sample | Failure:
        """Read one sample, and apply the policies for empty and oversize ones."""
        config = self.config
        try:
            sample = self.dataset[index]
            length = int((config.length_fn or realized_length)(sample))
        except Exception as error:
            return Failure(f"sample {index}: {type(error).__name__}: {error}", traceback.format_exc())
        if length < 0:
            return Failure(f"sample {index} has a length of {length}: length_fn must return tokens, 0 or more", "")
        if length == 0:
            if config.empty == "drop":
                return Sample(index, 0, b"")
            return Failure(f"sample {index} is empty (length {length}): remove it, or pass empty='drop'", "")
        if length > config.l_max and config.oversize == "drop":
            return Sample(index, 0, b"")
        if length > config.l_max and config.oversize == "error":
            return Failure(
                f"sample {index} has {length} tokens, over l_max={config.l_max}: shorten it, raise l_max, "
                "or pass oversize='keep' or 'drop'",
                "",
            )
        try:
            return Sample(index, length, to_bytes(sample))
        except Exception as error:
            return Failure(f"sample {index} cannot be pickled: {error}", traceback.format_exc())
