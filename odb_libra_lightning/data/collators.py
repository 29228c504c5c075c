"""From a list of samples to one batch: padded, or packed end to end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

IGNORED = -100  # the label that Hugging Face's and torch's cross entropy skip


class CausalLMCollator:
    """Pad samples on the right, to the longest of them.

    Args:
        pad_token_id: id that fills `input_ids`; any valid id, since the mask hides it.
        pad_to_multiple_of: round the padded length up to a multiple of this, so that an epoch has at most
            `ceil(longest / multiple)` different padded lengths. A token budget does not see what is added,
            unless the loader's `length_fn` is this collator's `padded_length`.

    Raises:
        ValueError: an argument out of range.
    """

    def __init__(self, pad_token_id: int = 0, pad_to_multiple_of: int | None = None) -> None:
        if pad_token_id < 0:
            raise ValueError(f"pad_token_id={pad_token_id} is no token id: take 0 or above")
        if pad_to_multiple_of is not None and pad_to_multiple_of < 1:
            raise ValueError(f"pad_to_multiple_of={pad_to_multiple_of}: take at least 1, or None")
        self.pad_token_id = pad_token_id
        self.pad_to_multiple_of = pad_to_multiple_of

    def __call__(self, samples: Sequence[Mapping[str, Tensor | Sequence[int]]]) -> dict[str, Tensor]:
        """Build one batch.

        Args:
            samples: `n` samples with `input_ids` and `labels`, both int64 `[l_i]` or lists; further keys are dropped.

        Returns:
            `input_ids`, `attention_mask` (1 for a token, 0 for padding) and `labels` (-100 for padding), all
            int64 `[n, L]`, with `L` the largest `l_i`, rounded up.

        Raises:
            ValueError: no samples, a key missing, or labels of another length than the ids.
        """
        if not samples:
            raise ValueError("no samples to collate")
        checked = [checked_sample(position, sample) for position, sample in enumerate(samples)]
        lengths = torch.tensor([len(sample["input_ids"]) for sample in checked])
        extra = -int(lengths.max()) % (self.pad_to_multiple_of or 1)
        input_ids = self._pad(checked, "input_ids", self.pad_token_id, extra)
        labels = self._pad(checked, "labels", IGNORED, extra)
        attention_mask = (torch.arange(input_ids.shape[1]) < lengths[:, None]).long()
        return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}

    def padded_length(self, sample: Mapping[str, Tensor | Sequence[int]]) -> int:
        """Length of a sample rounded up as a batch's is, tokens: a `length_fn` that keeps batches within the budget.

        Take an `l_max` that is a multiple of `pad_to_multiple_of`, or samples just below it count as longer.
        """
        length = len(sample["input_ids"])
        return length + -length % (self.pad_to_multiple_of or 1)

    @staticmethod
    def _pad(samples: Sequence[Mapping[str, Tensor]], key: str, value: int, extra: int) -> Tensor:
        rows = pad_sequence([sample[key] for sample in samples], batch_first=True, padding_value=value)
        return pad(rows, (0, extra), value=value) if extra else rows


class PackingCollator:
    """Lay samples end to end in one row, for attention that keeps documents apart by their positions.

    With `ODBDataModule` under `LibraStrategy`, a batch is then one packed sequence of whole samples. A pack has no
    padding, which `pads` tells the loader.
    """

    pads = False

    def __call__(self, samples: Sequence[Mapping[str, Tensor | Sequence[int]]]) -> dict[str, Tensor]:
        """Build one pack.

        Args:
            samples: `n` samples with `input_ids` and `labels`, both int64 `[l_i]` or lists; further keys are dropped.

        Returns:
            `input_ids`; `labels`, with -100 at each sample's first token; `position_ids`, which restart at 0 with each
            sample. All int64 `[1, l_1 + ... + l_n]`.

        Raises:
            ValueError: no samples, a key missing, or labels of another length than the ids.
        """
        if not samples:
            raise ValueError("no samples to collate")
        checked = [checked_sample(position, sample) for position, sample in enumerate(samples)]
        return join_documents([(sample["input_ids"], sample["labels"]) for sample in checked])


def join_documents(documents: Iterable[tuple[Any, Any | None]]) -> dict[str, Tensor]:
    """One pack of documents.

    Args:
        documents: ids and labels of each, both `[tokens]`; labels None: the ids.

    Returns:
        `input_ids`; `labels`, -100 at the first token of each document too, so that none crosses into the next; and
        `position_ids`, which restart at 0 with each document. All int64 `[1, T]`.
    """
    given = [(np.asarray(ids), None if labels is None else np.asarray(labels)) for ids, labels in documents]
    lengths = np.array([len(ids) for ids, _ in given])
    starts = np.cumsum(lengths) - lengths
    input_ids = np.empty((1, int(lengths.sum())), np.int64)
    labels_row = np.empty_like(input_ids)
    for start, (ids, labels) in zip(starts.tolist(), given, strict=True):
        input_ids[0, start : start + len(ids)] = ids
        labels_row[0, start : start + len(ids)] = ids if labels is None else labels
    labels_row[0, starts[lengths > 0]] = IGNORED
    positions = np.arange(input_ids.shape[1]) - np.repeat(starts, lengths)
    return {
        "input_ids": torch.from_numpy(input_ids),
        "labels": torch.from_numpy(labels_row),
        "position_ids": torch.from_numpy(positions[None]),
    }


def checked_sample(position: int, sample: Mapping[str, Tensor | Sequence[int]]) -> dict[str, Tensor]:
    """Ids and labels of a sample as tensors.

    Args:
        position: of the sample in its batch, for the error.
        sample: a mapping with `input_ids` and `labels`.

    Raises:
        ValueError: a key is missing, or they are not both `[tokens]` of one length.
    """
    for key in ("input_ids", "labels"):
        if key not in sample:
            raise ValueError(f"sample {position} of the batch has no {key!r}, only {sorted(sample)}")
    # Tokenizers and datasets give lists.
    checked = {key: torch.as_tensor(sample[key]) for key in ("input_ids", "labels")}
    if checked["input_ids"].ndim != 1 or checked["input_ids"].shape != checked["labels"].shape:
        raise ValueError(
            f"sample {position} of the batch has input_ids {list(checked['input_ids'].shape)} and labels "
            f"{list(checked['labels'].shape)}: expected both [tokens], of one length"
        )
    return checked
