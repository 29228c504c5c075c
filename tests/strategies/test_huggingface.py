"""Models of transformers by `core_attention`: the same logits and gradients, and everything put back."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from odb_libra_lightning.libra import active_attention
from odb_libra_lightning.libra.active_attention import core_attention
from odb_libra_lightning.strategies.attention_heads import AttentionHeads
from odb_libra_lightning.strategies.huggingface import attention_heads, install
from tests.strategies.tiny_models import MODELS, Tiny, compute_in_float64, masks_for, packed

pytest.importorskip("transformers")
DOCUMENTS = (7, 1, 5, 2)
RARE = ("qwen2", "mixtral", "phi3", "olmo2")
EACH_MODEL = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full if name in RARE else ()) for name in MODELS]
)
WITH_WINDOWS = ("qwen3_windows", "mistral", "gemma3")


def outcome(model: Any, weights: Tensor, **inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits, and gradients by parameter."""
    model.zero_grad()
    logits = model(**inputs, use_cache=False).logits
    (logits * weights).sum().backward()
    return logits.detach(), {name: each.grad.clone() for name, each in model.named_parameters()}


def assert_same(ours: tuple[Tensor, dict[str, Tensor]], right: tuple[Tensor, dict[str, Tensor]]) -> None:
    assert (ours[0] - right[0]).abs().max() < 1e-10
    assert ours[1].keys() == right[1].keys()
    for name, gradient in ours[1].items():
        assert (gradient - right[1][name]).abs().max() <= 1e-10 * max(1.0, float(right[1][name].abs().max())), name


@EACH_MODEL
def test_equals_transformers_own_attention_with_an_explicit_mask(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny, inputs = MODELS[name], packed(DOCUMENTS)
    model = tiny.build()
    compute_in_float64(model, monkeypatch)
    weights = torch.randn(1, sum(DOCUMENTS), model.config.vocab_size, dtype=torch.float64)
    right = outcome(model, weights, **inputs, attention_mask=masks_for(tiny, DOCUMENTS))
    whole = outcome(model, weights, **inputs, attention_mask=masks_for(tiny, (sum(DOCUMENTS),)))
    assert (right[0] - whole[0]).abs().max() > 1e-4, "documents make no difference to this model"
    installed = install(model)
    assert_same(outcome(model, weights, **inputs), right)
    installed.restore()
    assert_same(outcome(model, weights, **inputs, attention_mask=masks_for(tiny, DOCUMENTS)), right)


@pytest.mark.parametrize("name", WITH_WINDOWS)
def test_windows_of_the_reference_are_smaller_than_documents(name: str) -> None:
    tiny, inputs = MODELS[name], packed(DOCUMENTS)
    model = tiny.build()
    masks = masks_for(tiny, DOCUMENTS)
    wide = masks_for(Tiny(config="", model="", windows=(None,)), DOCUMENTS)
    wide = dict.fromkeys(masks, wide) if isinstance(masks, dict) else wide
    windowed, full = (model(**inputs, attention_mask=each).logits for each in (masks, wide))
    assert (windowed - full).abs().max() > 1e-4


@EACH_MODEL
def test_our_reference_is_what_transformers_makes_of_positions(name: str) -> None:
    """Its own mask of packed documents and of windows, where it has no cache, is the one written out by us."""
    tiny, inputs = MODELS[name], packed(DOCUMENTS)
    model = tiny.build()
    own = model(**inputs, use_cache=False).logits
    assert (own - model(**inputs, attention_mask=masks_for(tiny, DOCUMENTS)).logits).abs().max() < 1e-6


class Recording:
    """A session that notes what reaches it, and attends to the documents that it knows."""

    def __init__(self, position_ids: Tensor) -> None:
        self.position_ids = position_ids
        self.calls: list[tuple[Tensor, Tensor, int | None, float | None]] = []

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, window: int | None, scale: float | None) -> Tensor:
        self.calls.append((q.detach(), k.detach(), window, scale))
        active_attention.deactivate(self)
        try:
            return core_attention(q, k, v, position_ids=self.position_ids, window=window, scale=scale)
        finally:
            active_attention.activate(self)


@contextmanager
def recording(position_ids: Tensor) -> Iterator[Recording]:
    session = Recording(position_ids)
    active_attention.activate(session)
    try:
        yield session
    finally:
        active_attention.deactivate(session)


@EACH_MODEL
def test_positions_windows_and_scales_reach_the_session(name: str) -> None:
    """Each row of a shard is rotated as in the whole sequence: the first layer's queries and keys are equal rows."""
    tiny, inputs = MODELS[name], packed(DOCUMENTS)
    model = tiny.build()
    install(model)
    with recording(inputs["position_ids"]) as session:
        model(**inputs)
    scale = getattr(model.config, "query_pre_attn_scalar", tiny.heads[2]) ** -0.5
    assert [call[2] for call in session.calls] == list(tiny.windows)
    assert [call[3] for call in session.calls] == pytest.approx([scale] * len(tiny.windows))
    start, stop = 4, 11  # within the first document, to within the third
    shard = {key: value[:, start:stop] for key, value in inputs.items()}
    with recording(shard["position_ids"]) as part:
        model(**shard)
    for whole_rows, rows, heads in zip(session.calls[0][:2], part.calls[0][:2], tiny.heads, strict=False):
        assert rows.shape == (stop - start, heads, tiny.heads[2])
        assert torch.allclose(rows, whole_rows[start:stop], rtol=0, atol=1e-6)
        assert name == "gpt2" or not torch.allclose(rows[0], rows[0] * 0 + rows[4], atol=1e-6)


class RowByRow:
    """Attention that mixes no rows."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, window: int | None, scale: float | None) -> Tensor:
        keys, values = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))
        return values + q * keys


@EACH_MODEL
def test_nothing_but_attention_mixes_rows(name: str) -> None:
    inputs, model = packed(DOCUMENTS), MODELS[name].build()
    install(model)
    session = RowByRow()
    active_attention.activate(session)
    try:
        whole = model(**inputs).logits
        part = model(**{key: value[:, 4:11] for key, value in inputs.items()}).logits
    finally:
        active_attention.deactivate(session)
    assert torch.allclose(part, whole[:, 4:11], rtol=0, atol=1e-6 * whole.abs().max().item())


@EACH_MODEL
def test_heads_are_read_from_the_config(name: str) -> None:
    tiny = MODELS[name]
    heads, kv_heads, width = tiny.heads
    expected = [
        AttentionHeads(num_heads=heads, num_kv_heads=kv_heads, head_dim=width, window=window)
        for window in dict.fromkeys(tiny.windows)
    ]
    model = tiny.build()
    assert attention_heads(model) == expected
    assert install(nn.ModuleDict({"one": model, "two": tiny.build()})).heads == tuple(expected)


CHECKPOINTS = {"reentrant": True, "not_reentrant": False}


@pytest.mark.parametrize("use_reentrant", CHECKPOINTS.values(), ids=CHECKPOINTS)
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_neox", "gpt2"])
def test_gradient_checkpointing_changes_nothing(name: str, use_reentrant: bool) -> None:
    inputs, model = packed(DOCUMENTS), MODELS[name].build()
    install(model)
    weights = torch.randn(1, sum(DOCUMENTS), model.config.vocab_size, dtype=torch.float64)
    with recording(inputs["position_ids"]) as session:
        right = outcome(model, weights, **inputs)
        once = len(session.calls)
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        model.enable_input_require_grads()
        assert_same(outcome(model, weights, **inputs), right)
    assert len(session.calls) == 3 * once


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_bf16_autocast(name: str) -> None:
    """Norms of queries and keys leave them in float32 beside values in bfloat16."""
    inputs, model = packed(DOCUMENTS), MODELS[name].build().float()
    right = model(**inputs, use_cache=False).logits
    install(model)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(**inputs).logits
        logits.float().square().mean().backward()
    assert (logits - right).abs().max() < 0.05 * right.abs().max()
    assert all(each.grad is not None and each.grad.isfinite().all() for each in model.parameters())


@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(name, marks=pytest.mark.full) for name in ("mistral", "gpt2"))]
)
def test_compiled_models_are_found_and_run(name: str) -> None:
    inputs, model = packed(DOCUMENTS), MODELS[name].build()
    weights = torch.randn(1, sum(DOCUMENTS), model.config.vocab_size, dtype=torch.float64)
    root = nn.Module()
    root.model = torch.compile(model, backend="eager")
    before = root.model(**inputs, use_cache=False).logits  # compiled with the attention of before
    installed = install(root)
    assert installed.models == ("model._orig_mod",)
    with recording(inputs["position_ids"]) as session:
        ours = outcome(root.model, weights, **inputs)
        assert [call[2] for call in session.calls] == list(MODELS[name].windows)
    assert_same((ours[0], {}), (outcome(model, weights, **inputs)[0], {}))
    assert (ours[0] - before).abs().max() < 1e-6
    installed.restore()
    count = len(session.calls)
    root.model(**inputs, use_cache=False)
    assert len(session.calls) == count


def test_restore_puts_back_what_each_config_had() -> None:
    root = nn.ModuleDict({"a": MODELS["llama"].build(), "b": MODELS["qwen3"].build(attn_implementation="sdpa")})
    before = {name: copy.deepcopy(model.config.to_dict()) for name, model in root.items()}
    first, second = install(root), install(root)
    assert [model.config._attn_implementation for model in root.values()] == ["libra", "libra"]
    second.restore()
    first.restore()
    first.restore()
    assert [model.config._attn_implementation for model in root.values()] == ["eager", "sdpa"]
    assert {name: model.config.to_dict() for name, model in root.items()} == before
    assert not any(part._forward_pre_hooks for part in root.modules())


def test_a_model_saved_while_installed_loads_without_this_package(tmp_path: Path) -> None:
    import transformers

    model, inputs = MODELS["mistral"].build(), packed((9,))
    installed = install(model)
    model.save_pretrained(tmp_path)
    assert "libra" not in (tmp_path / "config.json").read_text()
    assert "libra" not in model.config.to_json_string(use_diff=False)
    installed.restore()
    loaded = transformers.MistralForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert loaded.config._attn_implementation == "sdpa"
    assert torch.allclose(loaded(**inputs).logits, model(**inputs).logits, rtol=0, atol=1e-6)


def test_a_config_in_a_checkpoint_is_the_one_of_before_and_copies_in_the_process_attend_as_the_model() -> None:
    model, inputs = MODELS["llama"].build(), packed(DOCUMENTS)
    install(model)
    stored = pickle.dumps(model.config)
    assert b"libra" not in stored
    assert pickle.loads(stored)._attn_implementation == "eager"
    copied = copy.deepcopy(model)
    with recording(inputs["position_ids"]) as session:
        copied(**inputs)
    assert len(session.calls) == 2


def test_a_module_without_models_of_transformers_is_left_alone() -> None:
    installed = install(nn.Linear(2, 2))
    assert installed.models == ()
    assert installed.heads == ()
    installed.restore()
