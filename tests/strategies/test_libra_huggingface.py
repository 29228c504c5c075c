"""Models of transformers under `LibraStrategy`: weights of one process with eager attention and an explicit mask."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.launch import run_ranks
from tests.modules import quiet_trainer
from tests.strategies.dense_decoder import largest_gap, unpadded
from tests.strategies.packs import Listed, alone, mixed, pack
from tests.strategies.tiny_models import MODELS, compute_in_float64, masks_for

pytest.importorskip("transformers")

LR = 0.1
TRAINED = ["llama", "gemma3", "gpt2"]


def packs() -> list[dict[str, Tensor]]:
    """One document over both shards, documents that end where shards meet, one of a single token, random ones."""
    return [pack((24,), seed=1), pack((10, 2, 12), seed=2, padding=3), pack((1,), seed=3), *mixed(2)]


class Finetune(L.LightningModule):
    """As a user writes it: the model's own loss on the whole batch."""

    def __init__(self, name: str, checkpointing: bool = False) -> None:
        super().__init__()
        self.model = MODELS[name].build()
        self.save_hyperparameters({"config": self.model.config})
        if checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(**batch, use_cache=False).loss  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), LR)

    def weights(self) -> dict[str, list[float]]:
        return {name: each.detach().flatten().tolist() for name, each in self.model.named_parameters()}


def fit(names: list[str], context_parallel: int) -> dict[str, Any]:
    from odb_libra_lightning.strategies import LibraStrategy

    found = {}
    for name, checkpointing in [*((name, False) for name in names), (names[0], True)]:
        with pytest.MonkeyPatch.context() as patch:
            module = Finetune(name, checkpointing)
            compute_in_float64(module.model, patch)
            trainer = quiet_trainer(
                devices=context_parallel,
                strategy=LibraStrategy(context_parallel=context_parallel, block_size=4),
                max_epochs=1,
                use_distributed_sampler=False,  # it would shuffle, and there is one replica
            )
            trainer.fit(module, DataLoader(Listed(packs()), batch_size=1, collate_fn=alone))
            found[f"{name}_checkpointing" if checkpointing else name] = {
                "weights": module.weights(),
                "updates": trainer.global_step,
                "attention": str(module.model.config._attn_implementation),
            }
    return found


def by_one_process(name: str) -> dict[str, list[float]]:
    """Plain PyTorch: an update for each pack, without its padding."""
    module, tiny = Finetune(name), MODELS[name]
    optimizer = module.configure_optimizers()
    with pytest.MonkeyPatch.context() as patch:
        compute_in_float64(module.model, patch)
        for batch in map(unpadded, packs()):
            starts = [*(batch["position_ids"][0] == 0).nonzero().flatten().tolist(), batch["input_ids"].shape[1]]
            masks = masks_for(tiny, [stop - start for start, stop in pairwise(starts)])
            optimizer.zero_grad()
            if (batch["labels"][:, 1:] != -100).any():
                module.model(**{**batch, "attention_mask": masks}, use_cache=False).loss.backward()
                optimizer.step()
    return module.weights()


@pytest.mark.parametrize("context_parallel", [2, pytest.param(4, marks=pytest.mark.full)])
def test_weights_are_those_of_one_process(context_parallel: int, tmp_path: Path) -> None:
    ranks = run_ranks(fit, context_parallel, tmp_path, names=TRAINED, context_parallel=context_parallel, timeout=150)
    for name in ranks[0]:
        plain = name.removesuffix("_checkpointing")
        expected = by_one_process(plain)
        assert largest_gap(expected, Finetune(plain).weights()) > 1e-3, "nothing was trained"
        for rank in ranks:
            assert rank[name]["updates"] == len(packs())
            assert rank[name]["attention"] == "eager"
            assert largest_gap(rank[name]["weights"], expected) < 1e-10
