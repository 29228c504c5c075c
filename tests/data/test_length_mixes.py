"""Length mixes against their records, and the records against the formulas of the log-normal distribution."""

from __future__ import annotations

import dataclasses
import math
import pickle

import numpy as np
import pytest

from odb_libra_lightning.data.length_mixes import (
    LENGTH_MIXES,
    LengthMix,
    histogram,
    length_mix,
    log_normals,
)

PAPER_CV = {"ultrachat": 0.48, "llava": 0.29, "sharegpt4o": 1.00, "mm-mix": 0.80}
LIBRA_QUANTILES = {"libra-256k": (607, 33_000), "libra-1m": (644, 71_006)}  # median and 99th percentile


def exact(pieces: list[tuple[float, float, float]], below: float) -> tuple[float, float, float]:
    """Mean, CV and share below a length, of a mixture of log-normals."""
    mean = sum(share * m for share, m, _ in pieces)
    second = sum(share * m**2 * (1 + cv**2) for share, m, cv in pieces)
    share_below = 0.0
    for share, m, cv in pieces:
        sigma = math.sqrt(math.log(1 + cv**2))
        z = (math.log(below / m) + sigma**2 / 2) / sigma
        share_below += share * (1 + math.erf(z / math.sqrt(2))) / 2
    return mean, math.sqrt(second / mean**2 - 1), share_below


def test_the_four_of_the_paper_have_its_figures() -> None:
    assert {name: LENGTH_MIXES[name].cv for name in PAPER_CV} == PAPER_CV
    assert LENGTH_MIXES["mm-mix"].f_s == 0.37
    assert all(name == mix.name and len(mix.source) > 40 for name, mix in LENGTH_MIXES.items())


@pytest.mark.parametrize("name", list(PAPER_CV))
@pytest.mark.parametrize("seed", [0, 1])
def test_lengths_have_the_mean_cv_and_f_s_of_the_record(name: str, seed: int) -> None:
    mix = LENGTH_MIXES[name]
    lengths = length_mix(name, 50_000, seed=seed)
    assert (lengths.dtype, lengths.shape, lengths.min() >= 1) == (np.int64, (50_000,), True)
    assert lengths.mean() == pytest.approx(mix.mean, rel=0.02)
    assert lengths.std() / lengths.mean() == pytest.approx(mix.cv, rel=0.03)
    assert (lengths < mix.l_max / 4).mean() == pytest.approx(mix.f_s, abs=0.01)


@pytest.mark.parametrize("name", [*PAPER_CV, *LIBRA_QUANTILES])
def test_records_follow_from_the_formulas(name: str) -> None:
    mix = LENGTH_MIXES[name]
    (pieces,) = mix.draw.args  # type: ignore[attr-defined]
    mean, cv, f_s = exact(pieces, below=mix.l_max / 4)
    assert mean == pytest.approx(mix.mean, rel=0.001)
    assert cv == pytest.approx(mix.cv, rel=0.01)
    assert f_s == pytest.approx(mix.f_s, abs=0.002)


@pytest.mark.parametrize("name", list(LIBRA_QUANTILES))
def test_the_long_tails_have_the_quantiles_of_their_paper(name: str) -> None:
    """Mean and CV of such tails are a matter of a few draws, so these are checked by formula, the draws by rank."""
    mix = LENGTH_MIXES[name]
    median, percentile_99 = LIBRA_QUANTILES[name]
    sigma = math.sqrt(math.log(1 + mix.cv**2))
    assert mix.mean / math.exp(sigma**2 / 2) == pytest.approx(median, rel=0.001)
    assert mix.mean * math.exp(2.3263479 * sigma - sigma**2 / 2) == pytest.approx(percentile_99, rel=0.001)
    for seed in (0, 1):
        lengths = length_mix(name, 200_000, seed=seed)
        for quantile, expected in ((0.5, median), (0.99, percentile_99)):
            four_sigma = 4 * math.sqrt(quantile * (1 - quantile) / len(lengths))
            assert (lengths > expected).mean() == pytest.approx(1 - quantile, abs=four_sigma)
        assert (lengths < mix.l_max / 4).mean() == pytest.approx(mix.f_s, abs=0.001)


def test_the_histogram_is_drawn_bin_by_bin() -> None:
    mix = LENGTH_MIXES["magiattention"]
    bins = mix.draw.args[0]  # type: ignore[attr-defined]
    total = sum(count for _, _, count in bins)
    assert (total, len(bins)) == (13_463_214, 14)
    assert [a[1] + 1 for a in bins[:-1]] == [b[0] for b in bins[1:]], "no length in two bins or between two"

    # Every length of every bin, and 0 as 1.
    moments = [(count / total, np.maximum(np.arange(low, high + 1.0), 1)) for low, high, count in bins]
    mean = sum(share * lengths.mean() for share, lengths in moments)
    second = sum(share * (lengths**2).mean() for share, lengths in moments)
    assert mix.mean == pytest.approx(mean, rel=0.0001)
    assert mix.cv == pytest.approx(math.sqrt(second / mean**2 - 1), rel=0.0001)
    assert mix.f_s == pytest.approx(sum(s * (lengths < mix.l_max / 4).mean() for s, lengths in moments), abs=0.0001)

    size = 200_000
    drawn = length_mix("magiattention", size)
    edges = [low - 0.5 for low, _, _ in bins] + [bins[-1][1] + 0.5]
    counts, _ = np.histogram(drawn, bins=edges)
    expected = np.array([count for _, _, count in bins]) / total * size
    assert (np.abs(counts - expected) < 4.5 * np.sqrt(expected)).all()
    inside = drawn[(drawn >= 501) & (drawn <= 1024)]
    assert inside.mean() == pytest.approx(762.5, rel=0.01)
    assert (inside.min(), inside.max()) == (501, 1024)


def test_mm_mix_has_two_modes() -> None:
    counts, _ = np.histogram(np.log2(length_mix("mm-mix", 50_000)), bins=np.arange(6, 15, 0.5))
    peaks = [i for i in range(1, len(counts) - 1) if counts[i - 1] < counts[i] > counts[i + 1]]
    assert len(peaks) == 2
    assert counts[peaks[0] : peaks[1]].min() < counts[peaks].min() / 10


def test_a_seed_gives_the_same_lengths_and_another_seed_others() -> None:
    first = length_mix("mm-mix", 1000, seed=3)
    assert np.array_equal(first, length_mix("mm-mix", 1000, seed=3))
    assert not np.array_equal(first, length_mix("mm-mix", 1000, seed=4))
    assert length_mix("llava", 0).shape == (0,)


def test_a_mix_of_ones_own_needs_no_registry() -> None:
    mix = LengthMix(
        name="halves", source="ours", mean=1.0, cv=0.0, f_s=1.0, l_max=8, draw=lambda rng, size: np.full(size, 0.2)
    )
    assert mix.sample(3).tolist() == [1, 1, 1]
    constant = LengthMix(
        name="constant", source="ours", mean=7.0, cv=0.0, f_s=0.0, l_max=8, draw=log_normals((1.0, 7.0, 0.0))
    )
    assert constant.sample(3).tolist() == [7, 7, 7]
    with pytest.raises(dataclasses.FrozenInstanceError):
        mix.name = "other"  # type: ignore[misc]
    with pytest.raises(TypeError):
        LENGTH_MIXES["halves"] = mix  # type: ignore[index]


def test_registered_mixes_travel_between_processes() -> None:
    for mix in LENGTH_MIXES.values():
        copy = pickle.loads(pickle.dumps(mix))
        assert np.array_equal(copy.sample(10, seed=1), mix.sample(10, seed=1))


def test_bad_arguments_are_named() -> None:
    with pytest.raises(
        ValueError, match=r"no length mix is called 'ultra': there are \['libra-1m', 'libra-256k', 'llava'"
    ):
        length_mix("ultra", 1)
    with pytest.raises(ValueError, match="size=-1"):
        length_mix("llava", -1)
    with pytest.raises(ValueError, match=r"the shares \[0.5\] must sum to 1"):
        log_normals((0.5, 100, 1.0))
    with pytest.raises(ValueError, match="a piece has a share and a mean above 0"):
        log_normals((1.0, 0, 1.0))
    with pytest.raises(ValueError, match=r"\(9, 8, 1\): a bin has 0 <= shortest <= longest"):
        histogram((0, 8, 1), (9, 8, 1))
    with pytest.raises(ValueError, match="at least one bin"):
        histogram()
