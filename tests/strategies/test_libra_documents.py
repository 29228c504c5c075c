"""Documents of a pack keep to themselves; idle workers, plans of a pool, heads: in real runs of `LibraStrategy`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils.data import DataLoader

from odb_libra_lightning.libra.transport import GroupTransport
from tests.launch import run_ranks
from tests.libra.dense import DenseKernel
from tests.strategies.dense_decoder import IGNORED, Pack
from tests.strategies.libra_runs import (
    Case,
    CoreDecoder,
    as_arguments,
    check,
    decoder_of,
    fit_case,
    fit_cases,
    run_in_turn,
    trainer_of,
)
from tests.strategies.packs import Listed, alone

# Each document has tokens of its own, so that the embeddings that it trains are its alone.
OWN_TOKENS = 8
LENGTHS = ((10, 9, 5), (7, 14, 3))
CHANGED, CHANGED_ROW = 1, 11  # the document over the edge of two shards, before that edge


def one_pack_a_replica(change: bool) -> list[Pack]:
    """No row predicts the first token of the next document."""
    packs, document = [], 0
    for replica, lengths in enumerate(LENGTHS):
        generator = torch.Generator().manual_seed(replica)
        tokens, labels = [], []
        for length in lengths:
            drawn = torch.randint(OWN_TOKENS, (length,), generator=generator) + document * OWN_TOKENS
            tokens.append(drawn)
            labels.append(drawn.clone())
            labels[-1][0] = IGNORED
            document += 1
        pack = {"input_ids": torch.cat(tokens), "labels": torch.cat(labels)}
        pack["position_ids"] = torch.cat([torch.arange(length) for length in lengths])
        packs.append({name: values[None] for name, values in pack.items()})
    if change:
        token = int(packs[0]["input_ids"][0, CHANGED_ROW]) - CHANGED * OWN_TOKENS
        packs[0]["input_ids"][0, CHANGED_ROW] = (token + 1) % OWN_TOKENS + CHANGED * OWN_TOKENS
    return packs


def one_step(cases: list[dict[str, Any]]) -> list[Any]:
    """Losses of all labels and gradients of the embeddings, without the change and with it."""
    found = []
    for case in (Case(**each) for each in cases):
        for change in (False, True):
            module, trainer = CoreDecoder(lr=0.0), trainer_of(case, use_distributed_sampler=False)
            replica = int(trainer.strategy.distributed_sampler_kwargs["rank"])  # type: ignore[attr-defined]
            packs = one_pack_a_replica(change)[replica : replica + 1]
            trainer.fit(module, train_dataloaders=DataLoader(Listed(packs), collate_fn=alone))
            (losses,), (gradients,) = module.token_losses, module.gradients
            found.append({"losses": losses, "embedding": gradients["embedding.weight"], "rank": trainer.global_rank})
    return found


ATTENTIONS = [
    Case(dp=2, cp=2, pool=2, options=options)
    for options in ({"head_shards": 2}, {"attention": "ring"}, {"attention": "ulysses"})
]


def test_a_changed_token_leaves_every_other_document_bit_equal(recorded: dict[str, list[Any]]) -> None:
    ranks = recorded["one_step"]
    documents = [n for replica in range(2) for n, length in enumerate(LENGTHS[replica]) for _ in range(length - 1)]
    for number in range(len(ATTENTIONS)):
        before, after = ([rank[2 * number + changed] for rank in ranks] for changed in (0, 1))
        losses_before, losses_after = (
            [loss for rank in range(4) for loss in step[rank]["losses"]] for step in (before, after)
        )
        assert len(losses_before) == len(documents)
        first_of_second = sum(LENGTHS[0]) - len(LENGTHS[0])
        changed = {
            at for at, losses in enumerate(zip(losses_before, losses_after, strict=True)) if losses[0] != losses[1]
        }
        of_the_document = {at for at in range(first_of_second) if documents[at] == CHANGED}
        # Rows of the document before the changed one do not see it. The changed row's own loss is of its document.
        assert changed == {at for at in of_the_document if at >= CHANGED_ROW - 1}
        for rank in range(4):
            weights = [torch.tensor(step[rank]["embedding"]).view(-1, OWN_TOKENS * 8) for step in (before, after)]
            differ = [n for n, (a, b) in enumerate(zip(*weights, strict=True)) if not torch.equal(a, b)]
            assert differ == [CHANGED]


HEADS = [
    Case(dp=2, cp=2, pool=2, count=6, decoder={"heads": 8, "kv_heads": kv}, options={"head_shards": shards})
    for kv in (1, 2, 8)
    for shards in (1, 2, 4, 8)
]
DEFAULT_HEADS = [case for case in HEADS if (case.decoder["kv_heads"], case.options["head_shards"]) in ((1, 8), (8, 2))]
# Some pools have fewer rows than workers.
CHECKPOINTED = [
    Case(dp=2, cp=2, pool=2, packs="scarce", accumulate=2, decoder={"checkpointing": mode}, options=options)
    for mode in ("reentrant", "non_reentrant")
    for options in ({"head_shards": 1}, {"head_shards": 1, "remember": "refetch"})
]


COUNTED = [*CHECKPOINTED, *DEFAULT_HEADS]


class CountingKernel(DenseKernel):
    """Counts the queries that this worker computes in each micro-batch."""

    def __init__(self) -> None:
        self.queries: list[int] = []

    def forward(self, q: torch.Tensor, *rest: Any, **options: Any) -> Any:
        self.queries[-1] += len(q)
        return super().forward(q, *rest, **options)


@contextmanager
def counted_transfers() -> Iterator[list[int]]:
    """The number of transfers of this process, as a list of one number."""
    number, original = [0], GroupTransport.all_to_all

    def counted(self: GroupTransport, *arguments: Any) -> Any:
        number[0] += 1
        return original(self, *arguments)

    with mock.patch.object(GroupTransport, "all_to_all", counted):
        yield number


def fit_and_count(cases: list[dict[str, Any]]) -> list[Any]:
    found = []
    for case in (Case(**each) for each in cases):
        kernel = CountingKernel()
        counting = dataclasses.replace(case, options={**case.options, "kernel": kernel})
        module = decoder_of(case)
        step = module.training_step

        def begun(batch: Any, batch_idx: int, kernel: Any = kernel, step: Any = step) -> Any:
            kernel.queries.append(0)
            return step(batch, batch_idx)

        module.training_step = begun  # type: ignore[method-assign]
        with counted_transfers() as transfers:
            record = fit_case(counting, module=module, name=str(case))
        found.append({**record, "queries": kernel.queries, "transfers": transfers[0]})
    return found


@pytest.fixture(scope="module")
def counted(recorded: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return dict(zip(map(str, COUNTED), zip(*recorded["count"], strict=True), strict=True))


@pytest.mark.parametrize("case", CHECKPOINTED, ids=str)
def test_a_worker_without_a_tile_under_activation_checkpointing(case: Case, counted: dict[str, list[Any]]) -> None:
    ranks = counted[str(case)]
    assert any(0 in rank["queries"] for rank in ranks), "no worker was idle"
    assert ranks[0]["transfers"] > 0
    assert len({rank["transfers"] for rank in ranks}) == 1
    check(case, ranks, expected_of={})


@pytest.mark.parametrize("case", DEFAULT_HEADS, ids=str)
def test_shards_of_heads_that_share_kv_heads_or_not(case: Case, counted: dict[str, list[Any]]) -> None:
    check(case, counted[str(case)])


@pytest.mark.full
def test_all_shards_of_heads(tmp_path: Path) -> None:
    for case, *ranks in zip(HEADS, *run_ranks(fit_cases, 4, tmp_path, cases=as_arguments(HEADS)), strict=True):
        check(case, ranks)


BAD_HEADS = [
    ({"heads": 28, "kv_heads": 7}, {"head_shards": 3}, ["head_shards=3", "num_heads=28"]),
    ({"heads": 28, "kv_heads": 7}, {"head_shards": 4, "chunks": 4}, ["chunks=4", "7"]),
    ({"heads": 7, "kv_heads": 7}, {"attention": "ulysses"}, ["context_parallel=2", "num_heads=7"]),
]


def fit_bad_heads() -> list[str]:
    """What each training says; every rank says it, so they go on together."""
    said = []
    for decoder, options, _ in BAD_HEADS:
        with pytest.raises(ValueError, match=r".") as error:
            fit_case(Case(dp=2, cp=2, pool=2, count=2, decoder=decoder, options=options))
        said.append(str(error.value))
    return said


def test_heads_that_cannot_be_shared_out_are_refused_with_their_numbers(recorded: dict[str, list[Any]]) -> None:
    for rank in recorded["bad_heads"]:
        for said, (_, _, numbers) in zip(rank, BAD_HEADS, strict=True):
            assert all(number in said for number in numbers), said


def fit_and_note_plans() -> Any:
    """The hash of the plan of each attention of a run in two pools."""
    from odb_libra_lightning.libra import attention

    hashes, original = [], attention.agree

    def noted(transport: Any, name: str, plan: str, *rest: Any) -> Any:
        hashes.append(plan)
        return original(transport, name, plan, *rest)

    with mock.patch.object(attention, "agree", noted):
        record = fit_case(Case(dp=4, cp=1, pool=2, count=8))
    return {"hashes": hashes, "labels": record["labels"]}


def test_workers_of_a_pool_have_one_plan_and_pools_their_own(recorded: dict[str, list[Any]]) -> None:
    hashes = [rank["hashes"] for rank in recorded["plans"]]
    assert len(hashes[0]) >= 2
    assert hashes[0] == hashes[1]
    assert hashes[2] == hashes[3]
    assert not set(hashes[0]) & set(hashes[2])


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    calls = {
        "one_step": (one_step, {"cases": as_arguments(ATTENTIONS)}),
        "count": (fit_and_count, {"cases": as_arguments(COUNTED)}),
        "plans": (fit_and_note_plans, {}),
        "bad_heads": (fit_bad_heads, {}),
    }
    return run_in_turn(4, tmp_path_factory.mktemp("documents"), calls)
