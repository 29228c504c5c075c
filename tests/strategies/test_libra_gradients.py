"""Training under `LibraStrategy` by degrees, attentions and packs: against one process that masks whole packs."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from tests.launch import run_ranks
from tests.strategies.libra_runs import Case, as_arguments, check, fit_cases

CLIP = 0.2  # below every norm of a mixed pack's gradient


def mixed(dp: int, cp: int, pool: int | None, **settings: Any) -> Case:
    """Five micro-batches."""
    return Case(dp=dp, cp=cp, pool=pool, count=5 * dp, **settings)


TWO_RANKS = [
    mixed(1, 2, 1),
    mixed(1, 2, 1, accumulate=3, clip=CLIP),
    mixed(2, 1, 2, clip=CLIP),
    Case(dp=1, cp=2, packs="edges", accumulate=3),
    Case(dp=1, cp=2, packs="tiny"),
    Case(dp=1, cp=2, packs="edges", options={"attention": "ulysses"}),
    Case(dp=1, cp=2, packs="tiny", options={"attention": "ring"}),
]
FOUR_RANKS = [
    mixed(2, 2, 1, accumulate=3),
    mixed(2, 2, 2, accumulate=3, clip=CLIP),
    mixed(1, 4, 1, accumulate=3),
    mixed(4, 1, 2, accumulate=3, clip=CLIP),
    Case(dp=2, cp=2, pool=2, packs="edges"),
    Case(dp=2, cp=2, pool=2, packs="uneven", options={"head_shards": 2}),
    Case(dp=1, cp=4, packs="edges", accumulate=3),
    mixed(2, 2, 1, options={"attention": "ulysses"}),
    Case(dp=1, cp=4, packs="tiny", options={"attention": "ulysses"}),
    mixed(2, 2, 2, options={"attention": "ring"}),
    mixed(2, 2, None, accumulate=3, options={"attention": "distca"}),
    mixed(2, 2, 2, options={"placement": "paper"}),
    mixed(2, 2, 2, options={"remember": "refetch"}),
]
FIFTY_STEPS = Case(
    dp=2, cp=2, pool=2, count=20, epochs=5, keep_gradients=False, decoder={"optimizer": "adamw", "lr": 0.02}
)

DEGREES = {2: [(1, 2, 1), (2, 1, 1), (2, 1, 2)], 4: [(1, 4, 1), (2, 2, 1), (2, 2, 2), (4, 1, 1), (4, 1, 2), (4, 1, 4)]}


def every_case(world_size: int) -> list[Case]:
    cases = []
    for (dp, cp, pool), attention, packs, window in product(
        DEGREES[world_size], ("libra", "ulysses", "ring", "distca"), ("mixed", "edges", "tiny", "uneven"), (1, 3)
    ):
        if attention == "distca" and pool != dp:
            continue
        clip = CLIP if packs == "mixed" and window == 3 else None
        count = 5 * dp if packs == "mixed" else None
        options = {"attention": attention}
        cases.append(
            Case(dp=dp, cp=cp, pool=pool, packs=packs, accumulate=window, clip=clip, count=count, options=options)
        )
    return cases


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What each rank recorded of each case, all cases of a world one after the other."""
    found = {}
    for cases in (TWO_RANKS, [*FOUR_RANKS, FIFTY_STEPS]):
        ranks = run_ranks(
            fit_cases, cases[0].world_size, tmp_path_factory.mktemp("libra"), cases=as_arguments(cases), timeout=170
        )
        found |= dict(zip(map(str, cases), zip(*ranks, strict=True), strict=True))
    return found


@pytest.mark.parametrize("case", [*TWO_RANKS, *FOUR_RANKS], ids=str)
def test_gradients_norms_losses_and_weights_are_those_of_one_process(case: Case, trained: dict[str, list[Any]]) -> None:
    check(case, trained[str(case)])


def test_fifty_steps_of_adamw_have_the_losses_of_one_process(trained: dict[str, list[Any]]) -> None:
    check(FIFTY_STEPS, trained[str(FIFTY_STEPS)], tolerance=1e-8)


@pytest.mark.full
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.timeout(900)
def test_every_mix(world_size: int, tmp_path: Any) -> None:
    cases = every_case(world_size)
    ranks = run_ranks(fit_cases, world_size, tmp_path, cases=as_arguments(cases), timeout=850)
    for case, *recorded in zip(cases, *ranks, strict=True):
        check(case, recorded)
