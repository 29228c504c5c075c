"""Distributions of sample lengths by name, for simulations, benchmarks and tests.

A mix is a recipe for lengths, not data: log-normal pieces whose spread is that of a real dataset. Where a source gives
a figure the mix has it, and `LengthMix.source` says which figures those are; the others are our choice.

To add a mix to the registry, add it to `LENGTH_MIXES` below. To use one without that, build a `LengthMix` and call
its `sample`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
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


def empirical_lengths(
    observed: str | Path | Sequence[int] | NDArray[np.integer], size: int, *, seed: int = 0
) -> NDArray[np.int64]:
    """Lengths drawn with replacement from observed ones: int64 `[size]`, the same for the same seed.

    Args:
        observed: the lengths in tokens, each at least 1; or a file of them, `.npy` or text with one a line.
        size: number of lengths to draw.
        seed: seed of the draw.

    Raises:
        ValueError: no lengths, a length below 1, or what is not a flat list of whole numbers.
    """
    if size < 0:
        raise ValueError(f"size={size}: a number of lengths is at least 0")
    where = f"{observed}" if isinstance(observed, str | Path) else "observed"
    lengths = _read(Path(observed)) if isinstance(observed, str | Path) else np.asarray(observed)
    if lengths.ndim != 1 or not lengths.size or not np.issubdtype(lengths.dtype, np.integer):
        raise ValueError(
            f"{where}: expected a flat list of whole numbers with at least one, got {lengths.dtype} of shape "
            f"{list(lengths.shape)}"
        )
    if lengths.min() < 1:
        at = int(lengths.argmin())
        raise ValueError(f"{where}: length {int(lengths[at])} at position {at}, expected at least 1 token")
    return np.random.default_rng(seed).choice(lengths.astype(np.int64), size=size)


def _read(path: Path) -> NDArray[np.integer]:
    if path.suffix == ".npy":
        return np.asarray(np.load(path, allow_pickle=False))
    lines = path.read_text(encoding="utf-8").splitlines()
    lengths = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            lengths.append(int(line))
        except ValueError:
            raise ValueError(f"{path}, line {number}: expected a whole number, got {line.strip()[:40]!r}") from None
    return np.array(lengths, dtype=np.int64)
