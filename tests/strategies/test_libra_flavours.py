"""Libra under FSDP2 and DeepSpeed, in bfloat16, and around a compiled module: against one process."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.launch import run_ranks
from tests.strategies.dense_decoder import DenseDecoder, Trained, largest_gap, train_alone
from tests.strategies.libra_runs import Case, as_arguments, check, fit_cases, losses_of_packs, windows_of

CLIP = 0.2
# Float32 has 24 bits; weights below 1 are exact to 6e-8, and a run makes a few updates.
FLOAT32 = 5e-6
SINGLE = {"dtype": "float32"}

FSDP2 = [
    Case(flavour="fsdp2", dp=1, cp=2, count=5, accumulate=3),
    Case(flavour="fsdp2", dp=2, cp=1, pool=2, count=10, accumulate=3, clip=CLIP),
    Case(flavour="fsdp2", dp=1, cp=2, packs="edges", clip=CLIP, options={"attention": "ring"}),
    Case(flavour="fsdp2", dp=2, cp=2, pool=2, count=10, accumulate=3, clip=CLIP),
    Case(flavour="fsdp2", dp=2, cp=2, pool=1, packs="tiny", options={"attention": "ulysses"}),
    Case(flavour="fsdp2", dp=1, cp=4, packs="edges"),
]
COMPILED = [
    Case(dp=1, cp=2, count=5, accumulate=3, compiled=True),
    Case(dp=2, cp=2, pool=2, packs="edges", compiled=True),
]
DEEPSPEED = [
    Case(flavour="zero1", dp=1, cp=2, count=5, accumulate=3, clip=CLIP, decoder=SINGLE),
    Case(flavour="zero2", dp=2, cp=1, pool=2, packs="edges", decoder=SINGLE),
    Case(flavour="zero3", dp=1, cp=2, packs="edges", decoder=SINGLE),
    Case(flavour="zero3", dp=2, cp=1, pool=2, count=10, accumulate=3, decoder=SINGLE),
    Case(flavour="zero2", dp=2, cp=2, pool=2, count=10, accumulate=3, clip=CLIP, decoder=SINGLE),
    Case(flavour="zero3", dp=2, cp=2, pool=1, packs="tiny", options={"attention": "ring"}, decoder=SINGLE),
]
BF16 = [
    Case(dp=1, cp=2, count=6, trainer={"precision": "bf16-mixed"}, decoder=SINGLE),
    Case(dp=2, cp=2, pool=2, count=12, trainer={"precision": "bf16-mixed"}, decoder=SINGLE),
    Case(dp=1, cp=4, count=6, trainer={"precision": "bf16-mixed"}, options={"attention": "ring"}, decoder=SINGLE),
    Case(dp=1, cp=4, count=6, trainer={"precision": "bf16-mixed"}, options={"attention": "ulysses"}, decoder=SINGLE),
]
needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")


Recorded = Callable[[Case], list[Any]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """What each rank recorded of a case; those of as many ranks, with DeepSpeed or without, are trained at once."""
    found: dict[str, list[Any]] = {}

    def of(case: Case) -> list[Any]:
        if str(case) not in found:
            every = DEEPSPEED if case in DEEPSPEED else [*FSDP2, *COMPILED, *BF16]
            cases = [each for each in every if each.world_size == case.world_size]
            folder = tmp_path_factory.mktemp("flavours")
            ranks = run_ranks(fit_cases, case.world_size, folder, cases=as_arguments(cases), timeout=170)
            found.update(zip(map(str, cases), map(list, zip(*ranks, strict=True)), strict=True))
        return found[str(case)]

    return of


def by_world_size(cases: list[Case], full: int) -> Any:
    """The cases as parameters, those of so many ranks in the long matrix."""
    marked = [pytest.param(c, marks=pytest.mark.full if c.world_size == full else (), id=str(c)) for c in cases]
    return pytest.mark.parametrize("case", marked)


@by_world_size(FSDP2, full=2)
def test_fsdp2_has_the_gradients_and_weights_of_one_process(case: Case, trained: Recorded) -> None:
    check(case, trained(case))


@by_world_size(COMPILED, full=2)
def test_a_compiled_module_too(case: Case, trained: Recorded) -> None:
    check(case, trained(case))


@needs_deepspeed
@by_world_size(DEEPSPEED, full=4)
def test_deepspeed_has_the_weights_of_one_process(case: Case, trained: Recorded) -> None:
    decoder = {name: value for name, value in case.decoder.items() if name != "dtype"}
    check(case, trained(case), tolerance=FLOAT32, expected_of=decoder)


@by_world_size(BF16, full=2)
def test_bf16_is_as_near_to_float64_as_one_process_in_bf16(case: Case, trained: Recorded) -> None:
    ranks = trained(case)
    windows = windows_of(case, ranks, case.make_packs())

    def alone(dtype: str) -> Trained:
        return train_alone(windows, packs_a_window=case.dp, module=DenseDecoder(dtype=dtype))

    exact = alone("float64")
    with torch.autocast("cpu", torch.bfloat16):
        in_bf16 = alone("float32")
    error = largest_gap(in_bf16.weights, exact.weights)
    assert error > 1e-5, "nothing was rounded"
    losses, labels = losses_of_packs(case, ranks)
    assert labels == exact.labels
    assert losses == pytest.approx(exact.losses, rel=0.02)
    for rank in ranks:
        assert rank["weights"] == ranks[0]["weights"]
        assert largest_gap(rank["weights"], exact.weights) < 3 * error
