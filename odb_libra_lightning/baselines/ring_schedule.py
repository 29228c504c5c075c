"""What each rank of a zigzag ring computes at which step, and how rows get to it: a pure rule.

A packed sequence is cut in `2 CP` pieces, piece `i` from row `i L // (2 CP)`. Rank `r` computes the queries of pieces
`r` and `2 CP - 1 - r` and starts with their keys; at step `s` it has those of rank `r - s`. Its *block* is the rows of
its two pieces, the earlier one first. Under causal attention every document counts in a pair of different pieces at
most once: it has all keys from its first row to the end of the earlier piece, and stands at the beginning of the later.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from odb_libra_lightning.baselines.replica_shards import ReplicaSequence
from odb_libra_lightning.libra.segments import Segments


@dataclass(frozen=True, kw_only=True)
class Run:
    """One kernel call: rows of the rank's own block with keys of the block that is there.

    Attributes:
        queries: rows of the queries, consecutive.
        keys: rows of the keys, consecutive.
        segments: how they are divided among documents.
        causal: whether later queries see more keys; otherwise all see all.
        window: keys that a query sees at the most; only where causal.
        backwards: queries and keys are taken from the last to the first: what ends at a window's far edge is then
            causal.
    """

    queries: slice
    keys: slice
    segments: Segments
    causal: bool
    window: int | None = None
    backwards: bool = False


@dataclass(frozen=True, kw_only=True)
class RingSchedule:
    """The part of one rank, all counts in rows.

    Attributes:
        block_rows: rows of every rank's block, `[CP]`.
        home_pieces: rows of the two pieces that the rank is home to.
        swapped: whether the first of them goes to a later rank than the second.
        home_splits: of its home's rows, how many each rank computes: `[CP]`.
        block_splits: of its block's rows, how many each rank is home to: `[CP]`.
        steps: what is computed at each step, `[CP]`; a step may be empty.
    """

    block_rows: tuple[int, ...]
    home_pieces: tuple[int, int]
    swapped: bool
    home_splits: tuple[int, ...]
    block_splits: tuple[int, ...]
    steps: tuple[tuple[Run, ...], ...]


def ring_schedule(sequence: ReplicaSequence, rank: int, size: int, *, window: int | None) -> RingSchedule:
    """The schedule of one rank.

    Args:
        sequence: of the replica.
        rank: the rank, from 0.
        size: ranks, `CP`.
        window: keys that a query sees at the most, its own included; None: all before it.

    Complexity: O(documents + CP log(documents)).
    """
    pieces = _Pieces(starts=[at * sequence.rows // (2 * size) for at in range(2 * size + 1)], sequence=sequence)
    owned = [(each, 2 * size - 1 - each) for each in range(size)]
    owner = {piece: each for each, pair in enumerate(owned) for piece in pair}
    home_splits, block_splits = [0] * size, [0] * size
    homes = (2 * rank, 2 * rank + 1)  # cut at c L // CP, which is 2 c L // (2 CP)
    for piece in homes:
        home_splits[owner[piece]] += pieces.length(piece)
    for piece in owned[rank]:
        block_splits[piece // 2] += pieces.length(piece)
    steps = [pieces.own(owned[rank], window)]
    steps += [pieces.others(owned[rank], owned[(rank - step) % size], window) for step in range(1, size)]
    return RingSchedule(
        block_rows=tuple(sum(map(pieces.length, pair)) for pair in owned),
        home_pieces=(pieces.length(homes[0]), pieces.length(homes[1])),
        swapped=owner[homes[0]] > owner[homes[1]],
        home_splits=tuple(home_splits),
        block_splits=tuple(block_splits),
        steps=tuple(map(tuple, steps)),
    )


@dataclass(frozen=True, kw_only=True)
class _Pieces:
    starts: Sequence[int]
    sequence: ReplicaSequence

    def length(self, piece: int) -> int:
        return self.starts[piece + 1] - self.starts[piece]

    def own(self, pair: tuple[int, int], window: int | None) -> list[Run]:
        """The step in which a rank's queries meet its own keys."""
        documents = self.sequence.document_start
        # Rows of documents come first in the sequence, hence in the block too.
        lengths: list[int] = []
        ends_piece = None  # number of the document that the earlier piece breaks off in
        for piece in pair:
            start, stop = self.starts[piece], min(self.starts[piece + 1], self.sequence.tokens)
            if start >= stop:
                continue
            first = bisect_right(documents, start) - 1
            cuts = [start, *documents[first + 1 : bisect_right(documents, stop - 1)], stop]
            parts = [b - a for a, b in pairwise(cuts)]
            if window is None and lengths and first == ends_piece:
                # What is missing between the two pieces is neither query nor key here: one causal run of the document.
                lengths[-1] += parts.pop(0)
            lengths += parts
            ends_piece = bisect_right(documents, stop - 1) - 1
        if not lengths:
            return []
        rows, segments = slice(0, sum(lengths)), Segments(query_lengths=tuple(lengths), key_lengths=tuple(lengths))
        runs = [Run(queries=rows, keys=rows, segments=segments, causal=True, window=window)]
        if window is not None:
            runs += self.between(pair, pair, window)
        return runs

    def others(self, pair: tuple[int, int], keys_of: tuple[int, int], window: int | None) -> list[Run]:
        """A step in which a rank's queries meet another's keys."""
        runs = list(self.between(pair, keys_of, window))
        if window is not None or len(runs) < 2:
            return runs
        # Both are of one document, and stand side by side in its queries or in its keys.
        first, second = runs
        queries = slice(first.queries.start, second.queries.stop)
        return [_whole(queries, slice(first.keys.start, second.keys.stop))]

    def between(self, pair: tuple[int, int], keys_of: tuple[int, int], window: int | None) -> Iterator[Run]:
        """The runs of queries with keys of earlier pieces."""
        documents = self.sequence.document_start
        for late in pair:
            for early in keys_of:
                query, key_stop = self.starts[late], self.starts[early + 1]
                if early >= late or query >= self.sequence.tokens:
                    continue
                document = bisect_right(documents, query) - 1
                key, query_stop = documents[document], min(documents[document + 1], self.starts[late + 1])
                key = max(key, self.starts[early])
                if key >= key_stop or query >= query_stop:
                    continue
                to_query = (self.length(pair[0]) if late == pair[1] else 0) - self.starts[late]
                to_key = (self.length(keys_of[0]) if early == keys_of[1] else 0) - self.starts[early]
                # Queries before `edge` see all keys of the piece; those after lose the first ones to the window.
                edge = query_stop if window is None else min(query_stop, key + window)
                if query < edge:
                    yield _whole(_moved(query, edge, to_query), _moved(key, key_stop, to_key))
                if window is None:
                    continue
                start, stop = max(query, edge), min(query_stop, key_stop + window - 1)
                if start < stop:
                    seen = _moved(start - window + 1, key_stop, to_key)
                    run = _whole(_moved(start, stop, to_query), seen)
                    yield replace(run, causal=True, backwards=True)


def _moved(start: int, stop: int, by: int) -> slice:
    return slice(start + by, stop + by)


def _whole(queries: slice, keys: slice) -> Run:
    """A run of one document in which every query sees every key."""
    lengths = (queries.stop - queries.start,), (keys.stop - keys.start,)
    segments = Segments(query_lengths=lengths[0], key_lengths=lengths[1])
    return Run(queries=queries, keys=keys, segments=segments, causal=False)
