"""From the documents of a pool to blocks and their exact attention work: pure, and linear in documents and blocks.

A packed sequence is cut into *blocks* at multiples of the block size and where its rows change home, never because a
document ends. A block times a head shard is a *tile*, the smallest task that is placed. Blocks are cut at document
boundaries into *segments*, which are what a varlen kernel is called on: queries of one document, and the keys they
see. Rows count over the whole pool, sequence after sequence. Source: Libra (arXiv:2607.23250), sections 5.1 to 5.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from odb_libra_lightning.libra.layout import PoolLayout
from odb_libra_lightning.libra.load import causal_pairs, checked_lengths

Rows = NDArray[np.int64]

_MOST_ROWS = 2**31 - 1  # transfers name rows of a sequence in int32
_MOST_WORK = 2**62  # query-key pairs times heads of a pool: twice as much still fits int64
_MOST_WORKERS = 2**16  # plans have tables of workers


@dataclass(frozen=True, kw_only=True, eq=False)
class PoolTiles:
    """The blocks of a pool and the segments in them. Rows are rows of the pool; all arrays are int64.

    Attributes:
        sequence_start: first row of each packed sequence, and the end of the last: `[P + 1]`.
        home_start: first row of each worker's home, and the end of the last: `[W + 1]`.
        block_start: first row of each block, `[blocks]`.
        block_stop: row after the last, `[blocks]`.
        block_home: worker that is home to the block, `[blocks]`.
        block_pairs: query-key pairs of one head in the block, `[blocks]`.
        query_stop: row after the last that belongs to a document, `[blocks]`.
        document_start: first row of the document that the block begins in, `[blocks]`.
        key_start: first row of the keys that come with a tile of the block, `[blocks]`.
        key_stop: row after the last of them, `[blocks]`; equal to `key_start` where the block is all padding.
        segment_block: block of each segment, `[segments]`.
        segment_start: first query row of each segment, `[segments]`.
        segment_stop: row after its last, `[segments]`; its keys end here too.
        segment_key_start: first key row that its queries see, `[segments]`.
        segment_document: first row of its document, `[segments]`.
    """

    sequence_start: Rows
    home_start: Rows
    block_start: Rows
    block_stop: Rows
    block_home: Rows
    block_pairs: Rows
    query_stop: Rows
    document_start: Rows
    key_start: Rows
    key_stop: Rows
    segment_block: Rows
    segment_start: Rows
    segment_stop: Rows
    segment_key_start: Rows
    segment_document: Rows

    @property
    def num_workers(self) -> int:
        """Workers of the pool, `W`."""
        return len(self.home_start) - 1


@dataclass(frozen=True, kw_only=True, eq=False)
class PoolDocuments:
    """Where the documents, sequences and homes of a pool begin and end, in rows of the pool; int64.

    Attributes:
        start: first row of each document, `[documents]`.
        stop: row after its last, `[documents]`.
        sequence_start: as in `PoolTiles`.
        home_start: as in `PoolTiles`.
    """

    start: Rows
    stop: Rows
    sequence_start: Rows
    home_start: Rows


def lay_out(document_lengths_per_sequence: Sequence[Sequence[int]], layout: PoolLayout) -> PoolDocuments:
    """Put the documents of a pool one after another.

    Args:
        document_lengths_per_sequence: of each packed sequence its document lengths in order, tokens, each at least 1.
        layout: the settings; they say how many homes a sequence has.

    Raises:
        ValueError: no sequence, an empty one, a length below 1, a sequence longer than `layout.sequence_length`, or a
            block size larger than the rows any worker is home to.
    """
    if not len(document_lengths_per_sequence):
        raise ValueError("a pool has at least one packed sequence, got none")
    checked = []
    for at, sequence_lengths in enumerate(document_lengths_per_sequence):
        try:
            checked.append(checked_lengths(sequence_lengths))
        except ValueError as error:
            raise ValueError(f"packed sequence {at} of the pool: {error}") from error
    counts = np.array([len(lengths) for lengths in checked])
    lengths = np.concatenate(checked)
    if len(counts) * layout.context_parallel > _MOST_WORKERS:
        raise ValueError(
            f"{len(counts)} replicas with context_parallel={layout.context_parallel} are "
            f"{len(counts) * layout.context_parallel} workers: a pool of at most {_MOST_WORKERS} would fit"
        )
    sequence = np.repeat(np.arange(len(counts)), counts)
    total = np.concatenate([[0], np.cumsum(lengths)])
    first = np.concatenate([[0], np.cumsum(counts)])  # first document of each sequence
    tokens = np.diff(total[first])
    rows = tokens
    if (layout.sequence_length or int(tokens.max())) > _MOST_ROWS:
        raise ValueError(
            f"a packed sequence of {layout.sequence_length or int(tokens.max())} rows: at most {_MOST_ROWS} would fit"
        )
    if layout.sequence_length is not None:
        rows = np.full_like(tokens, layout.sequence_length)
        if (tokens > rows).any():
            at = int(tokens.argmax())
            raise ValueError(
                f"the documents of packed sequence {at} have {int(tokens[at])} tokens, more than "
                f"sequence_length={layout.sequence_length}; at most {layout.sequence_length} would fit"
            )
    sequence_start = np.concatenate([[0], np.cumsum(rows)])
    shift = (sequence_start[:-1] - total[first[:-1]])[sequence]
    share = np.arange(layout.context_parallel)
    home_start = sequence_start[:-1, None] + share * rows[:, None] // layout.context_parallel
    documents = PoolDocuments(
        start=total[:-1] + shift,
        stop=total[1:] + shift,
        sequence_start=sequence_start,
        home_start=np.append(home_start.ravel(), sequence_start[-1]),
    )
    largest = int(np.diff(documents.home_start).max())
    if layout.block_size > largest:
        raise ValueError(
            f"block_size={layout.block_size} is larger than any home: no worker of this pool has more than {largest} "
            f"rows (context_parallel={layout.context_parallel}); at most {largest} would fit"
        )
    return documents


def cut_tiles(documents: PoolDocuments, layout: PoolLayout) -> PoolTiles:
    """Cut a pool into blocks, and measure them.

    With `layout.split_oversize`, blocks of which one tile is heavier than `load_ceiling` are halved until none is.
    """
    cuts = [documents.home_start]
    for start, stop in pairwise(documents.sequence_start.tolist()):
        cuts.append(np.arange(start, stop, layout.block_size))
    tiles = _measure(np.unique(np.concatenate(cuts)), documents, layout)
    work = sum(tiles.block_pairs.tolist()) * layout.num_heads
    if work > _MOST_WORK:
        raise ValueError(
            f"the pool has {work} query-key pairs times heads: at most 2**62 would fit, in fewer or shorter sequences"
        )
    return halve_heavy(tiles, load_ceiling(tiles, layout), documents, layout) if layout.split_oversize else tiles


def halve_heavy(tiles: PoolTiles, limit: float, documents: PoolDocuments, layout: PoolLayout) -> PoolTiles:
    """The same pool with blocks halved, in rows, until no tile is heavier than `limit`; one row stays as it is."""
    while True:
        heavy = (tiles.block_pairs * layout.shard_heads > limit) & (tiles.block_stop - tiles.block_start > 1)
        if not heavy.any():
            return tiles
        middle = (tiles.block_start + tiles.block_stop)[heavy] // 2
        cuts = np.sort(np.concatenate([tiles.block_start, middle, tiles.block_stop[-1:]]))
        tiles = _measure(cuts, documents, layout)


def sum_by(at: NDArray[np.integer], values: Rows, size: int) -> Rows:
    """Sum of the values at each position from 0 to `size - 1`: int64, exact."""
    sums = np.zeros(size, dtype=np.int64)
    np.add.at(sums, at, values)
    return sums


def expand(counts: Rows) -> tuple[Rows, Rows]:
    """Of runs of so many elements, one after another: the run of every element, and its place in the run."""
    run = np.repeat(np.arange(len(counts)), counts)
    return run, np.arange(len(run)) - np.repeat(np.cumsum(counts) - counts, counts)


def run_bounds(begins: NDArray[np.bool_]) -> tuple[Rows, Rows]:
    """First and last element of each run, from whether a run begins at each element; the first always does."""
    first = np.flatnonzero(begins)
    return first, np.append(first[1:], len(begins)) - 1 if len(first) else first


def load_ceiling(tiles: PoolTiles, layout: PoolLayout) -> float:
    """Load that the placement lets a worker have, `C = (1 + tau) * total / W`, query-key pairs times heads."""
    return (1 + layout.tau) * (int(tiles.block_pairs.sum()) * layout.num_heads) / tiles.num_workers


def _measure(cuts: Rows, documents: PoolDocuments, layout: PoolLayout) -> PoolTiles:
    """Blocks and segments between the cuts, which include every beginning of a home and the end of the pool."""
    block_start, block_stop = cuts[:-1], cuts[1:]
    edges = np.unique(np.concatenate([cuts, documents.start, documents.stop]))
    start, stop = edges[:-1], edges[1:]
    document = np.searchsorted(documents.start, start, side="right") - 1
    inside = (document >= 0) & (start < documents.stop[document])  # the others are padding
    start, stop, document = start[inside], stop[inside], document[inside]
    block = np.searchsorted(block_start, start, side="right") - 1
    document_start = documents.start[document]
    pairs = causal_pairs(start - document_start, stop - document_start, window=layout.window)
    seen = document_start if layout.window is None else np.maximum(document_start, start - (layout.window - 1))

    # Segments stand in order of their blocks: block b has those from first[b] up to first[b + 1].
    first = np.searchsorted(block, np.arange(len(cuts)))
    filled = first[:-1] < first[1:]
    head, tail = first[:-1][filled], first[1:][filled] - 1
    whole = layout.fetch == "document"
    query_stop, first_document, key_start, key_stop = (block_start.copy() for _ in range(4))
    query_stop[filled] = stop[tail]
    first_document[filled] = document_start[head]
    key_start[filled] = document_start[head] if whole else seen[head]
    key_stop[filled] = documents.stop[document[tail]] if whole else stop[tail]
    total = np.concatenate([[0], np.cumsum(pairs)])
    return PoolTiles(
        sequence_start=documents.sequence_start,
        home_start=documents.home_start,
        block_start=block_start,
        block_stop=block_stop,
        block_home=np.searchsorted(documents.home_start, block_start, side="right") - 1,
        block_pairs=np.diff(total[first]),
        query_stop=query_stop,
        document_start=first_document,
        key_start=key_start,
        key_stop=key_stop,
        segment_block=block,
        segment_start=start,
        segment_stop=stop,
        segment_key_start=seen,
        segment_document=document_start,
    )
