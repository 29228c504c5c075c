"""Libra under FSDP2 and DeepSpeed, in bfloat16, and around a compiled module: against one process."""

from __future__ import annotations

import importlib.util
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


def fit_all(cases: list[Case], folder: Any) -> dict[str, list[Any]]:
    found = {}
    for world_size in (2, 4):
        mine = [case for case in cases if case.world_size == world_size]
        ranks = run_ranks(fit_cases, world_size, folder.mktemp("flavours"), cases=as_arguments(mine), timeout=170)
        found |= dict(zip(map(str, mine), zip(*ranks, strict=True), strict=True))
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    return fit_all([*FSDP2, *COMPILED, *BF16], tmp_path_factory)


@pytest.fixture(scope="module")
def trained_by_deepspeed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    return fit_all(DEEPSPEED, tmp_path_factory)


@pytest.mark.parametrize("case", FSDP2, ids=str)
def test_fsdp2_has_the_gradients_and_weights_of_one_process(case: Case, trained: dict[str, list[Any]]) -> None:
    check(case, trained[str(case)])


@pytest.mark.parametrize("case", COMPILED, ids=str)
def test_a_compiled_module_too(case: Case, trained: dict[str, list[Any]]) -> None:
    check(case, trained[str(case)])


@needs_deepspeed
@pytest.mark.parametrize("case", DEEPSPEED, ids=str)
def test_deepspeed_has_the_weights_of_one_process(case: Case, trained_by_deepspeed: dict[str, list[Any]]) -> None:
    decoder = {name: value for name, value in case.decoder.items() if name != "dtype"}
    check(case, trained_by_deepspeed[str(case)], tolerance=FLOAT32, expected_of=decoder)


@pytest.mark.parametrize("case", BF16, ids=str)
def test_bf16_is_as_near_to_float64_as_one_process_in_bf16(case: Case, trained: dict[str, list[Any]]) -> None:
    ranks = trained[str(case)]
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
