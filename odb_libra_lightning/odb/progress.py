"""How far training is, and how many steps an epoch has: pure rules for loaders without a length.

The samples of an epoch are known and its steps are not, so schedules run on the share of samples that is done, and the
number of steps is estimated.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from odb_libra_lightning.odb.alignment import align_groups, group_target
from odb_libra_lightning.odb.cost import TokenCost
from odb_libra_lightning.odb.grouping import group_by_budget
from odb_libra_lightning.odb.pacing import views_due

Decay = Literal["cosine", "linear", "constant"]
DECAYS: tuple[Decay, ...] = ("cosine", "linear", "constant")

# Epochs that `estimate_steps` plays, and samples that it plays of each at the most.
_PLAYS = 25
_SAMPLES_PER_PLAY = 100_000


def lr_factor(progress: float, *, warmup: float = 0.0, decay: Decay = "cosine", minimum: float = 0.0) -> float:
    """Factor on the learning rate at a point of training: linear warm-up, then decay.

    Example:
        >>> [round(lr_factor(p, warmup=0.2, minimum=0.1), 3) for p in (0, 0.1, 0.2, 0.6, 1)]
        [0.0, 0.5, 1.0, 0.55, 0.1]

    Args:
        progress: share of training that is done, from 0. More than 1 counts as 1: the last batch oversteps a budget.
        warmup: share of training in which the factor rises from 0 to 1, at least 0 and below 1.
        decay: `"cosine"` and `"linear"` fall from 1 to `minimum`, `"constant"` stays at 1.
        minimum: the factor at the end, from 0 to 1.

    Returns:
        The factor: exactly 1 at the end of the warm-up, exactly `minimum` at the end, never rising in between.

    Raises:
        ValueError: for a value out of its range, or a `minimum` that a constant factor would never reach.
    """
    check_shape(warmup=warmup, decay=decay, minimum=minimum)
    if not progress >= 0:
        raise ValueError(f"progress must be a share of training, at least 0, got {progress}")
    if progress < warmup:
        return progress / warmup
    if progress == warmup or decay == "constant":
        return 1.0
    if progress >= 1:
        return minimum
    done = (progress - warmup) / (1 - warmup)
    left = (1 + math.cos(math.pi * done)) / 2 if decay == "cosine" else 1 - done
    return min(minimum + (1 - minimum) * left, 1.0)


def check_shape(*, warmup: float, decay: str, minimum: float) -> None:
    """Refuse a shape of `lr_factor` that cannot work.

    Raises:
        ValueError: naming the argument, its value and what would fit.
    """
    if decay not in DECAYS:
        raise ValueError(f"decay must be one of {DECAYS}, got {decay!r}")
    if not 0 <= warmup < 1:
        raise ValueError(f"warmup is a share of training, at least 0 and below 1, got {warmup}")
    if not 0 <= minimum <= 1:
        raise ValueError(f"minimum is a factor from 0 to 1, got {minimum}")
    if decay == "constant" and minimum != 0:
        raise ValueError(f"decay='constant' never falls to minimum={minimum}: leave minimum out, or choose a decay")


@dataclass(frozen=True, kw_only=True)
class Consumed:
    """How far training has come, over all ranks.

    Attributes:
        epochs: epochs done, with the share of the current one.
        updates: optimizer updates.
        samples: samples trained on.
        tokens: their realized lengths summed.
    """

    epochs: float = 0.0
    updates: int = 0
    samples: int = 0
    tokens: int = 0

    def plus(self, samples: int, tokens: int) -> Consumed:
        """The same after more samples, of so many tokens in all."""
        return replace(self, samples=self.samples + samples, tokens=self.tokens + tokens)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Where training ends: where the first of these does; None for no limit.

    Attributes:
        epochs: epochs.
        updates: optimizer updates.
        samples: samples, over all ranks.
        tokens: tokens without padding, over all ranks.
    """

    epochs: int | None = None
    updates: int | None = None
    samples: int | None = None
    tokens: int | None = None

    def progress(self, done: Consumed) -> float:
        """Share of training that is done, from 0 to 1: that of the limit which is nearest.

        Raises:
            ValueError: if there is no limit.
        """
        pairs: list[tuple[float, int | None]] = [
            (done.epochs, self.epochs),
            (done.updates, self.updates),
            (done.samples, self.samples),
            (done.tokens, self.tokens),
        ]
        shares = [part / whole if whole > 0 else 1.0 for part, whole in pairs if whole is not None]
        if not shares:
            raise ValueError("training has no end to measure progress by: limit its epochs, updates, samples or tokens")
        return min(max(shares), 1.0)


def epoch_share(
    samples_done: int, samples_total: int | None, *, steps_done: int = 0, steps_limit: int | None = None
) -> float:
    """Share of an epoch that is done, from 0 to 1.

    Args:
        samples_done: samples of the epoch that are trained on or dropped, all ranks.
        samples_total: samples that the epoch draws, all ranks; None where nobody knows.
        steps_done: steps of the epoch that are done.
        steps_limit: step after which the epoch is cut off; None if it is not.

    Returns:
        The larger share, of samples or of steps; 0 if neither total is known.
    """
    by_samples = samples_done / samples_total if samples_total else 0.0
    by_steps = steps_done / steps_limit if steps_limit else 0.0
    return min(max(by_samples, by_steps), 1.0)


@dataclass(frozen=True)
class StepEstimate:
    """Number of steps of an epoch, as far as it is known.

    Attributes:
        steps: expected number of steps (batches of one rank; the same on every rank).
        error: its standard error, in steps; infinite where nothing is known of it.
    """

    steps: float
    error: float

    def at_most(self, errors: float = 3.0) -> int:
        """A whole number of steps that is hardly exceeded: so many standard errors above the estimate."""
        return math.ceil(self.steps + errors * self.error)


def estimate_epoch(*, samples_done: int, samples_total: int, steps_done: int, spread: float) -> StepEstimate:
    """Steps that an epoch will have had, from its steps so far.

    The `R` samples that are left are divided by the mean `m` samples of the `n` steps so far. With `c = spread / m`,
    `k = R / m` steps to come have the standard deviation `c sqrt(k (1 + k / n))`: that of steps drawn from a finite
    number `n + k`, and of independent ones just as well (renewal theorem, and the error of `m`). Since `k` itself is
    too low where `m` is too high, the error is the `e` with `e = c sqrt((k + e) (1 + k / n))`, as in Wilson's interval.
    Half a step is added in squares, since the last step is not full.

    Args:
        samples_done: samples of the epoch that are trained on or dropped, all ranks, at least 1.
        samples_total: samples that the epoch draws, all ranks.
        steps_done: steps that took, at least 1.
        spread: standard deviation of the samples of a step, all ranks; NaN or infinite where it is unknown.

    Returns:
        The estimate; at the end of the epoch the count itself, with error 0.

    Raises:
        ValueError: if nothing is done yet, or more than there is.
    """
    if steps_done < 1 or not 1 <= samples_done <= samples_total:
        raise ValueError(
            f"an estimate needs a step done and 1 to {samples_total} samples, got {steps_done} steps and "
            f"{samples_done} samples"
        )
    left = samples_total - samples_done
    if left == 0:
        return StepEstimate(float(steps_done), 0.0)
    mean = samples_done / steps_done
    steps_left = left / mean
    error = math.inf
    if math.isfinite(spread):
        variance = (spread / mean) ** 2 * (1 + steps_left / steps_done)  # of each step to come
        error = math.hypot(variance / 2 + math.sqrt(variance * (variance / 4 + steps_left)), 0.5)
    return StepEstimate(steps_done + steps_left, error)


class Spread:
    """Standard deviation of a stream of numbers, by Welford's algorithm."""

    def __init__(self) -> None:
        self._count = 0
        self._mean = 0.0
        self._squares = 0.0

    def add(self, value: float) -> None:
        """Count a number."""
        self._count += 1
        before = value - self._mean
        self._mean += before / self._count
        self._squares += before * (value - self._mean)

    @property
    def value(self) -> float:
        """The sample standard deviation; NaN for fewer than two numbers."""
        return math.sqrt(self._squares / (self._count - 1)) if self._count > 1 else math.nan


def estimate_steps(
    lengths: Sequence[int],
    *,
    num_samples: int,
    l_max: int,
    world_size: int = 1,
    buffer_size: int = 1024,
    cost: TokenCost | None = None,
    seed: int = 0,
) -> StepEstimate:
    """Steps of an epoch before it begins, by playing the grouping of all ranks on a sample of lengths.

    For schedules that want a total in `configure_optimizers`. Twenty-five epochs are played, each on another resample
    of the lengths (bootstrap), or in another order if the lengths are those of the whole dataset.

    Example:
        >>> lengths = [len(dataset[i]["input_ids"]) for i in range(0, len(dataset), 50)]  # doctest: +SKIP
        >>> estimate_steps(lengths, num_samples=len(dataset), l_max=8192, world_size=8)  # doctest: +SKIP
        StepEstimate(steps=1432.0, error=19.3)

    Args:
        lengths: realized lengths of samples drawn at random, tokens; some hundreds at least. Leave out those that
            `oversize` or `empty` would drop.
        num_samples: samples in the dataset, without those dropped.
        l_max: token budget of a batch on one rank, tokens.
        world_size: number of data-parallel ranks.
        buffer_size: most samples that a rank draws for a round.
        cost: what `l_max` limits; None for padded tokens.
        seed: seed of the resampling.

    Returns:
        The estimate in steps: batches of one rank, also under accumulation. Its error covers which lengths were drawn
        and in which order, and not that the sample may be unlike the dataset.

    Raises:
        ValueError: if a number is below 1, or there are fewer than two lengths for more than one sample.

    Complexity: sorts `buffer_size` lengths at a time, up to 100,000 an epoch, or those of one round of all ranks: about
    half a second, and two for 256 ranks.
    """
    for name, number in {
        "num_samples": num_samples,
        "l_max": l_max,
        "world_size": world_size,
        "buffer_size": buffer_size,
    }.items():
        if number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}")
    if len(lengths) < min(num_samples, 2):
        raise ValueError(f"{len(lengths)} lengths say nothing of {num_samples} samples: give some hundreds")
    views = -(-num_samples // world_size)
    rounds = -(-views // buffer_size)
    played = min(rounds, max(_SAMPLES_PER_PLAY // (world_size * buffer_size), 1))
    draws = -(-views * played // rounds)
    generator = random.Random(seed)
    counts = []
    for _ in range(_PLAYS):
        if len(lengths) >= num_samples:
            order = generator.sample(list(lengths), num_samples)
            # Shares are equal: the first of the order are drawn once more.
            pool = (order + order[: views * world_size - num_samples])[: draws * world_size]
        else:
            pool = generator.choices(generator.choices(lengths, k=len(lengths)), k=draws * world_size)
        steps = _play_epoch(
            pool, l_max=l_max, world_size=world_size, buffer_size=buffer_size, cost=cost or TokenCost(), rounds=played
        )
        counts.append(steps * rounds / played)
    mean = sum(counts) / _PLAYS
    variance = sum((count - mean) ** 2 for count in counts) / (_PLAYS - 1)
    # What comes is one epoch, not the mean of many, and the mean of the plays is itself not exact.
    return StepEstimate(mean, math.sqrt(variance * (1 + 1 / _PLAYS)))


def _play_epoch(
    lengths: list[int], *, l_max: int, world_size: int, buffer_size: int, cost: TokenCost, rounds: int
) -> int:
    """Steps of an epoch of so many rounds; rank `r` draws every `world_size`-th length."""
    shares = [lengths[rank::world_size] for rank in range(world_size)]
    buffers: list[list[int]] = [[] for _ in shares]
    steps = 0
    number = 0
    while number < rounds or any(buffers):
        for share, buffer in zip(shares, buffers, strict=True):
            drawn = views_due(number - 1, views=len(share), rounds=rounds)
            buffer.extend(share[drawn : views_due(number, views=len(share), rounds=rounds)])
        number += 1
        groups, tails = [], []
        for buffer in buffers:
            closed, tail = group_by_budget(buffer, l_max, cost=cost)
            if number >= rounds and tail:
                closed, tail = [*closed, tail], []
            groups.append(closed)
            tails.append(tail)
        target = group_target([len(g) for g in groups], [buffer_size] * world_size, [sum(map(len, g)) for g in groups])
        steps += target
        for rank, buffer in enumerate(buffers):
            back = align_groups(groups[rank], target)[1] if target else []
            buffers[rank] = [buffer[position] for position in [*tails[rank], *back]]
    return steps
