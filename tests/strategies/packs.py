"""Packs that are hard to share out, and documents that can be told apart, for training tests."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import Dataset

from tests.strategies.dense_decoder import IGNORED, VOCABULARY, Pack


def pack(lengths: Sequence[int], *, seed: int, masked: Any = (), padding: int = 0) -> Pack:
    """One pack of documents with random tokens.

    Args:
        lengths: tokens of each document.
        seed: of the tokens.
        masked: rows whose label is masked.
        padding: rows behind the documents.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = sum(lengths)
    tokens = torch.randint(VOCABULARY, (rows + padding,), generator=generator)
    labels = tokens.clone()
    labels[list(masked)] = IGNORED
    labels[rows:] = IGNORED
    positions = torch.cat([*(torch.arange(length) for length in lengths), torch.zeros(padding, dtype=torch.long)])
    made = {"input_ids": tokens, "labels": labels, "position_ids": positions}
    if padding:
        made["attention_mask"] = (torch.arange(rows + padding) < rows).long()
    return {name: values[None] for name, values in made.items()}


def only(rows: Sequence[int], lengths: Sequence[int], *, seed: int) -> Pack:
    """A pack of which only these rows bear a label."""
    return pack(lengths, seed=seed, masked=[row for row in range(sum(lengths)) if row not in rows])


def mixed(count: int, seed: int = 0) -> list[Pack]:
    """Random documents, masked prompts, padding: as many labels in no two packs, loads far apart."""
    rng = random.Random(seed)
    packs = []
    for number in range(count):
        lengths = [rng.choice([1, 2, 3, 5, 7, 11, 19, 30]) for _ in range(rng.randint(1, 5))]
        starts = [sum(lengths[:at]) for at in range(len(lengths))]
        masked = [
            start + row
            for start, length in zip(starts, lengths, strict=True)
            for row in range(rng.choice([0, 1, length // 2, length]))
        ]
        packs.append(pack(lengths, seed=1000 * seed + number, masked=masked, padding=rng.choice([0, 0, 1, 3])))
    return packs


def edges() -> list[Pack]:
    """Labels where shards of two and of four meet, where documents meet, and in one shard alone; and none at all."""
    one, two, many = (24,), (10, 14), (1, 1, 2, 3, 5, 4, 7, 1)
    cuts = [6, 12, 18]
    return [
        only(cuts, one, seed=1),
        only([row - 1 for row in cuts], one, seed=2),
        only([10], two, seed=3),  # what the last row of a document predicts is the next document's first token
        only([0, 1, 2, 3, 6, 11, 15, 22, 23], many, seed=4),
        only(range(1, 5), one, seed=5),
        only(range(19, 24), one, seed=6),
        only([], two, seed=7),
        only([0], two, seed=8),  # which nothing predicts
    ]


def tiny() -> list[Pack]:
    """Packs and documents shorter than two or four shards are many."""
    lengths = [(1,), (3,), (2,), (1, 1, 1), (1, 1), (5,), (3, 2), (2, 1, 2, 1), (4,), (1,), (1, 3), (6, 1)]
    return [pack(each, seed=number, padding=number % 3) for number, each in enumerate(lengths)]


def uneven() -> list[Pack]:
    """A long document, then a pack of short ones, in turn: of two replicas one has all the work."""
    return [pack((60,) if n % 2 == 0 else (2,) * 6, seed=n, masked=range(n)) for n in range(8)]


def scarce() -> list[Pack]:
    """Of any two, or of any one, some have fewer rows than two replicas, or one, have workers."""
    return [pack(each, seed=10 + n) for n, each in enumerate([(2,), (1,), (1,), (1, 1), (2,), (1,), (1,), (2,)])]


PACKS = {"mixed": mixed, "edges": edges, "tiny": tiny, "uneven": uneven, "scarce": scarce}


class Listed(Dataset[Any]):
    """A dataset of packs, or of anything else."""

    def __init__(self, items: Sequence[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


def alone(items: list[Any]) -> Any:
    """Collates a list of one pack."""
    (item,) = items
    return item
