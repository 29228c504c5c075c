from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odb_libra_lightning.odb.loss_weight import window_loss_weights
from odb_libra_lightning.odb.padding import fixed_batch_padded_tokens, padding_ratio

# counts[rank][micro_batch]
COUNTS = st.integers(1, 5).flatmap(
    lambda m: st.lists(st.lists(st.integers(0, 50), min_size=m, max_size=m), min_size=1, max_size=6)
)


@given(COUNTS, st.integers(0, 3), st.randoms())
def test_weighted_means_averaged_as_trainers_do_give_the_token_mean(counts, extra, random) -> None:  # type: ignore[no-untyped-def]
    world, micro_batches = len(counts), len(counts[0])
    accumulation = micro_batches + extra  # a short last window is still divided by the full number
    losses = [[[random.random() for _ in range(t)] for t in rank] for rank in counts]
    totals = [sum(rank[m] for rank in counts) for m in range(micro_batches)]
    reached = 0.0
    for rank in range(world):
        weights = window_loss_weights(counts[rank], totals, world_size=world, accumulation=accumulation)
        for m, weight in enumerate(weights):
            if counts[rank][m]:
                local_mean = sum(losses[rank][m]) / counts[rank][m]
                reached += local_mean * weight / accumulation / world
            else:
                assert weight == 0.0
    everything = [loss for rank in losses for micro in rank for loss in micro]
    expected = sum(everything) / len(everything) if everything else 0.0
    assert math.isclose(reached, expected, rel_tol=1e-12, abs_tol=1e-12)


def test_a_window_without_loss_weighs_nothing() -> None:
    assert window_loss_weights([0, 0], [0, 0], world_size=2, accumulation=2) == [0.0, 0.0]


def test_one_rank_without_accumulation_has_weight_exactly_one() -> None:
    assert window_loss_weights([7], [7], world_size=1, accumulation=1) == [1.0]


def test_padding_of_fixed_batches() -> None:
    assert fixed_batch_padded_tokens([1, 5, 3, 2, 4], 2) == 10 + 6 + 4
    assert padding_ratio(15, 20) == 0.25
    assert padding_ratio(0, 0) == 0.0
    with pytest.raises(ValueError, match="got 0"):
        fixed_batch_padded_tokens([1], 0)
