"""The order of an epoch, how it is dealt to ranks, and what a checkpoint knows of it."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odb_libra_lightning.odb.ledger import EpochLedger, StreamLedger, open_ledger
from odb_libra_lightning.odb.pacing import views_due
from odb_libra_lightning.odb.sharding import check_shard, epoch_order, samples_drawn


def identities(ledger: EpochLedger, rank: int, order: np.ndarray) -> list[int]:
    return order[ledger.positions(ledger.share(rank))].tolist()


@given(st.integers(1, 300), st.integers(1, 16), st.integers(0, 5))
def test_every_index_is_drawn_and_only_the_padding_twice(n: int, world: int, epoch: int) -> None:
    if n < world:
        return
    ledger = EpochLedger(n, world, equal=True, epoch=epoch)
    order = epoch_order(n, epoch=epoch, seed=0)
    q = -(-n // world)
    assert ledger.share_sizes().tolist() == [q] * world
    counts = Counter(i for rank in range(world) for i in identities(ledger, rank, order))
    assert set(counts) == set(range(n))
    assert sorted(counts.values())[::-1] == [2] * (world * q - n) + [1] * (2 * n - world * q)


def test_the_paper_s_two_surplus_counts() -> None:
    assert EpochLedger(57_284, 8, equal=True).total - 57_284 == 4
    assert EpochLedger(207_865, 8, equal=True).total - 207_865 == 7


def test_orders_differ_by_epoch_and_seed_and_repeat_for_the_same() -> None:
    orders = [epoch_order(100, epoch=epoch, seed=seed).tolist() for epoch in range(2) for seed in range(2)]
    assert len({tuple(order) for order in orders}) == 4
    assert epoch_order(100, epoch=1, seed=1).tolist() == orders[3]


def test_without_shuffle_ranks_take_turns() -> None:
    ledger = EpochLedger(5, 2, equal=True, epoch=3)
    order = epoch_order(5, epoch=3, seed=9, shuffle=False)
    assert identities(ledger, 1, order) == [1, 3, 0]


def test_a_cap_draws_the_first_of_the_order() -> None:
    assert samples_drawn(100, None) == samples_drawn(100, 200) == 100
    whole, capped = epoch_order(100, epoch=2, seed=1), epoch_order(100, epoch=2, seed=1, max_samples=7)
    assert capped.tolist() == whole[:7].tolist()


@pytest.mark.parametrize(
    ("n", "rank", "world", "says"),
    [(0, 0, 1, "empty"), (1, 0, 2, "1 sample for 2 ranks"), (9, 2, 2, "got 2"), (2**31, 0, 1, "pass max_samples")],
)
def test_what_cannot_be_shared_out_is_refused(n: int, rank: int, world: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        check_shard(n, rank=rank, world_size=world)


@settings(max_examples=300)
@given(
    st.integers(1, 80),
    st.booleans(),
    st.lists(st.tuples(st.integers(1, 9), st.floats(0, 1)), min_size=1, max_size=4),
    st.randoms(use_true_random=False),
)
def test_any_chain_of_stops_and_world_sizes_hands_out_what_is_left(n, equal, stops, random) -> None:  # type: ignore[no-untyped-def]
    """Against sets of Python: what is trained on, whoever drew it, is not drawn again, and all the rest is."""
    trained: set[int] = set()
    ledger, state, last_world = None, None, None
    for world, portion in stops:
        mode = "join" if equal else "non_join"
        before = {r: ledger.share(r).tolist() for r in range(last_world)} if ledger else {}
        ledger = open_ledger(n, world_size=world, mode=mode, state=state)
        assert isinstance(ledger, EpochLedger)
        shares = [ledger.positions(ledger.share(rank)).tolist() for rank in range(world)]
        drawn = Counter(p for share in shares for p in share)
        assert set(drawn) >= set(range(n)) - trained
        if equal and world == last_world:
            assert {r: ledger.share(r).tolist() for r in range(world)} == before, "ranks keep their shares"
        else:
            assert not set(drawn) & trained
            assert max(map(len, shares)) - min(map(len, shares)) <= (0 if equal else 1)
            assert drawn.total() - len(drawn) < world
        assert ledger.samples_left == n - len(trained)
        assert ledger.checksum() == open_ledger(n, world_size=world, mode=mode, state=state).checksum()
        for rank in range(world):
            views = ledger.share(rank).tolist()
            gone = random.sample(views, int(portion * len(views)))
            trained |= set(ledger.positions(np.array(gone, np.int64)).tolist())
            ledger.mark(np.array(gone, np.int64))
        state, last_world = ledger.state_dict(), world
        assert ledger.done_views <= ledger.total


def test_a_stream_is_dealt_by_place_and_remembers_what_is_done() -> None:
    ledger = StreamLedger(2)
    ledger.mark(np.array([0, 3]))
    ledger.mark(np.array([40]))
    restored = StreamLedger.restore(ledger.state_dict(), world_size=3)
    assert np.flatnonzero(restored.done()).tolist() == [0, 3, 40]
    assert restored.done_views == 3
    assert restored.checksum() == ledger.checksum() != StreamLedger(3).checksum()


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=6), st.integers(1, 500))
def test_due_views_are_spread_over_the_fewest_rounds_and_never_exceed_the_buffer(shares: list[int], size: int) -> None:
    rounds = -(-max(shares) // size)
    for views in shares:
        due = [views_due(k, views=views, rounds=rounds) for k in range(rounds + 2)]
        drawn = np.diff([0, *due])
        assert due[max(rounds - 1, 0) :] == [views] * (3 if rounds else 2)
        assert drawn.max(initial=0) <= size
        assert drawn[:rounds].max(initial=0) - drawn[:rounds].min(initial=size) <= 1
