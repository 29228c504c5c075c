"""Documents whose every token tells where it is from, for tests of packing."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

LONGEST = 100


class Numbered:
    """`size` documents of unequal lengths; token `row` of document `d` has the id `d * LONGEST + row`."""

    def __init__(self, size: int, *, masked: bool = False) -> None:
        self.size = size
        self.masked = masked

    def __len__(self) -> int:
        return self.size

    def length(self, number: int) -> int:
        return (number * 7919) % 61 + 1

    def __getitem__(self, number: int) -> Any:
        if not 0 <= number < self.size:
            raise IndexError(number)
        ids = torch.arange(self.length(number)) + number * LONGEST
        if not self.masked:
            return ids
        return {"input_ids": ids, "labels": torch.where(ids % 3 == number % 3, -100, ids)}

    def tokens(self) -> list[int]:
        """All ids."""
        return [number * LONGEST + row for number in range(self.size) for row in range(self.length(number))]


class SmallIds(Numbered):
    """The same lengths, with ids that fit the vocabulary of the models in tests."""

    def __getitem__(self, number: int) -> Any:
        item = super().__getitem__(number)
        if isinstance(item, dict):
            return {
                "input_ids": item["input_ids"] % 499,
                "labels": item["labels"].where(item["labels"] < 0, item["labels"] % 499),
            }
        return item % 499


def documents_of(batch: dict[str, torch.Tensor]) -> list[np.ndarray[Any, Any]]:
    """Ids of each piece of a pack, told apart by its positions."""
    ids, positions = batch["input_ids"][0].numpy(), batch["position_ids"][0].numpy()
    return np.split(ids, np.flatnonzero(positions == 0)[1:])
