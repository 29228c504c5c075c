"""WLB-LLM's packing: an optimizer step's documents into micro-batches of variable length and equal work.

Source: Wang et al., "WLB-LLM: Workload-Balanced 4D Parallelism for Large Language Model Training" (arXiv:2503.17924),
Algorithm 1. It is here to be compared with: it needs room for micro-batches longer than the average, and its deferral
of outliers changes what a step trains on, which Libra never does.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from odb_libra_lightning.libra.load import checked_lengths
from odb_libra_lightning.libra.whole_numbers import checked_count

_MOST_TOKENS = 2**62  # as of the documents of a step together


@dataclass(frozen=True, kw_only=True)
class WlbDocument:
    """A document, named by the step in which it arrived and its position there.

    Attributes:
        step: step in which it arrived, from 0.
        position: position among the documents of that step.
        length: tokens.
    """

    step: int
    position: int
    length: int


@dataclass(frozen=True, kw_only=True)
class WlbWaiting:
    """What is carried from one step to the next. The default is where training begins.

    Attributes:
        step: number of the step to come.
        outliers: documents that wait, oldest first, one tuple a level; () before the first step.
        remained: documents that found no room in the last step.
    """

    step: int = 0
    outliers: tuple[tuple[WlbDocument, ...], ...] = ()
    remained: tuple[WlbDocument, ...] = ()


@dataclass(frozen=True, kw_only=True)
class WlbStep:
    """The micro-batches of one step.

    Attributes:
        micro_batches: documents of each, longest first; one can be empty.
        waiting: what the next step is called with.
        breaks_step_equivalence: whether the step trains on other documents than arrived with it.
    """

    micro_batches: tuple[tuple[WlbDocument, ...], ...]
    waiting: WlbWaiting
    breaks_step_equivalence: bool

    def document_lengths(self) -> list[list[int]]:
        """Lengths of the documents of each micro-batch, tokens."""
        return [[document.length for document in documents] for documents in self.micro_batches]


_BEGINNING = WlbWaiting()


def wlb_step(
    document_lengths: Sequence[int] | NDArray[np.integer],
    *,
    micro_batches: int,
    max_tokens: int,
    outlier_lengths: Sequence[int] = (),
    linear_work: float = 0.0,
    waiting: WlbWaiting = _BEGINNING,
) -> WlbStep:
    """Pack the documents of a step: longest first, to the micro-batch of least work, else to the shortest.

    Deferral, with `outlier_lengths`: a document at least as long as one of them waits on the level of the longest such
    threshold until as many wait there as there are micro-batches; then so many, the oldest, join the step, and each
    micro-batch gets about one. What fits nowhere goes first into the next step, sorted with its documents. Without
    deferral nothing waits, and the step trains on exactly the documents that arrived.

    Example:
        >>> wlb_step([8, 4, 4, 4, 4, 2], micro_batches=2, max_tokens=20).document_lengths()
        [[8, 2], [4, 4, 4, 4]]

    Args:
        document_lengths: documents that arrive with the step, tokens, each 1 to `max_tokens`.
        micro_batches: packs to make, `N`, at least 1.
        max_tokens: most tokens a pack, `L_max`; above the average, so that work can be evened out.
        outlier_lengths: thresholds of the levels, ascending, tokens; none: no deferral.
        linear_work: work of everything linear in the length, in units of `l**2`, per token: the length at which it
            equals the work of attention. 0: attention alone.
        waiting: `WlbStep.waiting` of the step before.

    Raises:
        ValueError: a length or setting out of range or no whole number; `waiting` of other levels; or, without
            deferral, a document that fits nowhere.

    Complexity: O(n log n), and O(N) for each document that the micro-batch of least work has no room for.
    """
    _check_settings(micro_batches, max_tokens, outlier_lengths, linear_work, waiting)
    lengths = checked_lengths(document_lengths).tolist() if len(document_lengths) or not outlier_lengths else []
    arrived = [WlbDocument(step=waiting.step, position=i, length=length) for i, length in enumerate(lengths)]
    for document in arrived:
        if document.length > max_tokens:
            raise ValueError(
                f"document {document.position} has {document.length} tokens, above max_tokens={max_tokens}: raise "
                "max_tokens, or split the document"
            )

    levels = [list(level) for level in waiting.outliers] or [[] for _ in outlier_lengths]
    joining = list(waiting.remained)
    for document in arrived:
        level = sum(document.length >= threshold for threshold in outlier_lengths) - 1
        (levels[level] if level >= 0 else joining).append(document)
    for level_documents in levels:
        if len(level_documents) >= micro_batches:
            joining += level_documents[:micro_batches]
            del level_documents[:micro_batches]

    packs, remained = _greedy(joining, micro_batches, max_tokens, linear_work)
    if remained and not outlier_lengths:
        raise ValueError(
            f"a document of {remained[0].length} tokens finds no room in {micro_batches} micro-batches of at most "
            f"{max_tokens} tokens, with {sum(lengths)} tokens in the step: raise max_tokens, use more micro-batches, "
            "or give outlier_lengths so that documents may wait"
        )
    packed = {document for pack in packs for document in pack}
    return WlbStep(
        micro_batches=tuple(tuple(pack) for pack in packs),
        waiting=WlbWaiting(
            step=waiting.step + 1, outliers=tuple(tuple(level) for level in levels), remained=tuple(remained)
        ),
        breaks_step_equivalence=packed != set(arrived),
    )


def _greedy(
    documents: list[WlbDocument], micro_batches: int, max_tokens: int, linear_work: float
) -> tuple[list[list[WlbDocument]], list[WlbDocument]]:
    packs: list[list[WlbDocument]] = [[] for _ in range(micro_batches)]
    tokens, work = [0] * micro_batches, [0.0] * micro_batches
    lightest = [(0.0, k) for k in range(micro_batches)]  # a heap; an entry counts while its work is the current one
    remained = []
    for document in sorted(documents, key=lambda document: -document.length):
        while lightest[0][0] != work[lightest[0][1]]:
            heapq.heappop(lightest)
        k = lightest[0][1]
        if tokens[k] + document.length > max_tokens:
            k = min(range(micro_batches), key=tokens.__getitem__)
        if tokens[k] + document.length > max_tokens:
            remained.append(document)
            continue
        packs[k].append(document)
        tokens[k] += document.length
        work[k] += document.length * (document.length + linear_work)
        heapq.heappush(lightest, (work[k], k))
    return packs, remained


def _check_settings(
    micro_batches: int, max_tokens: int, outlier_lengths: Sequence[int], linear_work: float, waiting: WlbWaiting
) -> None:
    checked_count("micro_batches", micro_batches)
    checked_count("max_tokens", max_tokens, most=_MOST_TOKENS)
    if not 0 <= linear_work < np.inf:
        raise ValueError(f"linear_work={linear_work}: expected a finite number, at least 0")
    thresholds = [checked_count("outlier_lengths", threshold, most=_MOST_TOKENS) for threshold in outlier_lengths]
    if thresholds != sorted(set(thresholds)):
        raise ValueError(f"outlier_lengths={thresholds}: expected ascending lengths, each once")
    if waiting.outliers and len(waiting.outliers) != len(thresholds):
        raise ValueError(
            f"{len(waiting.outliers)} levels wait, for {len(thresholds)} outlier_lengths: give those of the step before"
        )
    if waiting.remained and not thresholds:
        raise ValueError(f"{len(waiting.remained)} documents wait: without outlier_lengths none may")
