"""Evaluation packs evened out over replicas: how many, which are split, and every token once."""

from __future__ import annotations

import sys
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from odb_libra_lightning.data.packed_evaluation import even_out
from odb_libra_lightning.libra.packing import PackedSequences

Piece = tuple[int, int, int]  # document, offset, length


def packed_of(packs: list[list[Piece]], sequence_length: int = 1000) -> PackedSequences:
    pieces = np.array([piece for pack in packs for piece in pack], np.int64)
    counts = [len(pack) for pack in packs]
    return PackedSequences(
        sequence_length=sequence_length,
        document=pieces[:, 0],
        offset=pieces[:, 1],
        length=pieces[:, 2],
        cu_pieces=np.cumsum([0, *counts]),
    )


def packs_of(packed: PackedSequences) -> list[list[Piece]]:
    pieces = list(zip(packed.document.tolist(), packed.offset.tolist(), packed.length.tolist(), strict=True))
    bounds = packed.cu_pieces.tolist()
    return [pieces[first:stop] for first, stop in pairwise(bounds)]


def whole_documents(lengths: list[list[int]]) -> list[list[Piece]]:
    numbers = iter(range(10**9))
    return [[(next(numbers), 0, length) for length in pack] for pack in lengths]


def one_by_one(packs: list[list[Piece]], replicas: int) -> list[list[Piece]] | None:
    """The rule as the docstring has it, all packs looked at before each split."""
    packs = [list(pack) for pack in packs]
    while len(packs) % replicas:
        several = [pack for pack in packs if len(pack) > 1]
        if several:
            largest = max(several, key=lambda pack: sum(length for _, _, length in pack))
            halves = [largest[: len(largest) // 2], largest[len(largest) // 2 :]]
        else:
            largest = max(packs, key=lambda pack: pack[0][2])
            document, offset, length = largest[0]
            if length < 4:
                return None
            half = length // 2
            halves = [[(document, offset, half)], [(document, offset + half, length - half)]]
        at = next(i for i, pack in enumerate(packs) if pack is largest)
        packs[at : at + 1] = halves
    return packs


@given(
    lengths=st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=5), min_size=1, max_size=8),
    replicas=st.integers(1, 17),
)
def test_packs_are_those_of_one_split_after_the_other(lengths: list[list[int]], replicas: int) -> None:
    packs = whole_documents(lengths)
    expected = one_by_one(packs, replicas)
    if expected is None:
        tokens = sum(map(sum, lengths))
        with pytest.raises(ValueError, match=f"of {tokens} tokens cannot be shared out over {replicas} replicas"):
            even_out(packed_of(packs), replicas)
        return
    evened = even_out(packed_of(packs), replicas)
    assert packs_of(evened) == expected
    assert evened.sequence_length == 1000
    assert {values.dtype for values in (evened.document, evened.offset, evened.length, evened.cu_pieces)} == {
        np.dtype(np.int64)
    }


def test_splits_do_not_look_at_all_packs_again() -> None:
    """Counted in calls of functions, not timed: 400 splits of 600 packs."""
    packed = packed_of(whole_documents([[3, 5, 2, 4]] * 600))
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        evened = even_out(packed, 1000)
    finally:
        sys.setprofile(None)
    assert len(evened) == 1000
    assert calls < 10 * (600 + 400)
