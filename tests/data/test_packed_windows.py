"""Windows of packed sequences: everything once, the same whatever the degrees, even over pools."""

from __future__ import annotations

from collections import Counter
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from odb_libra_lightning.data.packed_windows import STAND_IN, cut_windows, pack_epoch, place_window, steps_left
from odb_libra_lightning.libra.packing import PackedSequences

lengths = st.lists(st.integers(1, 40), min_size=1, max_size=30)


def tokens_of(packed: PackedSequences) -> Counter[tuple[int, int]]:
    """Every (document, row) that the sequences hold."""
    pieces = zip(packed.document.tolist(), packed.offset.tolist(), packed.length.tolist(), strict=True)
    return Counter((document, row) for document, offset, n in pieces for row in range(offset, offset + n))


@given(lengths, st.integers(1, 17), st.sampled_from(["best_fit", "sequential"]), st.booleans(), st.integers(0, 3))
def test_an_epoch_holds_every_token_once_in_equally_many_sequences(
    lengths: list[int], longest: int, packing: str, shuffle: bool, epoch: int
) -> None:
    settings = {"packing": packing, "shuffle": shuffle, "seed": 5}
    packed = pack_epoch(np.array(lengths), longest, epoch=epoch, **settings)
    assert tokens_of(packed) == Counter((document, row) for document, n in enumerate(lengths) for row in range(n))
    assert all(0 < packed.document_lengths(i).sum() <= longest for i in range(len(packed)))
    assert len(packed) == len(pack_epoch(np.array(lengths), longest, epoch=0, **settings))


def test_best_fit_cuts_only_documents_that_do_not_fit() -> None:
    packed = pack_epoch(np.array([9, 3, 4, 1]), 4, packing="best_fit", shuffle=False)
    pieces = sorted(zip(packed.document.tolist(), packed.offset.tolist(), packed.length.tolist(), strict=True))
    assert pieces == [(0, 0, 4), (0, 4, 4), (0, 8, 1), (1, 0, 3), (2, 0, 4), (3, 0, 1)]
    assert packed.document[packed.cu_pieces[:-1]][0] == 0, "without shuffling, sequences come in the documents' order"


def test_sequential_is_the_stream_of_documents_cut() -> None:
    packed = pack_epoch(np.array([3, 7, 2]), 5, packing="sequential", shuffle=False)
    assert packed.all_document_lengths() == [[3, 2], [5], [2]]
    assert packed.document.tolist() == [0, 1, 1, 2]


def test_order_follows_from_seed_and_epoch() -> None:
    def order(**settings: int) -> list[int]:
        return pack_epoch(np.arange(1, 60), 64, **settings).document.tolist()

    assert order(seed=1, epoch=2) == order(seed=1, epoch=2)
    assert len({tuple(order(seed=seed, epoch=epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4


@given(
    st.integers(1, 200),
    st.integers(1, 7),
    st.integers(1, 5),
    st.integers(0, 40),
    st.integers(0, 11),
    st.none() | st.integers(0, 60),
)
def test_windows_follow_the_trainer_s_count(
    sequences: int, replicas: int, accumulation: int, done: int, first_step: int, limit: int | None
) -> None:
    done = min(done, sequences)
    windows = list(
        cut_windows(
            sequences,
            data_parallel=replicas,
            accumulation=accumulation,
            done=done,
            first_step=first_step,
            limit=limit,
        )
    )
    step = first_step
    for number, window in enumerate(windows):
        assert (window.first, window.first_step) == (done, step)
        assert (window.micro_steps - 1) * replicas < window.stop - window.first <= window.micro_steps * replicas
        done, step = window.stop, step + window.micro_steps
        last = number + 1 == len(windows)
        # What the trainer does: an update where its count is a multiple, at the epoch's end, and at its limit.
        assert step % accumulation == 0 or (last and (done == sequences or step == limit))
        assert all(s % accumulation for s in range(window.first_step + 1, step))
    if limit is None:
        assert done == sequences
        assert step - first_step == steps_left(
            sequences, data_parallel=replicas, done=windows[0].first if windows else done
        )
    else:
        assert done == sequences or step >= limit


@given(
    st.lists(st.integers(1, 1000), min_size=1, max_size=40),
    st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2), (6, 3)]),
    st.sampled_from(["sequential", "vrsp", "random", "zigzag", "wlb", "karmarkar_karp"]),
    st.booleans(),
)
def test_placement_changes_nothing_but_the_order(
    loads: list[int], degrees: tuple[int, int], placement: str, refine: bool
) -> None:
    replicas, pool = degrees
    window = place_window(
        loads, first=100, data_parallel=replicas, pool_size=pool, placement=placement, refine=refine, seed=3
    )
    placed = [sequence for step in window.sequences for sequence in step]
    assert all(len(step) == replicas for step in window.sequences)
    assert sorted(s for s in placed if s != STAND_IN) == list(range(100, 100 + len(loads)))
    assert placed.count(STAND_IN) < replicas, "a window takes no more micro-steps than it must"
    work = [loads[s - 100] if s != STAND_IN else 4 for s in placed]
    pools = [sum(work[i : i + pool]) for i in range(0, len(work), pool)]
    assert window.imbalance == pytest.approx(max(pools) * len(pools) / sum(pools) - 1)


def test_sequential_placement_leaves_the_order_and_puts_stand_ins_last() -> None:
    window = place_window([1, 9, 3, 4, 7], data_parallel=2)
    assert window.sequences == ((0, 1), (2, 3), (4, STAND_IN))


def test_pools_that_run_at_the_same_time_are_alike() -> None:
    """Brute force: no other order of the pools has a smaller sum, over micro-steps, of the heaviest pool."""
    loads = [90, 80, 50, 40, 30, 10, 5, 1]
    window = place_window(loads, data_parallel=2, pool_size=1, placement="vrsp")

    def waited(order: list[int]) -> int:
        return sum(max(order[i : i + 2]) for i in range(0, len(order), 2))

    placed = [loads[s] for step in window.sequences for s in step]
    assert waited(placed) == min(waited(list(order)) for order in permutations(loads))


def test_a_pool_size_that_does_not_divide_the_replicas_is_refused() -> None:
    with pytest.raises(ValueError, match="pool_size=2 does not divide data_parallel=3"):
        place_window([1, 2, 3], data_parallel=3, pool_size=2)
