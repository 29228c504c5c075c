"""Distributions of sample lengths by name, for simulations, benchmarks and tests.

A mix is a recipe for lengths, not data: log-normal pieces whose spread is that of a real dataset, or a histogram of
one. Where a source gives a figure the mix has it, and `LengthMix.source` says which figures those are; the others are
our choice.

To add a mix to the registry, enter it into `LENGTH_MIXES` in this file. To use one without that, build a `LengthMix`
and call its `sample`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

Draw = Callable[[np.random.Generator, int], NDArray[np.float64]]


@dataclass(frozen=True, kw_only=True)
class LengthMix:
    """A named distribution of lengths, with what is known of it.

    Attributes:
        name: the name in the registry.
        source: where its figures come from, in words.
        mean: mean length, tokens.
        cv: standard deviation over mean.
        f_s: share of samples shorter than a quarter of `l_max`.
        l_max: budget of padded tokens that goes with it, tokens a rank.
        draw: lengths as floats, from a generator and a number of samples; rounded and raised to 1 by `sample`.
    """

    name: str
    source: str
    mean: float
    cv: float
    f_s: float
    l_max: int
    draw: Draw = field(repr=False)

    def sample(self, size: int, *, seed: int = 0) -> NDArray[np.int64]:
        """Independent lengths, the same for the same seed: int64 `[size]`, tokens, each at least 1.

        Raises:
            ValueError: `size` is negative.
        """
        if size < 0:
            raise ValueError(f"size={size}: a number of lengths is at least 0")
        drawn = self.draw(np.random.default_rng(seed), size)
        return np.maximum(np.rint(drawn), 1).astype(np.int64)


def log_normals(*pieces: tuple[float, float, float]) -> Draw:
    """Mixture of log-normal distributions.

    Args:
        pieces: of each its share, its mean in tokens and its CV; the shares sum to 1.

    Raises:
        ValueError: a piece that is no distribution, or shares that do not sum to 1.
    """
    for share, mean, cv in pieces:
        if not (share > 0 and mean > 0 and cv >= 0):
            raise ValueError(f"{(share, mean, cv)}: a piece has a share and a mean above 0, and a CV of at least 0")
    if abs(sum(share for share, _, _ in pieces) - 1) > 1e-9:
        raise ValueError(f"the shares {[share for share, _, _ in pieces]} must sum to 1")
    return partial(_draw_log_normals, pieces)


def _draw_log_normals(
    pieces: Sequence[tuple[float, float, float]], rng: np.random.Generator, size: int
) -> NDArray[np.float64]:
    shares, means, cvs = np.array(pieces, dtype=np.float64).T
    variance = np.log1p(cvs**2)  # of the logarithm
    piece = rng.choice(len(pieces), size=size, p=shares / shares.sum())
    drawn: NDArray[np.float64] = rng.lognormal((np.log(means) - variance / 2)[piece], np.sqrt(variance)[piece])
    return drawn


def histogram(*bins: tuple[int, int, int]) -> Draw:
    """Whole lengths drawn by a histogram: a bin by its count, and within the bin every length alike.

    Args:
        bins: of each its shortest and its longest length in tokens, both in it, and its count.

    Raises:
        ValueError: no bins, or one that is empty or upside down.
    """
    for shortest, longest, count in bins:
        if not (0 <= shortest <= longest and count > 0):
            raise ValueError(f"{(shortest, longest, count)}: a bin has 0 <= shortest <= longest and a count above 0")
    if not bins:
        raise ValueError("a histogram has at least one bin")
    return partial(_draw_histogram, bins)


def _draw_histogram(bins: Sequence[tuple[int, int, int]], rng: np.random.Generator, size: int) -> NDArray[np.float64]:
    shortest, longest, count = np.array(bins, dtype=np.int64).T
    which = rng.choice(len(bins), size=size, p=count / count.sum())
    drawn: NDArray[np.float64] = rng.integers(shortest[which], longest[which], endpoint=True).astype(np.float64)
    return drawn


_MAGIATTENTION = (
    (0, 10, 30_254),
    (11, 50, 391_188),
    (51, 100, 699_596),
    (101, 200, 1_377_757),
    (201, 500, 3_794_735),
    (501, 1024, 3_316_785),
    (1025, 2048, 2_106_566),
    (2049, 4096, 988_525),
    (4097, 8192, 410_002),
    (8193, 16_384, 173_574),
    (16_385, 32_768, 115_007),
    (32_769, 65_536, 18_428),
    (65_537, 131_072, 22_513),
    (131_073, 196_608, 18_284),
)

LENGTH_MIXES: Mapping[str, LengthMix] = MappingProxyType(
    {
        mix.name: mix
        for mix in (
            LengthMix(
                name="ultrachat",
                source=(
                    "Like UltraChat (text) in the ODB paper: CV and l_max are the paper's; the mean follows from its "
                    "73.4 samples an update on 8 ranks. One log-normal piece."
                ),
                mean=1300,
                cv=0.48,
                f_s=0.983,
                l_max=12_288,
                draw=log_normals((1.0, 1300, 0.48)),
            ),
            LengthMix(
                name="llava",
                source=(
                    "Like LLaVA (images and text) in the ODB paper: CV and l_max are the paper's; the mean is our "
                    "choice, 300 visual tokens of a 640 x 480 image and as many of text. One log-normal piece."
                ),
                mean=600,
                cv=0.29,
                f_s=1.0,
                l_max=16_384,
                draw=log_normals((1.0, 600, 0.29)),
            ),
            LengthMix(
                name="sharegpt4o",
                source=(
                    "Like ShareGPT4o (images and long text) in the ODB paper: CV and l_max are the paper's; the mean "
                    "follows from its 52.8 samples an update on 8 ranks. One log-normal piece; a few samples in a "
                    "thousand are longer than l_max."
                ),
                mean=2100,
                cv=1.0,
                f_s=0.855,
                l_max=14_336,
                draw=log_normals((1.0, 2100, 1.0)),
            ),
            LengthMix(
                name="mm-mix",
                source=(
                    "Like MM-Mix (OCR, visual questions, captions) in the ODB paper: two modes, f_s and l_max are the "
                    "paper's, the CV is what its fit of speed-up to CV and f_s implies; the means are our choice. "
                    "36 % short answers, 64 % long captions, log-normal each."
                ),
                mean=4304,
                cv=0.80,
                f_s=0.37,
                l_max=12_288,
                draw=log_normals((0.36, 400, 0.5), (0.64, 6500, 0.34)),
            ),
            LengthMix(
                name="magiattention",
                source=(
                    "Document lengths of the long-context corpus in MagiAttention's benchmarks "
                    "(github.com/SandAI-org/MagiAttention, exps/dist_attn/benchmark/datasets/default, Apache-2.0): "
                    "13,463,214 documents in 14 bins, drawn uniformly within a bin; 0 counts as 1 token. l_max is our "
                    "choice."
                ),
                mean=1782.5,
                cv=4.481,
                f_s=0.997,
                l_max=262_144,
                draw=histogram(*_MAGIATTENTION),
            ),
            LengthMix(
                name="libra-256k",
                source=(
                    "Like the 256K corpus of the Libra paper: the median of 607 and the 99th percentile of 33,000 "
                    "tokens are the paper's, the rest follows from taking them for one log-normal piece, which has no "
                    "longest document. l_max is the packed length."
                ),
                mean=2653,
                cv=4.255,
                f_s=0.997,
                l_max=262_144,
                draw=log_normals((1.0, 2653, 4.255)),
            ),
            LengthMix(
                name="libra-1m",
                source=(
                    "Like the 1M corpus of the Libra paper: the median of 644 and the 99th percentile of 71,006 "
                    "tokens are the paper's, the rest follows from taking them for one log-normal piece, which has no "
                    "longest document. l_max is the packed length."
                ),
                mean=4969,
                cv=7.651,
                f_s=0.9985,
                l_max=1_048_576,
                draw=log_normals((1.0, 4969, 7.651)),
            ),
        )
    }
)


def length_mix(name: str, size: int, *, seed: int = 0) -> NDArray[np.int64]:
    """Lengths of a registered mix: int64 `[size]`, tokens, each at least 1, the same for the same seed.

    Example:
        >>> length_mix("sharegpt4o", 20_000).mean().round(-2).item()
        2100.0

    Raises:
        ValueError: a name that is not in `LENGTH_MIXES`, or a negative size.
    """
    if name not in LENGTH_MIXES:
        raise ValueError(f"no length mix is called {name!r}: there are {sorted(LENGTH_MIXES)}")
    return LENGTH_MIXES[name].sample(size, seed=seed)
