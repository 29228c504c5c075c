"""Models of transformers in real runs of Libra: against their own eager attention with an explicit mask."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.launch import run_ranks
from tests.strategies.dense_decoder import IGNORED, Pack, flat, largest_gap, unpadded
from tests.strategies.libra_runs import Case, as_arguments, trainer_of, windows_of
from tests.strategies.packs import Listed, alone

pytest.importorskip("transformers")

WINDOW, LR = 4, 0.2
SIZES = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
# Their own attention takes the softmax, and their loss the logits, in float32.
TOLERANCE = 5e-6


def mistral() -> Any:
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(**SIZES, sliding_window=WINDOW, attn_implementation="eager")).double()


class AsUsersWriteIt(L.LightningModule):
    def __init__(self, checkpointing: bool = False) -> None:
        super().__init__()
        self.model = mistral()
        self.model.train()
        if checkpointing:
            self.model.gradient_checkpointing_enable()
        self.packs: list[Any] = []

    def on_train_epoch_start(self) -> None:
        self.packs.append([])

    def on_before_batch_transfer(self, batch: Pack, dataloader_idx: int) -> Pack:
        self.packs[-1].append({name: values[0].tolist() for name, values in unpadded(batch).items()})
        return batch

    def training_step(self, batch: Pack, batch_idx: int) -> Any:
        return self.model(**batch, use_cache=False).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), LR, momentum=0.5)


CASES = [
    Case(dp=2, cp=2, pool=2, count=10, accumulate=3),
    Case(dp=2, cp=2, pool=2, packs="edges"),
    Case(dp=1, cp=4, count=5, options={"attention": "ring"}),
    Case(dp=2, cp=2, pool=1, count=10, options={"attention": "ulysses"}, decoder={"checkpointing": True}),
    Case(dp=2, cp=2, pool=2, count=10, decoder={"checkpointing": True}),
    Case(flavour="fsdp2", dp=2, cp=2, pool=2, count=10, accumulate=3),
]


def fit_models(cases: list[dict[str, Any]]) -> list[Any]:
    found = []
    for case in (Case(**each) for each in cases):
        print(f"case {case}", flush=True)
        module, trainer = AsUsersWriteIt(**case.decoder), trainer_of(case)
        trainer.fit(module, train_dataloaders=DataLoader(Listed(case.make_packs()), collate_fn=alone))
        weights = {name: flat(parameter) for name, parameter in module.model.named_parameters()}
        found.append({"packs": module.packs, "weights": weights})
    return found


def eager_alone(windows: list[list[Pack]], packs_a_window: int) -> dict[str, list[float]]:
    """Weights after these updates, each the mean of its packs' means."""
    model = mistral()
    optimizer = torch.optim.SGD(model.parameters(), LR, momentum=0.5)
    for packs in windows:
        optimizer.zero_grad()
        for pack in map(unpadded, packs):
            document = (pack["position_ids"][0] == 0).cumsum(0)
            distance = torch.arange(len(document))[:, None] - torch.arange(len(document))
            seen = (document[:, None] == document) & (distance >= 0) & (distance < WINDOW)
            mask = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -torch.inf)[None, None]
            logits = model(pack["input_ids"], position_ids=pack["position_ids"], attention_mask=mask).logits
            losses = F.cross_entropy(logits[0, :-1], pack["labels"][0, 1:], ignore_index=IGNORED, reduction="sum")
            labels = int((pack["labels"][0, 1:] != IGNORED).sum())
            (losses / max(labels, 1) / packs_a_window).backward()
        optimizer.step()
    return {name: flat(parameter) for name, parameter in model.named_parameters()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    ranks = run_ranks(fit_models, 4, tmp_path_factory.mktemp("models"), cases=as_arguments(CASES), timeout=170)
    return dict(zip(map(str, CASES), zip(*ranks, strict=True), strict=True))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_mistral_s_window_is_that_of_its_own_eager_attention(case: Case, trained: dict[str, list[Any]]) -> None:
    ranks = trained[str(case)]
    windows = windows_of(case, ranks, case.make_packs())
    expected = eager_alone(windows, case.dp * case.accumulate)
    untrained = {name: flat(parameter) for name, parameter in mistral().named_parameters()}
    assert largest_gap(expected, untrained) > 1e-3
    for rank in ranks:
        assert largest_gap(rank["weights"], expected) < TOLERANCE
