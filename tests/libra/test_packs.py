"""Shards of a pack: every row and every label on exactly one process, and refusals."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from odb_libra_lightning.libra.packs import home_rows, read_pack, shard_pack

IGNORED = -100


def pack_of(documents: list[int], *, padding: int = 0) -> dict[str, torch.Tensor]:
    """Tokens that are all different, so that a row tells where it comes from."""
    tokens = sum(documents)
    positions = [position for length in documents for position in range(length)]
    labels = [IGNORED if position == 0 else 100 + row for row, position in enumerate(positions)]
    return {
        "input_ids": torch.tensor([[100 + row for row in range(tokens)] + [0] * padding]),
        "labels": torch.tensor([labels + [IGNORED] * padding]),
        "position_ids": torch.tensor([positions + [0] * padding]),
        "attention_mask": torch.tensor([[1] * tokens + [0] * padding]),
    }


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 5), st.integers(0, 4))
def test_every_row_and_label_is_on_one_process(documents: list[int], processes: int, padding: int) -> None:
    batch = pack_of(documents, padding=padding)
    pack = read_pack(batch)
    assert (pack.documents, pack.tokens, pack.rows) == (
        tuple(documents),
        sum(documents),
        sum(documents) + padding,
    )
    predictions: list[tuple[int, int]] = []  # of every label that bears loss: the token before it, and the label
    rows: list[int] = []
    shares = []
    for cp_rank in range(processes):
        shard = shard_pack(batch, pack, context_parallel=processes, cp_rank=cp_rank)
        ids, labels, positions = (shard.batch[name][0].tolist() for name in ("input_ids", "labels", "position_ids"))
        assert len(ids) == len(labels) == len(positions) == shard.tokens + shard.blank_rows
        assert shard.blank_rows == (processes > 1)
        assert "attention_mask" not in shard.batch
        rows += ids[: shard.tokens]
        # As a module does that shifts labels by itself.
        found = [(ids[row], label) for row, label in enumerate(labels[1:]) if label != IGNORED]
        predictions += found
        shares.append((len(found), shard.loss_share))
        assert positions[: shard.tokens] == [
            batch["position_ids"][0, token - 100].item() for token in ids[: shard.tokens]
        ]
    assert rows == batch["input_ids"][0, : pack.tokens].tolist()
    expected = [
        (batch["input_ids"][0, row].item(), batch["labels"][0, row + 1].item())
        for row in range(pack.tokens - 1)
        if batch["labels"][0, row + 1] != IGNORED
    ]
    assert predictions == expected
    for count, share in shares:
        assert share == (processes * count / len(expected) if expected else 0.0)  # of no labels, 0 on one process too


@pytest.mark.parametrize("key", ["labels", "shift_labels"])
def test_labels_that_stand_at_their_row_stay_there(key: str) -> None:
    batch = {"input_ids": torch.arange(5)[None], key: torch.tensor([[11, 12, 13, IGNORED, 15]])}
    shards = [
        shard_pack(batch, read_pack(batch), context_parallel=2, cp_rank=cp_rank, causal_shift=False)
        for cp_rank in range(2)
    ]
    assert [shard.batch[key].tolist() for shard in shards] == [[[11, 12, IGNORED]], [[13, IGNORED, 15, IGNORED]]]
    assert [shard.loss_share for shard in shards] == [2 * 2 / 4, 2 * 2 / 4]


def test_shifted_labels_are_the_ones_that_count() -> None:
    batch = {
        "input_ids": torch.arange(4)[None],
        "labels": torch.tensor([[0, 1, 2, 3]]),
        "shift_labels": torch.tensor([[1, IGNORED, IGNORED, IGNORED]]),
    }
    shares = [shard_pack(batch, read_pack(batch), context_parallel=2, cp_rank=rank).loss_share for rank in range(2)]
    assert shares == [2.0, 0.0]


def test_nobody_knows_the_shares_of_a_pack_without_labels() -> None:
    batch = {"input_ids": torch.arange(5)[None]}
    pack = read_pack(batch)
    assert [shard_pack(batch, pack, context_parallel=2, cp_rank=rank).loss_share for rank in range(2)] == [None, None]
    assert shard_pack(batch, pack, context_parallel=1, cp_rank=0).loss_share == 1.0


def test_positions_are_added_and_other_tensors_cut_or_kept() -> None:
    batch = {
        "input_ids": torch.arange(7)[None],
        "cu_seqlens": torch.tensor([0, 3, 3, 6], dtype=torch.int32),  # an empty document, and padding behind
        "features": torch.arange(14.0).view(1, 7, 2),
        "image": torch.ones(1, 3, 4),
        "name": "first",
    }
    pack = read_pack(batch)
    assert (pack.documents, pack.tokens) == ((3, 3), 6)
    shard = shard_pack(batch, pack, context_parallel=2, cp_rank=1)
    assert shard.batch["position_ids"].tolist() == [[0, 1, 2, 2]]
    assert shard.batch["features"].tolist() == [[[6, 7], [8, 9], [10, 11], [10, 11]]]
    assert shard.batch["image"].shape == (1, 3, 4)
    assert shard.batch["name"] == "first"
    assert "cu_seqlens" not in shard.batch


def test_one_process_gets_the_pack_without_its_padding() -> None:
    batch = pack_of([2, 3], padding=4)
    shard = shard_pack(batch, read_pack(batch), context_parallel=1, cp_rank=0)
    assert {name: tensor.shape[1] for name, tensor in shard.batch.items()} == dict.fromkeys(
        ("input_ids", "labels", "position_ids"), 5
    )
    assert shard.loss_share == 1.0


@given(st.integers(1, 1000), st.integers(1, 16))
def test_homes_are_runs_one_after_another(tokens: int, processes: int) -> None:
    homes = [home_rows(tokens, processes, cp_rank) for cp_rank in range(processes)]
    assert [row for home in homes for row in home] == list(range(tokens))
    assert max(map(len, homes)) - min(map(len, homes)) <= 1


IDS = torch.arange(4)[None]


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        ([IDS], "the batch is a list: context parallelism needs a mapping"),
        ({"pixels": torch.ones(1, 4)}, r"none of input_ids, .*: its keys are \['pixels'\]"),
        ({"input_ids": torch.ones(2, 4)}, r"input_ids is \[2, 4\]: .*collate samples into one with PackingCollator"),
        ({"input_ids": torch.ones(1, 0)}, r"input_ids is \[1, 0\]: a pack has at least one token"),
        ({"input_ids": torch.ones(4)}, r"input_ids is \[4\]"),
        ({"input_ids": IDS, "attention_mask": torch.tensor([[0, 1, 1, 1]])}, "no row of 4 ones .*: pad on the right"),
        ({"input_ids": IDS, "attention_mask": torch.tensor([[1, 1, 2, 2]])}, "no row of 4 ones with zeros behind"),
        ({"input_ids": IDS, "attention_mask": torch.zeros(1, 4)}, "no row of 4 ones with zeros behind"),
        ({"input_ids": IDS, "position_ids": torch.tensor([[1, 2, 3, 4]])}, "position_ids have 1 at row 0"),
        ({"input_ids": IDS, "position_ids": torch.tensor([[0, 1, 5, 6]])}, "position_ids have 5 at row 2"),
        ({"input_ids": IDS, "position_ids": torch.zeros(3, 1, 4)}, r"position_ids are \[3, 1, 4\]"),
        ({"input_ids": IDS, "cu_seqlens": torch.tensor([0, 2, 5])}, r"cu_seqlens \[0, 2, 5\] does not rise from 0"),
        ({"input_ids": IDS, "labels": torch.tensor([3])}, r"labels are \[1\], and input_ids has 4 rows: .*\[1, 4\]"),
        ({"input_ids": IDS, "shift_labels": torch.ones(1, 3)}, r"shift_labels are \[1, 3\], and input_ids has 4 rows"),
        ({"input_ids": IDS, "cu_seqlens": torch.tensor([1, 4])}, "does not rise from 0"),
    ],
)
def test_a_batch_that_is_no_pack_is_refused(batch: object, says: str) -> None:
    with pytest.raises((TypeError, ValueError), match=says):
        read_pack(batch)
