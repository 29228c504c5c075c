"""Padded batches against a naive reference."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from odb_libra_lightning.data.collators import CausalLMCollator, PackingCollator
from odb_libra_lightning.data.length_mixes import length_mix
from odb_libra_lightning.odb import group_by_budget


def samples_of(lengths: list[int]) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(sum(lengths))
    made = []
    for length in lengths:
        ids = torch.randint(0, 50, (length,), generator=generator)
        made.append({"input_ids": ids, "labels": torch.where(ids > 25, ids, -100)})
    return made


def naive(samples: list[dict[str, torch.Tensor]], pad: int, multiple: int) -> dict[str, list[list[int]]]:
    longest = max(len(sample["input_ids"]) for sample in samples)
    while longest % multiple:
        longest += 1
    rows: dict[str, list[list[int]]] = {"input_ids": [], "attention_mask": [], "labels": []}
    for sample in samples:
        ids, labels = sample["input_ids"].tolist(), sample["labels"].tolist()
        fill = longest - len(ids)
        rows["input_ids"].append(ids + [pad] * fill)
        rows["attention_mask"].append([1] * len(ids) + [0] * fill)
        rows["labels"].append(labels + [-100] * fill)
    return rows


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=8),
    pad=st.integers(0, 9),
    multiple=st.sampled_from([None, 1, 8, 64]),
)
def test_equals_a_naive_padding(lengths: list[int], pad: int, multiple: int | None) -> None:
    samples = samples_of(lengths)
    batch = CausalLMCollator(pad, pad_to_multiple_of=multiple)(samples)
    assert {key: value.tolist() for key, value in batch.items()} == naive(samples, pad, multiple or 1)
    assert all(value.dtype == torch.int64 for value in batch.values())


def test_the_batch_does_not_share_memory_with_its_samples() -> None:
    (sample,) = samples_of([4])
    batch = CausalLMCollator()([sample])
    batch["input_ids"].zero_()
    batch["labels"].zero_()
    assert (sample["input_ids"].tolist(), sample["labels"].tolist()) == (
        samples_of([4])[0]["input_ids"].tolist(),
        samples_of([4])[0]["labels"].tolist(),
    )


def test_bad_samples_are_named() -> None:
    good, collate = samples_of([3])[0], CausalLMCollator()
    with pytest.raises(ValueError, match="no samples to collate"):
        collate([])
    with pytest.raises(ValueError, match=r"sample 1 of the batch has no 'labels', only \['input_ids'\]"):
        collate([good, {"input_ids": good["input_ids"]}])
    with pytest.raises(ValueError, match=r"sample 0 of the batch has no 'input_ids', only \['labels', 'text'\]"):
        collate([{"text": good["labels"], "labels": good["labels"]}])
    with pytest.raises(ValueError, match=r"sample 1 .* input_ids \[3\] and labels \[2\]: expected both \[tokens\]"):
        collate([good, {"input_ids": good["input_ids"], "labels": good["labels"][:2]}])
    with pytest.raises(ValueError, match=r"sample 0 .* input_ids \[1, 3\]"):
        collate([{key: value[None] for key, value in good.items()}])


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="pad_token_id=-1 is no token id"):
        CausalLMCollator(-1)
    with pytest.raises(ValueError, match="pad_to_multiple_of=0: take at least 1"):
        CausalLMCollator(pad_to_multiple_of=0)


L_MAX = 512  # tokens; the mixes' lengths are divided by 16 here, and cut at this


def epoch_of(mix: str, counted_as: CausalLMCollator) -> list[list[dict[str, torch.Tensor]]]:
    """Groups of one buffer, of a mix in which every sample fits the budget, by the lengths that a collator counts."""
    samples = samples_of([min(max(int(length) // 16, 1), L_MAX) for length in length_mix(mix, 600, seed=1)])
    groups, tail = group_by_budget([counted_as.padded_length(sample) for sample in samples], L_MAX)
    return [[samples[i] for i in group] for group in [*groups, tail] if group]


@pytest.mark.parametrize("mix", ["sharegpt4o", "mm-mix"])
@pytest.mark.parametrize("multiple", [64, 100])
def test_an_epoch_has_a_bounded_number_of_padded_lengths(mix: str, multiple: int) -> None:
    epoch = epoch_of(mix, counted_as=CausalLMCollator())
    rounded = {CausalLMCollator(pad_to_multiple_of=multiple)(group)["labels"].shape[1] for group in epoch}
    exact = {CausalLMCollator()(group)["labels"].shape[1] for group in epoch}
    assert rounded <= set(range(multiple, L_MAX + multiple, multiple))
    assert len(rounded) <= math.ceil(L_MAX / multiple) < len(exact)


@pytest.mark.parametrize("mix", ["sharegpt4o", "mm-mix"])
def test_counting_padded_lengths_keeps_rounded_batches_within_the_budget(mix: str) -> None:
    collate = CausalLMCollator(pad_to_multiple_of=64)
    unaware = [collate(group)["labels"].numel() for group in epoch_of(mix, counted_as=CausalLMCollator())]
    aware = [collate(group)["labels"].numel() for group in epoch_of(mix, counted_as=collate)]
    assert max(unaware) > L_MAX
    assert max(aware) <= L_MAX


@given(st.integers(0, 300), st.sampled_from([None, 1, 8, 64]))
def test_padded_length_is_the_width_of_a_batch_of_one(length: int, multiple: int | None) -> None:
    collate = CausalLMCollator(pad_to_multiple_of=multiple)
    (sample,) = samples_of([length])
    assert collate.padded_length(sample) == collate([sample])["input_ids"].shape[1]
    assert pickle.loads(pickle.dumps(collate.padded_length))(sample) == collate.padded_length(sample)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=8))
def test_a_pack_holds_the_samples_end_to_end(lengths: list[int]) -> None:
    samples = samples_of(lengths)
    pack = PackingCollator()(samples)
    ids, labels, positions = [], [], []
    for sample in samples:  # one by one, as a person would write it
        ids += sample["input_ids"].tolist()
        labels += [-100, *sample["labels"].tolist()[1:]]
        positions += range(len(sample["input_ids"]))
    assert {name: tensor.tolist() for name, tensor in pack.items()} == {
        "input_ids": [ids],
        "labels": [labels],
        "position_ids": [positions],
    }


def test_a_pack_refuses_what_a_padded_batch_does() -> None:
    with pytest.raises(ValueError, match="no samples"):
        PackingCollator()([])
    with pytest.raises(ValueError, match="sample 1 of the batch has no 'labels'"):
        PackingCollator()([{"input_ids": [1], "labels": [1]}, {"input_ids": [1]}])
