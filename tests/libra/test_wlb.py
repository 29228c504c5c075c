"""WLB-LLM's packing against the algorithm played document by document, and what may wait against what may not."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odb_libra_lightning.libra.wlb import WlbDocument, WlbStep, WlbWaiting, wlb_step


def played(lengths: list[int], packs: int, max_tokens: int, linear: int) -> tuple[list[list[int]], list[int]]:
    """Algorithm 1's greedy part, every sum taken anew."""
    held: list[list[int]] = [[] for _ in range(packs)]
    left = []
    for length in sorted(lengths, reverse=True):
        by_work = min(range(packs), key=lambda k: sum(n * n + linear * n for n in held[k]))
        by_length = min(range(packs), key=lambda k: sum(held[k]))
        for k in (by_work, by_length):
            if sum(held[k]) + length <= max_tokens:
                held[k].append(length)
                break
        else:
            left.append(length)
    return held, left


@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=25),
    st.integers(1, 5),
    st.integers(20, 80),
    st.sampled_from([0, 10]),
)
def test_a_step_without_deferral_is_the_greedy_rule(
    lengths: list[int], packs: int, max_tokens: int, linear: int
) -> None:
    held, left = played(lengths, packs, max_tokens, linear)
    settings = {"micro_batches": packs, "max_tokens": max_tokens, "linear_work": linear}
    if left:
        with pytest.raises(ValueError, match=f"a document of {left[0]} tokens finds no room in {packs} micro-batches"):
            wlb_step(lengths, **settings)  # type: ignore[arg-type]
        return
    step = wlb_step(lengths, **settings)  # type: ignore[arg-type]
    assert step.document_lengths() == held
    arrived = [WlbDocument(step=0, position=i, length=length) for i, length in enumerate(lengths)]
    assert Counter(document for pack in step.micro_batches for document in pack) == Counter(arrived)
    assert not step.breaks_step_equivalence
    assert step.waiting == WlbWaiting(step=1, outliers=(), remained=())


@given(
    st.lists(st.lists(st.integers(1, 30), max_size=15), min_size=1, max_size=6),
    st.integers(1, 3),
    st.sampled_from([(), (10,), (8, 20)]),
)
def test_with_deferral_nothing_is_lost_and_each_document_comes_once(
    steps: list[list[int]], packs: int, outlier_lengths: tuple[int, ...]
) -> None:
    max_tokens = 40 if outlier_lengths else 451  # without deferral a step of 15 documents and one more has room
    waiting = WlbWaiting()
    trained: Counter[WlbDocument] = Counter()
    arrived: Counter[WlbDocument] = Counter()
    for number, lengths in enumerate(steps):
        if not outlier_lengths:
            lengths = [*lengths, 1]
        fresh = Counter(WlbDocument(step=number, position=i, length=length) for i, length in enumerate(lengths))
        step = wlb_step(
            lengths,
            micro_batches=packs,
            max_tokens=max_tokens,
            outlier_lengths=outlier_lengths,
            waiting=waiting,
        )
        packed = Counter(document for pack in step.micro_batches for document in pack)
        waiting = step.waiting
        arrived += fresh
        trained += packed
        held = Counter([d for level in waiting.outliers for d in level] + list(waiting.remained))
        assert trained + held == arrived
        assert step.breaks_step_equivalence == (packed != fresh)
        assert all(sum(pack) <= max_tokens for pack in step.document_lengths())
        if not outlier_lengths:
            assert packed == fresh


def lengths_of(documents: tuple[WlbDocument, ...]) -> list[int]:
    return [document.length for document in documents]


def test_outliers_wait_until_there_is_one_for_each_micro_batch() -> None:
    def step(lengths: list[int], waiting: WlbWaiting) -> WlbStep:
        return wlb_step(lengths, micro_batches=2, max_tokens=120, outlier_lengths=(50, 90), waiting=waiting)

    first = step([60, 5, 100, 4], WlbWaiting())
    assert first.document_lengths() == [[5], [4]]
    assert [lengths_of(level) for level in first.waiting.outliers] == [[60], [100]]
    assert first.breaks_step_equivalence

    second = step([7, 50, 6], first.waiting)
    assert second.document_lengths() == [[60], [50, 7, 6]]
    assert second.micro_batches[0] == (WlbDocument(step=0, position=0, length=60),)
    assert [lengths_of(level) for level in second.waiting.outliers] == [[], [100]]

    third = step([3, 2], second.waiting)
    assert (third.document_lengths(), third.breaks_step_equivalence) == ([[3], [2]], False)
    assert third.waiting.step == 3


def test_what_finds_no_room_joins_the_next_step() -> None:
    first = wlb_step([9, 9, 9], micro_batches=2, max_tokens=10, outlier_lengths=(10,))
    assert (first.document_lengths(), lengths_of(first.waiting.remained)) == ([[9], [9]], [9])
    second = wlb_step([1], micro_batches=2, max_tokens=10, outlier_lengths=(10,), waiting=first.waiting)
    assert second.document_lengths() == [[9], [1]]
    assert second.micro_batches[0][0] == WlbDocument(step=0, position=2, length=9)
    assert wlb_step([], micro_batches=2, max_tokens=10, outlier_lengths=(10,)).document_lengths() == [[], []]


def test_wrong_arguments_are_named() -> None:
    def pack(lengths: list[int], **changed: object) -> WlbStep:
        return wlb_step(lengths, **{"micro_batches": 2, "max_tokens": 10, **changed})  # type: ignore[arg-type]

    with pytest.raises(ValueError, match=r"document 1 has 11 tokens, above max_tokens=10: raise max_tokens"):
        pack([1, 11])
    with pytest.raises(ValueError, match=r"of 5 tokens finds no room .* with 21 tokens in the step: raise max_tokens"):
        pack([8, 8, 5])
    with pytest.raises(ValueError, match="document length 0 at position 0"):
        pack([0])
    with pytest.raises(ValueError, match="at least one"):
        pack([])
    for name in ("micro_batches", "max_tokens"):
        for wrong in (0, 1.5, True):
            with pytest.raises(ValueError, match=f"{name}={wrong}: expected a whole number from 1 to"):
                pack([1], **{name: wrong})
    for bad in ((0,), (5, 7.5), (True,)):
        with pytest.raises(ValueError, match=f"outlier_lengths={bad[-1]}: expected a whole number from 1 to"):
            pack([1], outlier_lengths=bad)
    for bad in ((5, 5), (6, 5)):
        with pytest.raises(ValueError, match="expected ascending lengths, each once"):
            pack([1], outlier_lengths=bad)
    for bad_work in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"linear_work=.*: expected a finite number"):
            pack([1], linear_work=bad_work)
    waits = pack([9, 9, 9], outlier_lengths=(10,)).waiting
    with pytest.raises(ValueError, match="1 levels wait, for 2 outlier_lengths"):
        pack([1], outlier_lengths=(5, 10), waiting=waits)
    with pytest.raises(ValueError, match="1 documents wait: without outlier_lengths none may"):
        pack([1], waiting=WlbWaiting(remained=waits.remained))
