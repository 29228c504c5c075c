"""Whole epochs of many ranks, played in one process; between processes the same generators run over Gloo."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odb_libra_lightning.odb.errors import ODBError
from odb_libra_lightning.odb.ledger import EpochLedger
from odb_libra_lightning.odb.steps import Step
from odb_libra_lightning.odb.wire import from_bytes
from tests.odb.simulation import simulate

LENGTHS = st.lists(st.integers(1, 400), min_size=1, max_size=120)


def dataset(lengths: Sequence[int]) -> list[list[int]]:
    """Samples whose content tells which they are."""
    return [[i] * length for i, length in enumerate(lengths)]


def trained(ranks: list[list[Step]]) -> Counter[int]:
    return Counter(identity for steps in ranks for step in steps for identity in step.info.indices)


@settings(deadline=None, max_examples=150)
@given(LENGTHS, st.integers(1, 16), st.integers(1, 900), st.integers(1, 60), st.booleans(), st.integers(0, 3))
def test_nothing_is_lost_steps_are_equal_and_budgets_hold(lengths, world, l_max, buffer, pacing, epoch) -> None:  # type: ignore[no-untyped-def]
    world = min(world, len(lengths))
    ranks = simulate(dataset(lengths), world_size=world, l_max=l_max, buffer_size=buffer, pacing=pacing, epoch=epoch)
    counts = trained(ranks)
    assert set(counts) == set(range(len(lengths)))
    assert counts.total() == world * -(-len(lengths) // world)
    assert len({len(steps) for steps in ranks}) == 1
    for rank in ranks:
        for number, step in enumerate(rank):
            info = step.info
            assert info.batch_idx == number
            assert info.lengths == tuple(lengths[i] for i in info.indices)
            assert info.padded_tokens <= max(l_max, max(info.lengths, default=0))
            batch = from_bytes(step.payload)
            if info.indices:
                assert [sample[0] for sample in batch] == list(info.indices)
            else:
                assert info.loss_weight == 0.0
                assert batch, "a zero-weight step has a batch to run on"


@settings(deadline=None, max_examples=60)
@given(LENGTHS, st.integers(1, 8), st.integers(1, 5), st.integers(1, 500))
def test_facts_about_all_ranks_are_the_sums_and_weights_average_to_one(lengths, world, accumulation, l_max) -> None:  # type: ignore[no-untyped-def]
    world = min(world, len(lengths))
    ranks = simulate(
        dataset(lengths), world_size=world, l_max=l_max, accumulation=accumulation, buffer_size=20, loss_tokens=sum_len
    )
    done = 0
    steps = list(zip(*ranks, strict=True))
    for step in steps:
        infos = [rank.info for rank in step]
        done += sum(info.samples for info in infos)
        for info in infos:
            assert info.global_samples == sum(i.samples for i in infos)
            assert info.global_tokens == sum(sum(i.lengths) for i in infos)
            assert info.global_padded_tokens == sum(i.padded_tokens for i in infos)
            assert info.idle_ranks == sum(not i.indices for i in infos)
            assert info.samples_done == done
    assert done == infos[0].samples_total
    for first in range(0, len(steps), accumulation):
        window = [rank.info for step in steps[first : first + accumulation] for rank in step]
        assert sum(info.loss_weight for info in window) == pytest.approx(world * accumulation)
        tokens = sum(info.tokens for info in window)
        for info in window:
            assert info.window_loss_tokens == tokens
            assert info.loss_weight == pytest.approx(info.tokens * world * accumulation / tokens)


@pytest.mark.parametrize(("first_step", "limit"), [(0, 7), (0, 6), (0, 1), (4, None), (5, 9)])
def test_windows_follow_the_trainer_s_count_and_are_cut_where_it_stops(first_step: int, limit: int | None) -> None:
    """A trainer steps at multiples of its accumulation and at its limit, and divides by the whole number."""
    accumulation = 3
    ledger = EpochLedger(60, 2, equal=True)
    state = {**ledger.state_dict(), "steps": first_step}
    common = {"world_size": 2, "l_max": 60, "buffer_size": 10, "loss_tokens": sum_len}
    lengths = [1 + i % 23 for i in range(60)]
    ranks = simulate(dataset(lengths), accumulation=accumulation, limit=limit, state=state, **common)
    steps = list(zip(*ranks, strict=True))
    assert [step[0].info.batch_idx for step in steps] == list(range(first_step, first_step + len(steps)))
    if limit is not None:
        assert first_step + len(steps) == limit
    ends = [n for n, step in enumerate(steps, 1) if step[0].info.ends_window]
    stops = [n for n in range(1, len(steps) + 1) if (first_step + n) % accumulation == 0 or n == len(steps)]
    assert ends == stops
    for first, end in zip([0, *ends], ends, strict=False):
        window = [rank.info for step in steps[first:end] for rank in step]
        tokens = sum(info.tokens for info in window)
        for info in window:
            assert info.loss_weight == pytest.approx(info.tokens * 2 * accumulation / tokens)


def sum_len(batch: list[list[int]]) -> int:
    return sum(map(len, batch))


def test_twelve_long_samples_beside_four_short_ones_take_twelve_steps() -> None:
    lengths = [900] * 12 + [10] * 4
    shares = [list(range(12)), [12, 13, 14, 15]]
    ranks = simulate(dataset(lengths), world_size=2, shares=shares, l_max=1000, pacing=False)
    assert [len(steps) for steps in ranks] == [12, 12]
    assert trained(ranks) == Counter(range(16))
    zero = [step.info for step in ranks[1] if not step.info.indices]
    assert len(zero) == 8
    assert all(info.loss_weight == 0.0 for info in zero)
    alone = [step.info.loss_weight for step in ranks[0] if step.info.idle_ranks]
    assert alone == [2.0] * 8, "the rank that is left carries the whole mean"


def test_steps_of_ranks_pair_groups_of_like_length_and_are_not_sorted() -> None:
    lengths = np.random.default_rng(0).lognormal(5, 0.8, 800).astype(int) + 1
    ranks = simulate(dataset(lengths.tolist()), world_size=2, l_max=4000, buffer_size=400)
    longest = np.array([[max(step.info.lengths) for step in steps] for steps in ranks])
    assert np.corrcoef(longest)[0, 1] > 0.95
    assert abs(np.corrcoef(longest[0], np.arange(longest.shape[1]))[0, 1]) < 0.3


def test_pacing_leaves_no_zero_weight_steps_where_filling_the_buffer_does() -> None:
    lengths = np.random.default_rng(1).lognormal(6.2, 0.3, 3000).astype(int) + 1

    def zero_weight_steps(pacing: bool) -> int:
        total = 0
        for size in range(2400, 3000, 50):  # whether ranks part at the end is a matter of remainders
            ranks = simulate(
                lengths[:size].tolist(), world_size=8, l_max=6000, buffer_size=100, pacing=pacing, length_fn=int
            )
            total += sum(step.info.idle_ranks for step in ranks[0])
        return total

    assert zero_weight_steps(True) == 0 < zero_weight_steps(False)


@settings(deadline=None, max_examples=40)
@given(LENGTHS, st.integers(1, 6), st.integers(1, 300), st.integers(1, 40), st.randoms(use_true_random=False))
def test_ranks_without_room_change_nothing_but_the_time(lengths, world, l_max, buffer, random) -> None:  # type: ignore[no-untyped-def]
    world = min(world, len(lengths))
    data, common = dataset(lengths), {"world_size": world, "l_max": l_max, "buffer_size": buffer}
    crowded = simulate(data, has_room=lambda rank: random.random() < 0.6, **common)
    assert crowded == simulate(data, **common)


def test_the_same_seed_gives_the_same_batches() -> None:
    runs = [simulate(dataset(range(1, 50)), world_size=3, l_max=100, buffer_size=8, seed=s) for s in (5, 5, 6)]
    orders = [[step.info.indices for step in rank] for run in runs for rank in run]
    assert orders[:3] == orders[3:6] != orders[6:]


@pytest.mark.parametrize("loss_scaling", ["sample", "none"])
def test_other_scalings_weigh_by_samples_or_not_at_all(loss_scaling: str) -> None:
    lengths = [90] * 12 + [10] * 4
    shares = [list(range(12)), [12, 13, 14, 15]]
    ranks = simulate(dataset(lengths), world_size=2, shares=shares, l_max=100, pacing=False, loss_scaling=loss_scaling)
    for step in zip(*ranks, strict=True):
        samples = [len(rank.info.indices) for rank in step]
        weights = [rank.info.loss_weight for rank in step]
        if loss_scaling == "sample":
            assert weights == [2 * n / sum(samples) for n in samples]
        else:
            assert weights == [float(n > 0) for n in samples]


def test_a_batch_without_loss_runs_on_a_stand_in_that_has_some() -> None:
    # The sample's content says how many of its tokens bear loss.
    data = [[1] * 10, [0] * 10, [1] * 10, [0] * 10]
    ranks = simulate(
        data, world_size=2, shares=[[0, 2], [1, 3]], l_max=10, loss_tokens=lambda batch: sum(map(sum, batch))
    )
    assert trained(ranks) == Counter(range(4)), "samples without loss count as seen"
    for step in ranks[1]:
        assert step.info.loss_weight == 0.0
        assert from_bytes(step.payload) == [[1] * 10], "rank 1 never had a batch with loss: one of rank 0's"
    assert [step.info.loss_weight for step in ranks[0]] == [2.0, 2.0]


def test_a_dataset_without_any_loss_has_weight_zero_everywhere() -> None:
    ranks = simulate([[0] * 5] * 6, world_size=2, l_max=10, loss_tokens=lambda batch: 0)
    assert {step.info.loss_weight for steps in ranks for step in steps} == {0.0}
    assert trained(ranks) == Counter(range(6))


@pytest.mark.parametrize("pacing", [True, False])
def test_a_rank_whose_samples_are_all_dropped_keeps_step_on_a_peer_s_batch(pacing: bool) -> None:
    data = dataset([5] * 6 + [50] * 6)
    ranks = simulate(
        data,
        world_size=2,
        shares=[list(range(6)), list(range(6, 12))],
        l_max=10,
        oversize="drop",
        buffer_size=2,
        pacing=pacing,
    )
    assert trained(ranks) == Counter(range(6))
    assert len(ranks[0]) == len(ranks[1]) > 0
    assert ranks[0][-1].info.samples_done == 12, "dropped samples count as done"
    assert ranks[0][-1].info.samples_dropped == 6
    assert all(from_bytes(step.payload) for step in ranks[1])


def test_a_dataset_of_which_everything_is_dropped_ends_without_a_step() -> None:
    assert simulate(dataset([50] * 4), world_size=2, l_max=10, oversize="drop") == [[], []]


@pytest.mark.parametrize(
    ("lengths", "settings", "says"),
    [
        ([5, 5, 0, 5], {}, "sample 2 is empty"),
        ([5, 5, 50, 5], {"oversize": "error"}, "sample 2 has 50 tokens, over l_max=10"),
    ],
)
def test_a_sample_that_a_policy_refuses_stops_every_rank(lengths, settings, says) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ODBError, match=f"rank 0: {says}"):
        simulate(dataset(lengths), world_size=2, shares=[[0, 2], [1, 3]], l_max=10, **settings)


def test_empty_samples_can_be_dropped_and_are_counted() -> None:
    ranks = simulate(dataset([5, 0, 5, 0, 0, 5]), world_size=2, l_max=10, empty="drop", buffer_size=1)
    assert trained(ranks) == Counter([0, 2, 5])
    assert ranks[0][-1].info.samples_done == 6
    assert ranks[0][-1].info.samples_dropped == 3


@pytest.mark.parametrize("lengths", [[500] * 6, [500, 5, 5, 5, 5, 5], [5, 5, 5, 5, 5, 500]])
def test_oversize_samples_are_kept_in_batches_of_their_own(lengths: list[int]) -> None:
    ranks = simulate(dataset(lengths), world_size=2, l_max=100)
    assert trained(ranks) == Counter(range(6))
    for steps in ranks:
        for step in steps:
            assert len(step.info.indices) <= 1 or max(step.info.lengths) <= 100


def test_a_budget_of_one_token_gives_single_samples() -> None:
    ranks = simulate(dataset([3, 1, 2, 9]), world_size=2, l_max=1)
    assert all(len(step.info.indices) == 1 for steps in ranks for step in steps)


def test_collate_errors_name_the_samples_and_reach_every_rank() -> None:
    def collate(samples: list[list[int]]) -> list[list[int]]:
        if samples[0][0] == 3:
            raise KeyError("pixel_values")
        return samples

    with pytest.raises(ODBError, match=r"rank \d: collating samples \[3\]: KeyError: 'pixel_values'") as error:
        simulate(dataset([5] * 6), world_size=2, l_max=5, collate_fn=collate)
    assert "Traceback" in str(error.value)


def test_ranks_with_different_settings_are_told_so() -> None:
    from odb_libra_lightning.odb.config import LoaderConfig
    from odb_libra_lightning.odb.epoch import EpochStart, RankEpoch
    from odb_libra_lightning.odb.transport import play
    from tests.odb.simulation import ListSource

    def rank(number: int) -> RankEpoch:
        config = LoaderConfig(l_max=10 + number)
        return RankEpoch(
            rank=number,
            start=EpochStart(),
            ledger=EpochLedger(2, 2, equal=True),
            config=config,
            source=ListSource([[1], [1]], number, config),
            collate_fn=list,
        )

    with pytest.raises(ODBError, match=r"l_max must be the same on every rank, got \[10, 11\]"):
        play(rank(number).run() for number in range(2))
