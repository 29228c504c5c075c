"""Documents into packed sequences of one length: the stream cut every `L` tokens, or whole documents by best fit."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from odb_libra_lightning.libra.load import attention_load, checked_lengths
from odb_libra_lightning.libra.whole_numbers import LARGEST_SETTING, checked_count

_MOST_TOKENS = 2**62  # of all documents together: sums stay within int64


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedSequences:
    """Which piece of which document stands where. A document that is not split is one piece.

    A piece attends to nothing outside its sequence, so it counts there as a document of its own.

    Attributes:
        sequence_length: tokens a packed sequence, `L`; what its pieces leave of them is padding.
        document: document of each piece, by position in the lengths that were packed: int64 `[pieces]`.
        offset: first token of each piece within its document: int64 `[pieces]`.
        length: tokens of each piece, at least 1: int64 `[pieces]`.
        cu_pieces: sequence `i` holds the pieces `cu_pieces[i]` to `cu_pieces[i + 1]`, in the order in which they lie:
            int64 `[sequences + 1]`.
    """

    sequence_length: int
    document: NDArray[np.int64]
    offset: NDArray[np.int64]
    length: NDArray[np.int64]
    cu_pieces: NDArray[np.int64]

    def __len__(self) -> int:
        """Number of packed sequences."""
        return len(self.cu_pieces) - 1

    def document_lengths(self, sequence: int) -> NDArray[np.int64]:
        """Lengths of the documents and pieces of documents in one sequence, in order, tokens.

        Raises:
            ValueError: no such sequence.
        """
        if not 0 <= sequence < len(self):
            raise ValueError(f"sequence {sequence}: there are {len(self)}, counted from 0")
        return self.length[self.cu_pieces[sequence] : self.cu_pieces[sequence + 1]]

    def all_document_lengths(self) -> list[list[int]]:
        """`document_lengths` of every sequence, as lists."""
        flat, bounds = self.length.tolist(), self.cu_pieces.tolist()
        return [flat[start:stop] for start, stop in pairwise(bounds)]

    def loads(self, *, window: int | None = None) -> list[int]:
        """Attention work of each sequence, see `attention_load`; padding has none."""
        return [attention_load(self.document_lengths(i), window=window) for i in range(len(self))]

    @property
    def padding(self) -> int:
        """Tokens of padding in all sequences together."""
        return len(self) * self.sequence_length - int(self.length.sum())


def pack_sequential(
    document_lengths: Sequence[int] | NDArray[np.integer],
    sequence_length: int,
    *,
    drop_last: bool = False,
    most: int | None = None,
) -> PackedSequences:
    """Documents end to end, cut every `sequence_length` tokens: only the last sequence has padding.

    A document that crosses a cut goes on in the next sequence as a piece of its own.

    Example:
        >>> pack_sequential([3, 7, 2], 5).all_document_lengths()
        [[3, 2], [5], [2]]

    Args:
        document_lengths: lengths in the order of the stream, tokens, each at least 1.
        sequence_length: tokens a packed sequence, `L`, at least 1.
        drop_last: leave out the last sequence if it is not full; what it would hold is in no sequence then.
        most: make no more sequences than so many; what they would hold is left out. None: all.

    Raises:
        ValueError: no documents, a length below 1, more than 2**62 tokens, more than 2**31 - 1 sequences, or a
            `sequence_length` or `most` that is no whole number of at least 1.

    Complexity: O(n + sequences), vectorised.
    """
    lengths = checked_lengths(document_lengths)
    sequence_length = checked_count("sequence_length", sequence_length, most=_MOST_TOKENS)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    total = int(starts[-1])
    sequences = total // sequence_length if drop_last else -(-total // sequence_length)
    if most is not None:
        sequences = min(sequences, checked_count("most", most))
    if sequences > LARGEST_SETTING:
        raise ValueError(
            f"document lengths sum to {total}, which is {sequences} packed sequences of {sequence_length} tokens: "
            f"at most {LARGEST_SETTING} are made; give `most`, fewer documents or a larger sequence_length"
        )
    stop = min(total, sequences * sequence_length)
    cuts = np.arange(sequences, dtype=np.int64) * sequence_length
    # Two sorted runs: a stable sort merges them in linear time, where union1d would sort or hash them anew.
    merged = np.sort(np.concatenate([starts[starts < stop], cuts]), kind="stable")
    piece_starts = merged[np.diff(merged, prepend=-1) > 0]
    document = np.searchsorted(starts, piece_starts, side="right") - 1
    return PackedSequences(
        sequence_length=sequence_length,
        document=document,
        offset=piece_starts - starts[document],
        length=np.diff(piece_starts, append=stop),
        cu_pieces=np.append(np.searchsorted(piece_starts, cuts), len(piece_starts)),
    )


def pack_best_fit(document_lengths: Sequence[int] | NDArray[np.integer], sequence_length: int) -> PackedSequences:
    """Every document whole, longest first, each where it leaves least room: best-fit decreasing.

    Sequences stand in the order in which they were opened, so the longest documents come first; shuffle them before
    dealing them to optimizer steps. Equal lengths go by position, equal rooms to the sequence opened first. Source:
    Ding et al., "Fewer Truncations Improve Language Modeling" (arXiv:2404.10830), section 3.

    Example:
        >>> pack_best_fit([3, 7, 2, 6], 9).all_document_lengths()
        [[7, 2], [6, 3]]

    Args:
        document_lengths: lengths, tokens, each at least 1 and at most `sequence_length`.
        sequence_length: tokens a packed sequence, `L`, at least 1.

    Raises:
        ValueError: no documents, a length out of range, or a sequence length that is no whole number of at least 1.

    Complexity: O(n log n) comparisons; the sorted rooms are one list, so inserting moves memory besides.
    """
    lengths = checked_lengths(document_lengths)
    sequence_length = checked_count("sequence_length", sequence_length, most=_MOST_TOKENS)
    if lengths.max() > sequence_length:
        at = int((lengths > sequence_length).argmax())
        raise ValueError(
            f"document {at} has {int(lengths[at])} tokens and does not fit whole in a sequence of {sequence_length}: "
            "use pack_sequential, which splits documents, or a larger sequence length"
        )
    order = np.argsort(-lengths, kind="stable")
    smallest = int(lengths[order[-1]])
    rooms: list[tuple[int, int]] = []  # (room, sequence) of those that could take a document still, sorted
    sequence_of = np.empty(len(lengths), dtype=np.int64)  # in the order of placing
    opened = 0
    for placed, length in enumerate(lengths[order].tolist()):
        at = bisect_left(rooms, (length, -1))
        if at < len(rooms):
            room, sequence = rooms.pop(at)
        else:
            room, sequence = sequence_length, opened
            opened += 1
        sequence_of[placed] = sequence
        if room - length >= smallest:
            insort(rooms, (room - length, sequence))
    by_sequence = np.argsort(sequence_of, kind="stable")
    document = order[by_sequence]
    return PackedSequences(
        sequence_length=sequence_length,
        document=document,
        offset=np.zeros_like(document),
        length=lengths[document],
        cu_pieces=np.concatenate([[0], np.cumsum(np.bincount(sequence_of, minlength=opened))]),
    )
