"""`non_join`: what is left when one rank is through is dealt out anew, so that none waits and nothing is missed."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odb_libra_lightning import ODBLoader
from odb_libra_lightning.odb.steps import Step
from tests.odb.simulation import simulate
from tests.samples import Documents, pad

LENGTHS = st.lists(st.integers(1, 400), min_size=1, max_size=120)


def emitted(ranks: list[list[Step]]) -> Counter[int]:
    return Counter(identity for steps in ranks for step in steps for identity in step.info.indices)


@settings(deadline=None, max_examples=150)
@given(LENGTHS, st.integers(1, 16), st.integers(1, 900), st.integers(1, 60), st.booleans())
def test_every_sample_is_emitted_and_the_surplus_is_less_than_a_step(lengths, world, l_max, buffer, pacing) -> None:  # type: ignore[no-untyped-def]
    n, world = len(lengths), min(world, len(lengths))
    ranks = simulate(
        lengths, world_size=world, l_max=l_max, buffer_size=buffer, pacing=pacing, length_fn=int, mode="non_join"
    )
    counts = emitted(ranks)
    largest_step = max(step.info.global_samples for step in ranks[0])
    assert set(counts) == set(range(n)), "identity coverage is strict"
    assert n <= counts.total() <= n + world - 1 <= n + largest_step
    assert len({len(steps) for steps in ranks}) == 1
    assert all(step.info.indices for steps in ranks for step in steps), "no rank takes a step without data"
    last = ranks[0][-1].info
    assert last.samples_done == last.samples_total == counts.total()


@settings(deadline=None, max_examples=60)
@given(LENGTHS, st.integers(1, 8), st.integers(1, 300), st.integers(50, 400))
def test_dropped_samples_end_it_all_the_same(lengths, world, l_max, longest) -> None:  # type: ignore[no-untyped-def]
    world = min(world, len(lengths))
    ranks = simulate(
        lengths, world_size=world, l_max=l_max, buffer_size=10, length_fn=int, mode="non_join", oversize="drop"
    )
    kept = {i for i, length in enumerate(lengths) if length <= l_max}
    assert set(emitted(ranks)) == kept


def test_it_spares_the_steps_that_join_takes_without_data() -> None:
    lengths = np.random.default_rng(1).lognormal(6.2, 0.3, 3000).astype(int) + 1
    common = {"world_size": 8, "l_max": 6000, "buffer_size": 100, "pacing": False, "length_fn": int}
    idle = {"join": 0, "non_join": 0}
    steps = {"join": 0, "non_join": 0}
    for size in range(2400, 3000, 100):  # whether ranks part at the end is a matter of remainders
        for mode in idle:
            (rank, *_) = simulate(lengths[:size].tolist(), mode=mode, **common)
            idle[mode] += sum(step.info.idle_ranks for step in rank)
            steps[mode] += len(rank)
    assert idle["join"] > idle["non_join"] == 0
    assert steps["non_join"] <= steps["join"]


def test_drawing_afresh_instead_of_dealing_out_what_is_left_would_miss_samples() -> None:
    """The counter-example: the quota is met by repeats of some samples while others are never seen."""
    lengths = [900] * 12 + [10] * 4
    shares = [list(range(12)), [12, 13, 14, 15]]

    def logical_iteration(shares: list[list[int]]) -> list[Counter[int]]:
        """Steps up to the first that a rank has no data for: there the paper's iteration ends."""
        ranks = simulate(lengths, world_size=2, shares=shares, l_max=1000, pacing=False, length_fn=int)
        steps = [Counter(i for rank in step for i in rank.info.indices) for step in zip(*ranks, strict=True)]
        return [s for s, step in zip(steps, zip(*ranks, strict=True), strict=True) if not step[0].info.idle_ranks]

    seen: Counter[int] = Counter()
    while seen.total() < len(lengths):  # the quota
        for step in logical_iteration(shares):
            if seen.total() < len(lengths):
                seen += step
    assert len(lengths) <= seen.total() <= len(lengths) + 2
    assert set(seen) < set(range(16)), "quota met, identities missed"
    dealt = simulate(lengths, world_size=2, l_max=1000, pacing=False, length_fn=int, mode="non_join", shuffle=False)
    assert set(emitted(dealt)) == set(range(16))


@pytest.mark.parametrize("mode", ["join", "non_join"])
def test_the_account_of_an_epoch(mode: str) -> None:
    loader = ODBLoader(Documents(50), pad, l_max=600, num_workers=0, buffer_size=8, mode=mode)
    batches = iter(loader)
    next(batches)
    account = loader.position.account
    assert account is not None
    assert account.eta_quota == account.eta_identity == 1 - account.emitted / 50 > 0
    for _ in batches:
        pass
    account = loader.position.account
    assert account is not None
    assert (account.epoch, account.samples, account.emitted, account.identities) == (0, 50, 50, 50)
    assert account.eta_quota == account.eta_logical == account.eta_identity == 0.0


def test_a_stream_cannot_be_dealt_anew() -> None:
    with pytest.raises(ValueError, match="needs a map-style dataset"):
        ODBLoader(iter([1, 2]), mode="non_join")


@pytest.mark.parametrize("mode", ["join", "non_join"])
def test_samples_dropped_after_the_last_step_are_accounted_for(mode: str) -> None:
    loader = ODBLoader(
        [5, 50],
        list,
        l_max=10,
        num_workers=0,
        buffer_size=1,
        shuffle=False,
        oversize="drop",
        length_fn=int,
        loss_tokens=len,
        mode=mode,
    )
    list(loader)
    account = loader.position.account
    assert account is not None
    assert (account.emitted, account.dropped, account.identities) == (2, 1, 2)
