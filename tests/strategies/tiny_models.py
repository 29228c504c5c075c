"""Small random models of transformers in float64, and packed batches for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

VOCABULARY = 61
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
DECODER = {**SIZES, "intermediate_size": 48, "num_key_value_heads": 2}
WINDOW = 3


@dataclass(frozen=True, kw_only=True)
class Tiny:
    """A model by the names of its config and class, and what its config says of its layers.

    `windows` are those of the layers, as its documentation says; `heads` are `(query, KV, width)`.
    """

    config: str
    model: str
    settings: dict[str, Any] = field(default_factory=lambda: dict(DECODER))
    windows: tuple[int | None, ...] = (None, None)
    heads: tuple[int, int, int] = (4, 2, 8)

    def build(self, **changes: Any) -> Any:
        transformers = pytest.importorskip("transformers")
        torch.manual_seed(0)
        settings = {"attn_implementation": "eager", **self.settings, **changes}
        model = getattr(transformers, self.model)(getattr(transformers, self.config)(**settings))
        return model.to(torch.float64).train()


GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
NO_DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
MIXED = ["sliding_attention", "full_attention"]
MODELS = {
    "llama": Tiny(config="LlamaConfig", model="LlamaForCausalLM"),
    "qwen2": Tiny(config="Qwen2Config", model="Qwen2ForCausalLM"),
    "qwen3": Tiny(
        config="Qwen3Config", model="Qwen3ForCausalLM", settings={**DECODER, "head_dim": 16}, heads=(4, 2, 16)
    ),
    "qwen3_windows": Tiny(
        config="Qwen3Config",
        model="Qwen3ForCausalLM",
        settings={**DECODER, "head_dim": 8, "use_sliding_window": True, "sliding_window": WINDOW, "layer_types": MIXED},
        windows=(WINDOW, None),
    ),
    "mistral": Tiny(
        config="MistralConfig",
        model="MistralForCausalLM",
        settings={**DECODER, "sliding_window": WINDOW},
        windows=(WINDOW, WINDOW),
    ),
    "mixtral": Tiny(
        config="MixtralConfig",
        model="MixtralForCausalLM",
        settings={**DECODER, "num_local_experts": 4, "experts_implementation": "eager"},
    ),
    "gemma3": Tiny(
        config="Gemma3TextConfig",
        model="Gemma3ForCausalLM",
        settings={**DECODER, "head_dim": 16, "sliding_window": WINDOW, "layer_types": MIXED},
        windows=(WINDOW, None),
        heads=(4, 2, 16),
    ),
    "gpt_neox": Tiny(
        config="GPTNeoXConfig",
        model="GPTNeoXForCausalLM",
        settings={**SIZES, "intermediate_size": 48},
        heads=(4, 4, 8),
    ),
    "gpt2": Tiny(config="GPT2Config", model="GPT2LMHeadModel", settings={**GPT2, **NO_DROPOUT}, heads=(4, 4, 8)),
    "phi3": Tiny(config="Phi3Config", model="Phi3ForCausalLM", settings={**DECODER, "pad_token_id": 0}),
    "olmo2": Tiny(config="Olmo2Config", model="Olmo2ForCausalLM"),
}


def packed(documents: Sequence[int]) -> dict[str, Tensor]:
    """Tokens and positions `[1, T]` of documents that lie behind one another."""
    generator = torch.Generator().manual_seed(sum(documents))
    positions = torch.cat([torch.arange(length) for length in documents])
    tokens = torch.randint(1, VOCABULARY, (1, len(positions)), generator=generator)
    return {"input_ids": tokens, "position_ids": positions[None]}


def mask_of(documents: Sequence[int], window: int | None) -> Tensor:
    """What a query must not see is -inf: keys of other documents, later ones, and those out of the window."""
    rows = [(document, place) for document, length in enumerate(documents) for place in range(length)]
    seen = [
        [other == document and at <= place and (window is None or place - at < window) for other, at in rows]
        for document, place in rows
    ]
    return torch.zeros(len(rows), len(rows), dtype=torch.float64).masked_fill(~torch.tensor(seen), -torch.inf)[
        None, None
    ]


def masks_for(tiny: Tiny, documents: Sequence[int]) -> Any:
    """The mask as the model takes it: one, or one for each type of layer."""
    masks = {window: mask_of(documents, window) for window in tiny.windows}
    if len(masks) == 1:
        return next(iter(masks.values()))
    return {"full_attention": masks[None], "sliding_attention": masks[WINDOW]}


class _Wide:
    """`torch`, but with a float32 that is float64."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def compute_in_float64(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have norms and softmax of a model compute in float64 where it says float32."""
    import sys

    for name in {type(part).__module__ for part in model.modules()}:
        if name.startswith("transformers.models."):
            monkeypatch.setattr(sys.modules[name], "torch", _Wide())
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
