"""The causal language model on its own and in the real Trainer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Trainer
from omegaconf import OmegaConf
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from odb_libra_lightning.data.collators import CausalLMCollator
from odb_libra_lightning.models.causal_lm import CausalLM

TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


def sample(length: int, seed: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 64, (length,), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": torch.where(torch.arange(length) < 2, -100, ids)}


SAMPLES = [sample(length, seed) for seed, length in enumerate((5, 30, 12, 3))]
COLLATE = CausalLMCollator()


def reference_loss(module: CausalLM, samples: list[dict[str, torch.Tensor]]) -> tuple[torch.Tensor, int]:
    """Sum over the label tokens, one unpadded sample at a time, and their number."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for one in samples:
        logits = module.model(input_ids=one["input_ids"][None]).logits[0].double()
        targets = one["labels"][1:]
        total = total + cross_entropy(logits[:-1], targets, ignore_index=-100, reduction="sum")
        count += int((targets != -100).sum())
    return total, count


@pytest.fixture
def module() -> CausalLM:
    torch.manual_seed(0)
    return CausalLM(lr=3e-3, **TINY)


def loss_of(module: CausalLM, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    return module.training_step(batch, 0)


def test_loss_is_the_mean_over_label_tokens_of_the_unpadded_samples(module: CausalLM) -> None:
    total, count = reference_loss(module, SAMPLES)
    assert loss_of(module, COLLATE(SAMPLES)).item() == pytest.approx((total / count).item(), rel=1e-5)


def test_a_batch_without_labels_gives_zero_and_zero_gradients(module: CausalLM) -> None:
    batch = COLLATE(SAMPLES)
    batch["labels"].fill_(-100)
    loss = loss_of(module, batch)
    loss.backward()
    assert loss.item() == 0
    assert all(bool((p.grad == 0).all()) for p in module.parameters() if p.grad is not None)


def test_loss_falls_when_one_batch_is_repeated(module: CausalLM) -> None:
    batch, losses = COLLATE(SAMPLES), []
    optimizer = module.configure_optimizers()
    for _ in range(60):
        loss = loss_of(module, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(torch.tensor(64.0).log().item(), abs=0.5)  # a guess among 64 tokens
    assert losses[-1] < 0.5


def test_trains_validates_and_comes_back_from_a_checkpoint(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = CausalLM(lr=1e-3, warmup_steps=4, **TINY)
    train = DataLoader(SAMPLES, batch_size=2, collate_fn=COLLATE)  # type: ignore[arg-type]
    val = DataLoader(SAMPLES, batch_size=3, collate_fn=COLLATE)  # type: ignore[arg-type]
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(module, train, val)
    assert trainer.lr_scheduler_configs[0].scheduler.get_last_lr() == [pytest.approx(1e-3 * 3 / 4)]
    assert "train/loss" in trainer.callback_metrics
    with torch.no_grad():
        total, count = reference_loss(module, SAMPLES)
    # The two batches differ in label tokens: only a mean weighted by them is the mean over all.
    assert trainer.callback_metrics["val/loss"].item() == pytest.approx((total / count).item(), rel=1e-5)

    trainer.save_checkpoint(tmp_path / "last.ckpt")
    restored = CausalLM.load_from_checkpoint(tmp_path / "last.ckpt")
    assert restored.warmup_steps == 4
    for (name, before), (_, after) in zip(module.named_parameters(), restored.named_parameters(), strict=True):
        assert torch.equal(before, after), name


def test_warm_up_is_linear_and_then_level() -> None:
    configured = CausalLM(lr=1.0, warmup_steps=4, **TINY).configure_optimizers()
    assert configured["lr_scheduler"]["interval"] == "step"
    optimizer, scheduler, rates = configured["optimizer"], configured["lr_scheduler"]["scheduler"], []
    for _ in range(6):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_optimizer_takes_its_options() -> None:
    betas = OmegaConf.create([0.8, 0.9])  # what a recipe hands over
    module = CausalLM(lr=0.5, weight_decay=0.25, betas=betas, **TINY)  # type: ignore[arg-type]
    assert type(module.hparams["betas"]) is tuple
    optimizer = module.configure_optimizers()
    assert isinstance(optimizer, torch.optim.AdamW)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["weight_decay"], group["betas"]) == (0.5, 0.25, (0.8, 0.9))


def test_another_architecture_and_a_stored_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    first = CausalLM("Qwen3ForCausalLM", head_dim=8, **TINY)
    assert type(first.model).__name__ == "Qwen3ForCausalLM"
    assert first.model.config.use_cache is False
    first.model.to(torch.bfloat16).save_pretrained(tmp_path)
    stored = CausalLM(pretrained=str(tmp_path))
    assert stored.model.training
    assert {p.dtype for p in stored.parameters()} == {torch.float32}
    for before, after in zip(first.parameters(), stored.parameters(), strict=True):
        assert torch.equal(before.float(), after)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"architecture": "LlamaForCausalLn"}, "architecture='LlamaForCausalLn' is no causal language model of"),
        ({"architecture": "BertModel"}, "architecture='BertModel' is no causal language model of"),
        ({"num_hidden_layer": 2}, "LlamaConfig has no num_hidden_layer: check the spelling"),
        ({"pretrained": "/nowhere"}, "pretrained='/nowhere' holds no config.json"),
        ({"pretrained": "/x", "vocab_size": 9}, r"pretrained='/x' brings its own configuration: drop \['vocab_size'\]"),
        ({"warmup_steps": -1}, "warmup_steps=-1: take 0 or more"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CausalLM(**arguments)


def test_a_missing_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install '\.\[hf\]'"):
        CausalLM(**TINY)


def test_gradient_checkpointing_changes_no_gradient(module: CausalLM) -> None:
    torch.manual_seed(0)
    checkpointed = CausalLM(lr=3e-3, gradient_checkpointing=True, **TINY)
    assert all(layer.gradient_checkpointing for layer in checkpointed.model.model.layers)
    for each in (module, checkpointed):
        loss_of(each, COLLATE(SAMPLES)).backward()
    for one, other in zip(module.parameters(), checkpointed.parameters(), strict=True):
        assert one.grad is not None
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=0)
