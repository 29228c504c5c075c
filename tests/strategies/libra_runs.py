"""Trainings under a context-parallel strategy that the ranks of a test make and record, case after case."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from odb_libra_lightning.libra.active_attention import core_attention
from tests.launch import run_ranks
from tests.modules import quiet_trainer
from tests.strategies.dense_decoder import Decoder, Pack, Trained, largest_gap, train_alone, unpadded
from tests.strategies.packs import PACKS, Listed, alone


class CoreDecoder(Decoder):
    """The decoder as a user writes it: attention is `core_attention`'s."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, position_ids: Tensor) -> Tensor:
        return core_attention(q, k, v, position_ids=position_ids)


class ShardedDecoder(CoreDecoder):
    """The same, sharded by FSDP2 over all processes."""

    def configure_model(self) -> None:
        from torch.distributed.fsdp import FSDPModule, fully_shard

        for part in (self.embedding, *self.layers, self.head):
            if not isinstance(part, FSDPModule):
                fully_shard(part, mesh=self.device_mesh["data_parallel"])


class GatheredDecoder(CoreDecoder):
    """The same under DeepSpeed, whose third stage keeps of each parameter a part."""

    def weights(self) -> dict[str, list[float]]:
        import deepspeed

        parameters = list(self.parameters())
        with deepspeed.zero.GatheredParameters(parameters, enabled=hasattr(parameters[0], "ds_id")):
            return super().weights()


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training: degrees of the strategy, data, and how often an update is made."""

    dp: int
    cp: int
    pool: int | None = None
    flavour: str = "ddp"
    packs: str = "mixed"
    count: int | None = None
    accumulate: int = 1
    clip: float | None = None
    epochs: int = 1
    keep_gradients: bool = True
    compiled: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    decoder: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        """A short name, for parametrized tests."""
        words = [self.flavour, f"dp{self.dp}", f"cp{self.cp}", f"p{self.pool}", self.packs]
        words += (
            [f"a{self.accumulate}"] * (self.accumulate > 1)
            + ["clipped"] * (self.clip is not None)
            + ["compiled"] * self.compiled
        )
        return "-".join([*words, *(f"{value}" for value in {**self.options, **self.decoder, **self.trainer}.values())])

    @property
    def world_size(self) -> int:
        return self.dp * self.cp

    def make_packs(self) -> list[Pack]:
        """Its packs, as many to each replica."""
        packs = PACKS[self.packs](*([] if self.count is None else [self.count]))
        assert len(packs) % self.dp == 0
        return packs


# Small enough that tiles of these packs travel.
OPTIONS = {"block_size": 4}


def strategy_of(case: Case) -> Any:
    settings = {"context_parallel": case.cp, "pool_size": case.pool, **OPTIONS, **case.options}
    if case.flavour == "ddp":
        from odb_libra_lightning.strategies import LibraStrategy

        return LibraStrategy(**settings)
    if case.flavour == "fsdp2":
        from odb_libra_lightning.strategies import LibraFSDPStrategy

        return LibraFSDPStrategy(**settings)
    from tests.strategies.deepspeed_cpu import cpu_libra_deepspeed

    return cpu_libra_deepspeed(stage=int(case.flavour[-1]), **settings)


def decoder_of(case: Case) -> Decoder:
    kinds: dict[str, type[Decoder]] = {"ddp": CoreDecoder, "fsdp2": ShardedDecoder}
    module = kinds.get(case.flavour, GatheredDecoder)(**case.decoder)
    module.keep_gradients = case.keep_gradients and case.flavour in ("ddp", "fsdp2")
    return module


def trainer_of(case: Case, **settings: Any) -> L.Trainer:
    fixed = {
        "devices": case.world_size,
        "strategy": strategy_of(case),
        "max_epochs": case.epochs,
        "accumulate_grad_batches": case.accumulate,
        "gradient_clip_val": case.clip,
    }
    return quiet_trainer(**{**fixed, **case.trainer, **settings})


def record_of(module: Decoder, trainer: L.Trainer) -> dict[str, Any]:
    return {
        "losses": module.losses,
        "labels": module.labels,
        "gradients": module.gradients,
        "weights": module.weights(),
        "packs": module.packs,
        "updates": trainer.global_step,
    }


def fit_case(case: Case, *, module: Decoder | None = None, name: str | None = None) -> dict[str, Any]:
    """Train on a plain DataLoader that knows nothing of replicas."""
    print(f"case {name or case}", flush=True)  # names the case that hangs
    module, trainer = module or decoder_of(case), trainer_of(case)
    fitted: Any = torch.compile(module, backend="eager") if case.compiled else module
    trainer.fit(fitted, train_dataloaders=DataLoader(Listed(case.make_packs()), batch_size=1, collate_fn=alone))
    return record_of(module, trainer)


def fit_cases(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Several trainings, one after the other in the same processes."""
    return [fit_case(Case(**case)) for case in cases]


def run_in_turn(
    world_size: int,
    folder: Path,
    calls: Mapping[str, tuple[Callable[..., Any], dict[str, Any]]],
    *,
    timeout: float = 170,
) -> dict[str, list[Any]]:
    """What each rank returns from each of several functions, called one after the other in the same processes.

    Starting processes takes longer than what they do here.
    """
    named = [(f"{function.__module__}:{function.__qualname__}", arguments) for function, arguments in calls.values()]
    ranks = run_ranks(call_in_turn, world_size, folder, calls=named, timeout=timeout)
    return dict(zip(calls, map(list, zip(*ranks, strict=True)), strict=True))


def call_in_turn(calls: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    found = []
    for target, arguments in calls:
        print(target, flush=True)
        module, name = target.split(":")
        found.append(getattr(importlib.import_module(module), name)(**arguments))
    return found


def as_arguments(cases: Sequence[Case]) -> list[dict[str, Any]]:
    return [asdict(case) for case in cases]


def windows_of(case: Case, ranks: Sequence[dict[str, Any]], packs: Sequence[Pack]) -> list[list[Pack]]:
    """The packs of each update, over all replicas, as they were drawn; those of an epoch's end are fewer.

    Members of a replica draw the same packs, and all of them together each pack once an epoch.
    """
    by_tokens = {tuple(unpadded(each)["input_ids"][0].tolist()): each for each in packs}
    assert len(by_tokens) == len(packs), "packs are told apart by their tokens"
    windows = []
    for epoch in range(case.epochs):
        drawn = [[tuple(drawn["input_ids"]) for drawn in rank["packs"][epoch]] for rank in ranks]
        for first in range(0, len(drawn), case.cp):
            assert all(rank == drawn[first] for rank in drawn[first : first + case.cp])
        steps = list(zip(*drawn[:: case.cp], strict=True))
        assert Counter(tokens for step in steps for tokens in step) == Counter(by_tokens.keys())
        for first in range(0, len(steps), case.accumulate):
            windows.append([by_tokens[tokens] for step in steps[first : first + case.accumulate] for tokens in step])
    return windows


def losses_of_packs(case: Case, ranks: Sequence[dict[str, Any]]) -> tuple[list[float], list[int]]:
    """Mean loss of each pack and its labels, from those of its shards, step after step over the replicas."""
    losses, labels = [], []
    for number in range(len(ranks[0]["losses"])):
        for replica in range(case.dp):
            shards = ranks[replica * case.cp : (replica + 1) * case.cp]
            counts = [shard["labels"][number] for shard in shards]
            sums = [s["losses"][number] * c for s, c in zip(shards, counts, strict=True) if c]
            losses.append(sum(sums) / sum(counts) if sum(counts) else float("nan"))
            labels.append(sum(counts))
    return losses, labels


def check(
    case: Case,
    ranks: Sequence[dict[str, Any]],
    *,
    tolerance: float = 1e-10,
    expected_of: dict[str, Any] | None = None,
) -> None:
    """Every rank has the gradients, norms, losses and weights of one process that trains on all packs.

    Packs of a plain DataLoader weigh alike, as under DDP: an update is the mean of their own means. Lightning divides
    by the size of a whole window in a short one, too. The process has the decoder of the case, or `expected_of`.
    """
    decoder = case.decoder if expected_of is None else expected_of
    windows = windows_of(case, ranks, case.make_packs())
    packs_a_window = case.dp * case.accumulate
    expected = train_alone(windows, packs_a_window=packs_a_window, clip=case.clip, **decoder)
    check_against(case, ranks, expected, tolerance=tolerance)


def check_against(case: Case, ranks: Sequence[dict[str, Any]], expected: Trained, *, tolerance: float) -> None:
    losses, labels = losses_of_packs(case, ranks)
    assert labels == expected.labels
    for ours, right, count in zip(losses, expected.losses, labels, strict=True):
        assert not count or abs(ours - right) <= tolerance
    check_updates(ranks, expected, tolerance=tolerance, start=train_alone([], **case.decoder))


def check_updates(
    ranks: Sequence[dict[str, Any]], expected: Trained, *, tolerance: float = 1e-10, start: Trained | None = None
) -> None:
    """Every rank has these gradients, their norms, and these weights, which are not those of the start."""
    start = train_alone([]) if start is None else start
    assert largest_gap(expected.weights, start.weights) > 1e-3, "nothing was trained"
    for rank in ranks:
        assert rank["updates"] == len(expected.gradients)
        if rank["gradients"]:
            for ours, right, norm in zip(rank["gradients"], expected.gradients, expected.norms, strict=True):
                assert largest_gap(ours, right) <= tolerance
                assert abs(sum(g * g for values in ours.values() for g in values) ** 0.5 - norm) <= tolerance
        assert largest_gap(rank["weights"], expected.weights) <= tolerance
