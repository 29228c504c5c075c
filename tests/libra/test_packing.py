"""Packing against a packer that lays down one token at a time, and against the definition of best fit."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from odb_libra_lightning.libra.packing import PackedSequences, pack_best_fit, pack_sequential

LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=20)


def token_by_token(lengths: list[int], sequence_length: int) -> list[list[int]]:
    """For every sequence the documents of its tokens, in order."""
    stream = [document for document, length in enumerate(lengths) for _ in range(length)]
    return [stream[at : at + sequence_length] for at in range(0, len(stream), sequence_length)]


def tokens(packed: PackedSequences) -> list[tuple[int, int]]:
    """Document and offset of every token, in the order in which the sequences hold them."""
    return [
        (document, offset + i)
        for document, offset, length in zip(
            packed.document.tolist(), packed.offset.tolist(), packed.length.tolist(), strict=True
        )
        for i in range(length)
    ]


@given(LENGTHS, st.integers(1, 30), st.booleans())
def test_sequential_packing_is_the_stream_cut(lengths: list[int], sequence_length: int, drop_last: bool) -> None:
    packed = pack_sequential(lengths, sequence_length, drop_last=drop_last)
    expected = token_by_token(lengths, sequence_length)
    if drop_last and len(expected[-1]) < sequence_length:
        del expected[-1]
    assert packed.all_document_lengths() == [list(Counter(sequence).values()) for sequence in expected]
    assert [document for document, _ in tokens(packed)] == [document for sequence in expected for document in sequence]
    stream = [(document, i) for document, length in enumerate(lengths) for i in range(length)]
    assert tokens(packed) == stream[: sum(map(len, expected))]
    assert packed.padding == len(expected) * sequence_length - sum(map(len, expected))
    assert len(packed) == len(expected)


def test_a_document_over_three_sequences_by_hand() -> None:
    packed = pack_sequential([3, 12, 1], 5)
    assert packed.document.tolist() == [0, 1, 1, 1, 2]
    assert packed.offset.tolist() == [0, 0, 2, 7, 0]
    assert packed.length.tolist() == [3, 2, 5, 5, 1]
    assert packed.cu_pieces.tolist() == [0, 2, 3, 4, 5]
    assert packed.all_document_lengths() == [[3, 2], [5], [5], [1]]
    assert packed.document_lengths(0).tolist() == [3, 2]
    assert packed.loads() == [13, 25, 25, 1]
    assert packed.loads(window=1) == [13 - 5, 25 - 16, 25 - 16, 1]
    assert packed.padding == 4
    assert len(pack_sequential([3, 1], 5, drop_last=True)) == 0
    assert pack_sequential([3, 1], 5, drop_last=True).all_document_lengths() == []


@given(LENGTHS, st.integers(1, 30), st.booleans(), st.integers(1, 9))
def test_the_first_sequences_are_those_of_all(lengths: list[int], length: int, drop_last: bool, most: int) -> None:
    every = pack_sequential(lengths, length, drop_last=drop_last).all_document_lengths()
    assert pack_sequential(lengths, length, drop_last=drop_last, most=most).all_document_lengths() == every[:most]


def test_of_an_absurdly_long_document_only_what_is_asked_for_is_packed() -> None:
    assert pack_sequential([2**62], 8, most=2).all_document_lengths() == [[8], [8]]
    with pytest.raises(ValueError, match=f"sum to {2**62}, which is {2**59} packed sequences of 8 tokens"):
        pack_sequential([2**62], 8)
    with pytest.raises(ValueError, match="most=0"):
        pack_sequential([8], 8, most=0)


def best_fit_by_definition(lengths: list[int], sequence_length: int) -> list[list[int]]:
    """Longest first; of all sequences with room the one with least, else a new one."""
    sequences: list[list[int]] = []
    for document in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        rooms = [sequence_length - sum(lengths[i] for i in sequence) for sequence in sequences]
        fits = [(room, k) for k, room in enumerate(rooms) if room >= lengths[document]]
        if fits:
            sequences[min(fits)[1]].append(document)
        else:
            sequences.append([document])
    return sequences


@given(LENGTHS, st.integers(12, 40))
def test_best_fit_is_the_definition_and_splits_nothing(lengths: list[int], sequence_length: int) -> None:
    packed = pack_best_fit(lengths, sequence_length)
    bounds = packed.cu_pieces.tolist()
    held = [packed.document[a:b].tolist() for a, b in pairwise(bounds)]
    assert held == best_fit_by_definition(lengths, sequence_length)
    assert sorted(packed.document.tolist()) == list(range(len(lengths)))
    assert packed.length.tolist() == [lengths[i] for i in packed.document]
    assert not packed.offset.any()
    assert max(map(sum, packed.all_document_lengths())) <= sequence_length
    assert packed.padding == len(packed) * sequence_length - sum(lengths)


def test_numpy_lengths_of_a_million_documents() -> None:
    lengths = np.random.default_rng(0).integers(1, 4000, 1_000_000).astype(np.int32)
    for packed in (pack_sequential(lengths, 262_144), pack_best_fit(lengths, 262_144)):
        assert packed.length.sum() == lengths.sum(dtype=np.int64)
        assert np.array_equal(np.bincount(packed.document, weights=packed.length), lengths)
        assert packed.padding < 262_144


def test_wrong_arguments_are_named() -> None:
    for pack in (pack_sequential, pack_best_fit):
        with pytest.raises(ValueError, match="document length 0 at position 2"):
            pack([1, 2, 0], 8)
        with pytest.raises(ValueError, match="no document lengths: expected at least one"):
            pack([], 8)
        with pytest.raises(ValueError, match=r"document lengths sum to 18446744073709551616: .* 2\*\*62"):
            pack([2**62] * 4, 2**62)
        for wrong in (0, 1.5, True, "8", 2**63):
            with pytest.raises(ValueError, match=f"sequence_length={wrong!r}: expected a whole number from 1 to"):
                pack([1], wrong)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"document 1 has 9 tokens .* sequence of 8: use pack_sequential.* or a larger"
    ):
        pack_best_fit([8, 9, 10], 8)
    with pytest.raises(ValueError, match="sequence 2: there are 2"):
        pack_sequential([8, 8], 8).document_lengths(2)
