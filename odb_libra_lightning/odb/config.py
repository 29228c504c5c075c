"""The settings of a loader: one frozen value that travels from the user to every process."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal, TypeVar, get_type_hints

from odb_libra_lightning.odb.cost import TokenCost

LossScaling = Literal["token", "sample", "none"]
OversizePolicy = Literal["keep", "drop", "error"]
EmptyPolicy = Literal["drop", "error"]
Mode = Literal["join", "non_join"]

F = TypeVar("F", bound=Callable[..., Any])

CHOICES: dict[str, tuple[Any, ...]] = {
    "loss_scaling": ("token", "sample", "none"),
    "oversize": ("keep", "drop", "error"),
    "empty": ("error", "drop"),
    "start_method": (None, "fork", "forkserver", "spawn"),
    "mode": ("join", "non_join"),
    "cost": ("linear", "quadratic"),
    "stream_sharding": ("loader", "dataset"),
    "transport": ("gloo", "store"),
}
_AT_LEAST = {
    "l_max": 1,
    "buffer_size": 1,
    "num_workers": 0,
    "prefetch_factor": 1,
    "prefetch_batches": 1,
    "seed": 0,
    "timeout": 0.001,
    "quadratic_length": 1,
    "max_samples": 1,
}
_MAY_BE_NONE = ("prefetch_factor", "quadratic_length", "max_samples")
_LONGEST_TIMEOUT = 365 * 24 * 3600
_SWITCHES = ("shuffle", "pacing", "causal_shift", "pin_memory", "persistent_workers")
_BATCH_SETTINGS = (
    *("l_max", "cost", "quadratic_length", "buffer_size", "seed", "shuffle", "max_samples", "mode", "pacing"),
    *("oversize", "empty", "loss_scaling", "causal_shift", "ignore_index", "stream_sharding"),
)


@dataclass(frozen=True, kw_only=True)
class LoaderConfig:
    """Settings of online dynamic batching.

    Attributes:
        l_max: token budget of a batch on one rank, tokens; padded tokens stay within it unless one sample
            alone is longer.
        cost: `"linear"` holds `n * l` of a batch, its padded tokens, within `l_max`; `"quadratic"` holds
            `n * (l + l*l / quadratic_length)` within it, for models whose memory grows with the square of the length.
        quadratic_length: length at which the quadratic term equals the linear one, tokens.
        buffer_size: samples that a rank groups at once. More gives less padding and a later first batch.
        num_workers: data workers a rank; 0 reads, groups and collates in the main process, for debugging.
        prefetch_factor: samples that each worker keeps ready; None lets the workers together keep one
            buffer ready.
        prefetch_batches: finished batches that wait for the trainer.
        shuffle: draw the samples in a new order in each epoch, the same on every rank.
        seed: seed of that order, and of each sample's random augmentation.
        max_samples: samples to draw in an epoch over all ranks, the first of its order; None draws all.
        mode: how an epoch ends where ranks run out of samples at different times: `"join"`, each rank trains on its
            own share to the end, the others in zero-weight steps; `"non_join"`, what is left is dealt out to all anew.
        pacing: draw the same number of samples on every rank in each round, so that all run out together;
            False fills the buffer instead, as the paper does.
        loss_scaling: what a rank's loss is weighted by: loss-bearing `"token"`s (exact), `"sample"`s, or
            `"none"`.
        loss_tokens: counts the loss-bearing tokens of a collated batch; None counts its labels.
        causal_shift: whether the loss shifts `labels` of two or more dimensions by one position, as Hugging
            Face causal models do; the first label of each row then bears no loss.
        ignore_index: label that bears no loss.
        length_fn: realized length of a sample in tokens; None reads `input_ids` and the like.
        oversize: what happens to a sample longer than `l_max`: `"keep"` it in a batch of its own, `"drop"`
            and count it, or stop with an `"error"`.
        empty: what happens to a sample of length 0: `"error"`, or `"drop"` and count it.
        stream_sharding: who shares an iterable dataset out over ranks and workers: the `"loader"`, which gives each
            every so-many-th sample of the whole stream, or the `"dataset"` itself.
        pin_memory: put the tensors of a batch into page-locked memory.
        persistent_workers: keep the collate process and its workers from one epoch to the next.
        start_method: how the collate process and its workers start; None takes Python's default.
        worker_init_fn: called with the worker's number in each data worker.
        transport: what carries the exchanges of ranks: `"gloo"`, or the key-value `"store"`, which is quicker where
            there are more processes than cores.
        timeout: seconds that a rank waits for another, and the main process for its collate process.
    """

    l_max: int
    cost: Literal["linear", "quadratic"] = "linear"
    quadratic_length: int | None = None
    buffer_size: int = 1024
    num_workers: int = 2
    prefetch_factor: int | None = None
    prefetch_batches: int = 4
    shuffle: bool = True
    seed: int = 0
    max_samples: int | None = None
    mode: Mode = "join"
    pacing: bool = True
    loss_scaling: LossScaling = "token"
    loss_tokens: Callable[[Any], int] | None = None
    causal_shift: bool = True
    ignore_index: int = -100
    length_fn: Callable[[Any], int] | None = None
    oversize: OversizePolicy = "keep"
    empty: EmptyPolicy = "error"
    stream_sharding: Literal["loader", "dataset"] = "loader"
    pin_memory: bool = False
    persistent_workers: bool = False
    start_method: Literal["fork", "forkserver", "spawn"] | None = None
    worker_init_fn: Callable[[int], None] | None = None
    transport: Literal["gloo", "store"] = "gloo"
    timeout: float = 1800.0

    def __post_init__(self) -> None:
        """Refuse values that cannot work.

        Raises:
            ValueError: naming the setting, its value and what would fit.
        """
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {choices}, got {getattr(self, name)!r}")
        for name, least in _AT_LEAST.items():
            value = getattr(self, name)
            if value is None and name in _MAY_BE_NONE:
                continue
            number, kind = (Real, "number") if name == "timeout" else (Integral, "whole number")
            if isinstance(value, bool) or not isinstance(value, number) or not least <= float(value) < 2**63:
                raise ValueError(f"{name} must be a {kind} of at least {least}, got {value!r}")
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if not isinstance(self.ignore_index, int):
            raise ValueError(f"ignore_index must be a whole number, got {self.ignore_index!r}")
        for name in ("loss_tokens", "length_fn", "worker_init_fn"):
            if not (getattr(self, name) is None or callable(getattr(self, name))):
                raise ValueError(f"{name} must be a function or None, got {getattr(self, name)!r}")
        if self.timeout > _LONGEST_TIMEOUT:
            raise ValueError(f"timeout must be at most {_LONGEST_TIMEOUT} seconds, a year, got {self.timeout!r}")
        if (self.cost == "quadratic") != (self.quadratic_length is not None):
            raise ValueError(
                "cost='quadratic' goes with quadratic_length, the length at which the quadratic term equals the linear "
                f"one; got cost={self.cost!r} and quadratic_length={self.quadratic_length}"
            )

    @property
    def token_cost(self) -> TokenCost:
        """What a batch costs of `l_max`."""
        return TokenCost(self.quadratic_length)

    def batch_settings(self) -> dict[str, Any]:
        """What the batches and weights of an epoch depend on: the same on every rank."""
        return {name: getattr(self, name) for name in _BATCH_SETTINGS}

    @classmethod
    def from_keywords(cls, **settings: Any) -> LoaderConfig:
        """Build it from the keywords of a public constructor.

        Raises:
            TypeError: for a keyword that is no setting, with the nearest one that is.
            ValueError: for a value that cannot work.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        for name in settings:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                raise TypeError(
                    f"unknown setting {name!r}" + (f", did you mean {near[0]!r}?" if near else f"; there are {known}")
                )
        return cls(**settings)


def takes_settings(init: F) -> F:
    """Show the fields of `LoaderConfig` in the signature of an `__init__` that takes them as `**settings`.

    Editors, `help` and the check of recipes then know them by name and type.
    """
    signature = inspect.signature(init)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    hints = get_type_hints(LoaderConfig)
    settings = [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=hints[f.name])
        for f in dataclasses.fields(LoaderConfig)
        if f.name not in signature.parameters
    ]
    init.__signature__ = signature.replace(parameters=[*own, *settings])  # type: ignore[attr-defined]
    init.__annotations__ = {**init.__annotations__, **{p.name: p.annotation for p in settings}}
    return init
