"""A model of the memory of a training step, fitted to measurements, and the token budget that follows from it.

Pure numbers: `memory_probe` measures, this fits, `odb.cost` uses what comes out.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_LONGEST = 2**31  # no sample is as long, so beyond it a quadratic term cannot matter


@dataclass(frozen=True)
class MemoryPoint:
    """One measurement: the peak of a training step on `samples` samples of `length` tokens each, in bytes."""

    samples: int
    length: int
    peak_bytes: int


@dataclass(frozen=True)
class MemoryModel:
    """Peak memory of a training step on `n` samples padded to `l` tokens: `base + n * (a*l + b*l*l)` bytes.

    Attributes:
        base: bytes that no batch changes: weights, gradients, optimizer states.
        per_token: `a`, bytes.
        per_token_squared: `b`, bytes; 0 where nothing grows with the square of the length.
        residual: largest error of the fit over the points it was fitted to, as a share of the measured peak.

    Raises:
        ValueError: a value that is not a finite number of at least 0.
    """

    base: float
    per_token: float
    per_token_squared: float
    residual: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what is no amount of memory."""
        for name, value in dataclasses.asdict(self).items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise ValueError(f"{name} must be a finite number of at least 0, got {value!r}")

    def predict(self, samples: int, length: int) -> float:
        """Peak of a step on so many samples of so many tokens, bytes."""
        return self.base + samples * length * (self.per_token + self.per_token_squared * length)

    def budget(self, bytes_available: float) -> tuple[int, int | None]:
        """`l_max` and `quadratic_length` whose batches stay within so many bytes, by this model.

        Both are rounded to whole tokens so that no batch within the budget is predicted above `bytes_available`. A
        single sample that exceeds the budget alone still does; that is what `oversize` is for.

        Args:
            bytes_available: memory for the training process, bytes, `base` included. Leave room for what the
                model does not know: its `residual`, fragmentation, other processes.

        Returns:
            The budget in tokens, and the length at which the quadratic term equals the linear one; None where
            there is no quadratic term and the cost is linear.

        Raises:
            ValueError: what is available does not hold `base` and one token, or nothing grows with a batch.
        """
        a, b = self.per_token, self.per_token_squared
        if not a and not b:
            raise ValueError("this model grows with neither term: measure with longer samples")
        unit = max(a, b)  # bytes that one token of budget stands for
        quadratic_length = int(min(max(a / b, 1), _LONGEST)) if b else None
        l_max = int((bytes_available - self.base) / unit)
        if l_max < 1:
            raise ValueError(
                f"{bytes_available:,.0f} bytes do not hold the {self.base:,.0f} that no batch changes and one token "
                f"({unit:,.0f}): shrink the model or its optimizer's states, or shard them"
            )
        return l_max, quadratic_length

    def save(self, path: str | Path) -> None:
        """Write it as JSON."""
        Path(path).write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> MemoryModel:
        """Read what `save` wrote.

        Raises:
            ValueError: not JSON, other keys, or values that are no amounts of memory.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is no JSON: {error}") from None
        if not isinstance(values, dict) or sorted(values) != sorted(names):
            raise ValueError(f"{path} is no memory model: expected an object with just the keys {names}")
        return cls(**values)


def fit_memory(points: Sequence[MemoryPoint]) -> MemoryModel:
    """Least squares with no coefficient below 0, over at least three points.

    The best non-negative fit is the plain least-squares fit on those of its coefficients that are above 0. There are
    three, so all eight choices are tried.

    Args:
        points: measurements of at least three batches, of at least two lengths; more, and of several numbers of
            samples, make `residual` say something.

    Raises:
        ValueError: points from which the three coefficients cannot be told.
    """
    samples, lengths, peaks = np.array([dataclasses.astuple(p) for p in points], dtype=np.float64).reshape(-1, 3).T
    terms = np.stack([np.ones_like(peaks), samples * lengths, samples * lengths**2], axis=1)
    scale = terms.max(axis=0, initial=1.0)  # columns of like size: squares of lengths are eight digits above 1
    terms = terms / scale
    if np.linalg.matrix_rank(terms) < 3:
        raise ValueError(
            f"{[(p.samples, p.length) for p in points]} (samples, length) do not tell base, linear and quadratic term "
            "apart: measure at least three batches, of at least two lengths"
        )
    fits = [_fit_on(chosen, terms, peaks) for chosen in itertools.product([False, True], repeat=3)]
    best = min((fit for fit in fits if (fit >= 0).all()), key=lambda fit: float(((terms @ fit - peaks) ** 2).sum()))
    residual = float((np.abs(terms @ best - peaks) / peaks).max())
    base, linear, quadratic = (best / scale).tolist()
    return MemoryModel(base, linear, quadratic, residual)


def _fit_on(chosen: Sequence[bool], terms: NDArray[np.float64], peaks: NDArray[np.float64]) -> NDArray[np.float64]:
    fit = np.zeros(len(chosen))
    if any(chosen):
        fit[list(chosen)] = np.linalg.lstsq(terms[:, list(chosen)], peaks, rcond=None)[0]
    return fit
