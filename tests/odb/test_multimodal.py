"""Samples whose visual tokens are counted when they are loaded, some without an image, in nested batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from odb_libra_lightning import ODBLoader


class Captions:
    """A caption each; two of three have an image, resized at random, that becomes a token for every patch."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> dict[str, Any]:
        text = torch.full((5 + index % 20,), index)
        if index % 3 == 0:
            return {"text": text, "patches": None}
        side = int(torch.randint(2, 16, ()))
        return {"text": text, "patches": torch.full((side * side, 4), float(index))}


def tokens(sample: dict[str, Any]) -> int:
    return len(sample["text"]) + (0 if sample["patches"] is None else len(sample["patches"]))


@dataclass
class Images:
    patches: list[torch.Tensor]
    rows: list[int]


@dataclass
class CaptionBatch:
    labels: torch.Tensor
    images: dict[str, Images | None]


def collate(samples: list[dict[str, Any]]) -> CaptionBatch:
    labels = torch.nn.utils.rnn.pad_sequence([s["text"] for s in samples], batch_first=True, padding_value=-100)
    rows = [row for row, s in enumerate(samples) if s["patches"] is not None]
    images = Images([samples[row]["patches"] for row in rows], rows) if rows else None
    return CaptionBatch(labels, {"main": images})


def epoch(workers: int, number: int = 0) -> dict[int, int]:
    """Length of each sample in an epoch, checked against the batch that it came in."""
    loader = ODBLoader(Captions(), collate, l_max=100, buffer_size=20, num_workers=workers, length_fn=tokens)
    loader.set_epoch(number)
    lengths: dict[int, int] = {}
    without_image = 0
    for batch in loader:
        info = loader.info
        assert isinstance(batch, CaptionBatch)
        images = batch.images["main"]
        without_image += images is None
        visual = dict(zip(images.rows, map(len, images.patches), strict=True)) if images else {}
        for row, (index, length) in enumerate(zip(info.indices, info.lengths, strict=True)):
            assert int(batch.labels[row][0]) == index
            assert length == int((batch.labels[row] != -100).sum()) + visual.get(row, 0)
            assert (row in visual) == (index % 3 != 0)
            lengths[index] = length
        assert info.padded_tokens <= max(100, max(info.lengths))
        assert info.loss_tokens == int((batch.labels[:, 1:] != -100).sum())
    assert without_image > 0, "some batches have no image"
    return lengths


@pytest.mark.parametrize("workers", [0, 2])
def test_budgets_hold_for_lengths_that_are_known_at_load_time(workers: int) -> None:
    lengths = epoch(workers)
    assert sorted(lengths) == list(range(60))
    assert lengths == epoch(1), "resized alike whichever worker loads"
    assert lengths != epoch(0, number=1), "and anew in each epoch"
