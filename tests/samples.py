"""Datasets and collate functions that tests share; at the top of a module, so that they pickle under spawn."""

from __future__ import annotations

from typing import Any

import torch


class Documents:
    """`size` token sequences of very unequal length; the first token tells which sample it is."""

    def __init__(self, size: int, longest: int = 400) -> None:
        self.size = size
        self.longest = longest

    def __len__(self) -> int:
        return self.size

    def length(self, index: int) -> int:
        return (index * 7919) % self.longest + 2

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < self.size:
            raise IndexError(index)
        tokens = torch.full((self.length(index),), index)
        return {"input_ids": tokens, "labels": tokens.clone()}


def pad(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Pads `input_ids` with 0 and `labels` with -100 to the longest sample: `[n, tokens]`."""
    longest = max(len(sample["input_ids"]) for sample in samples)

    def padded(name: str, value: int) -> torch.Tensor:
        return torch.stack(
            [torch.nn.functional.pad(s[name], (0, longest - len(s[name])), value=value) for s in samples]
        )

    return {"input_ids": padded("input_ids", 0), "labels": padded("labels", -100)}


def identities(batch: dict[str, Any]) -> list[int]:
    """Which samples of `Documents` a padded batch holds."""
    return [int(row[0]) for row in batch["input_ids"]]
