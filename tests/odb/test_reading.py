"""Lengths, labels and the wire: what is read off samples and batches of the user's own types."""

from __future__ import annotations

import dataclasses
from collections import UserDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch

from odb_libra_lightning.odb.labels import count_loss_tokens
from odb_libra_lightning.odb.lengths import realized_length
from odb_libra_lightning.odb.wire import from_bytes, to_bytes


@dataclasses.dataclass
class Record:
    input_ids: Any = None
    labels: Any = None


Pair = namedtuple("Pair", ["x", "labels"])


@pytest.mark.parametrize(
    ("sample", "length"),
    [
        ({"input_ids": [1, 2, 3]}, 3),
        ({"input_ids": torch.zeros(5)}, 5),
        ({"input_ids": torch.zeros(1, 5)}, 5),
        (UserDict(input_ids=np.zeros(4)), 4),
        (Record(input_ids=[1, 2]), 2),
        ({"length": 9, "x": None}, 9),
        (torch.zeros(7), 7),
        (torch.zeros(7, 3), 7),
        ((torch.zeros(6), 1), 6),
        ([1, 2, 3, 4], 4),
        ({"input_ids": []}, 0),
    ],
)
def test_lengths_are_read_from_the_usual_places(sample: Any, length: int) -> None:
    assert realized_length(sample) == length


@pytest.mark.parametrize("sample", [{"tokens": [1], "image": 0}, "text", 3, None, ["a", "b"], torch.tensor(3)])
def test_a_length_that_cannot_be_read_says_how_to_give_it(sample: Any) -> None:
    with pytest.raises(TypeError, match="pass length_fn"):
        realized_length(sample)


LABELS = torch.tensor([[1, -100, 3, 4], [-100, -100, -100, 8]])


@pytest.mark.parametrize(
    "batch",
    [
        {"labels": LABELS},
        UserDict(labels=LABELS),
        Record(labels=LABELS),
        Pair(x=0, labels=LABELS),
        {"text": {"labels": LABELS}, "image": None},
        ({"x": 1}, [Record(labels=LABELS)]),
        {"shift_labels": LABELS[:, 1:], "labels": torch.zeros(2, 4)},
    ],
)
def test_labels_are_found_at_any_depth_and_counted_after_the_shift(batch: Any) -> None:
    assert count_loss_tokens(batch) == 3


def test_counting_can_follow_a_loss_without_shift_or_with_another_mask() -> None:
    assert count_loss_tokens({"labels": LABELS}, causal_shift=False) == 4
    assert count_loss_tokens({"labels": LABELS}, causal_shift=False, ignore_index=8) == 7
    assert count_loss_tokens({"labels": torch.tensor([3, -100, 1])}) == 2


@pytest.mark.parametrize("batch", [torch.zeros(3), (torch.zeros(2), torch.zeros(2)), {"input_ids": 1}, "labels", None])
def test_a_batch_without_labels_has_no_count(batch: Any) -> None:
    assert count_loss_tokens(batch) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
def test_tensors_survive_the_wire_in_every_type_and_shape(dtype: torch.dtype) -> None:
    wide = torch.arange(24).reshape(2, 3, 4).to(dtype)
    for tensor in (wide, wide[:, 1], wide.permute(2, 0, 1), wide[0, 0, 0], wide[:0]):
        there = from_bytes(to_bytes({"t": tensor}))["t"]
        assert there.dtype == dtype
        assert there.shape == tensor.shape
        assert torch.equal(there, tensor)
        there.fill_(1)  # it owns writable memory


def test_structures_and_unusual_tensors_survive_the_wire() -> None:
    value = (Record([1], {"a": torch.ones(2)}), Pair(torch.nn.Parameter(torch.ones(2)), "é"), np.arange(3))
    record, pair, array = from_bytes(to_bytes(value))
    assert record.input_ids == [1]
    assert torch.equal(record.labels["a"], torch.ones(2))
    assert isinstance(pair.x, torch.nn.Parameter)
    assert array.tolist() == [0, 1, 2]
    sparse = torch.eye(3).to_sparse()
    assert torch.equal(from_bytes(to_bytes(sparse)).to_dense(), torch.eye(3))
