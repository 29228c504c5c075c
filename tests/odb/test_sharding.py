from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from odb_libra_lightning.odb.pacing import views_due
from odb_libra_lightning.odb.sharding import rank_views, views_per_rank


def all_views(n: int, world: int, **kwargs: int) -> list[np.ndarray]:
    settings = {"epoch": 0, "seed": 0} | kwargs
    return [rank_views(n, rank=rank, world_size=world, **settings) for rank in range(world)]


@given(st.integers(1, 300), st.integers(1, 16), st.integers(0, 5))
def test_every_index_is_drawn_and_only_the_padding_twice(n: int, world: int, epoch: int) -> None:
    if n < world:
        return
    shares = all_views(n, world, epoch=epoch)
    q = -(-n // world)
    assert [len(share) for share in shares] == [q] * world
    counts = Counter(np.concatenate(shares).tolist())
    assert set(counts) == set(range(n))
    assert sorted(counts.values())[::-1] == [2] * (world * q - n) + [1] * (2 * n - world * q)


def test_the_paper_s_two_surplus_counts() -> None:
    assert 8 * views_per_rank(57_284, 8) - 57_284 == 4
    assert 8 * views_per_rank(207_865, 8) - 207_865 == 7


def test_orders_differ_by_epoch_and_seed_and_repeat_for_the_same() -> None:
    orders = [all_views(100, 2, epoch=epoch, seed=seed)[0].tolist() for epoch in range(2) for seed in range(2)]
    assert len({tuple(order) for order in orders}) == 4
    assert all_views(100, 2, epoch=1, seed=1)[0].tolist() == orders[3]


def test_without_shuffle_ranks_take_turns() -> None:
    assert rank_views(5, rank=1, world_size=2, epoch=3, seed=9, shuffle=False).tolist() == [1, 3, 0]


@pytest.mark.parametrize(
    ("n", "rank", "world", "says"),
    [(0, 0, 1, "empty"), (1, 0, 2, "1 sample for 2 ranks"), (9, 2, 2, "got 2")],
)
def test_what_cannot_be_shared_out_is_refused(n: int, rank: int, world: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        rank_views(n, rank=rank, world_size=world, epoch=0, seed=0)


@given(st.integers(1, 5000), st.integers(1, 500))
def test_due_views_are_spread_over_the_fewest_rounds_and_never_exceed_the_buffer(views: int, buffer: int) -> None:
    rounds = -(-views // buffer)
    due = [views_due(k, views=views, buffer_size=buffer) for k in range(rounds + 2)]
    drawn = np.diff([0, *due])
    assert due[rounds - 1 :] == [views] * 3
    assert drawn.max() <= buffer
    assert drawn[:rounds].max() - drawn[:rounds].min() <= 1
