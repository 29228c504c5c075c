"""What cannot be trained under context parallelism is refused by name, before anything is changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from odb_libra_lightning.libra import active_attention
from odb_libra_lightning.strategies.huggingface import install
from odb_libra_lightning.strategies.huggingface_attention import libra_attention_forward, no_mask
from tests.strategies.tiny_models import DECODER, GPT2, MODELS, SIZES, Tiny, packed

transformers = pytest.importorskip("transformers")

DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 16,
}
MIXED_ROPE = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": DYNAMIC}
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "n_routed_experts": 4}
LATENT |= {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LLAMA = ("LlamaConfig", "LlamaForCausalLM")

REFUSED: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "dropout": (*LLAMA, {**DECODER, "attention_dropout": 0.25}, "attention_dropout=0.25"),
    "dropout_gpt2": ("GPT2Config", "GPT2LMHeadModel", GPT2, "attn_pdrop=0.1"),
    "softcap": ("Gemma2Config", "Gemma2ForCausalLM", DECODER, "attn_logit_softcapping=50.0"),
    "sinks": ("GptOssConfig", "GptOssForCausalLM", {**DECODER, "num_local_experts": 2}, "sinks .*self_attn.sinks"),
    "dynamic": (*LLAMA, {**DECODER, "rope_parameters": DYNAMIC}, "rope_type='dynamic'"),
    "longrope": (
        "Phi3Config",
        "Phi3ForCausalLM",
        {**DECODER, "pad_token_id": 0, "rope_parameters": LONG},
        "'longrope'",
    ),
    "dynamic_in_some_layers": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {**DECODER, "head_dim": 8, "rope_parameters": MIXED_ROPE},
        "rope_type='dynamic'",
    ),
    "chunks": ("Llama4TextConfig", "Llama4ForCausalLM", {**DECODER, "num_local_experts": 2}, "chunked_attention"),
    "linear": ("Qwen3NextConfig", "Qwen3NextForCausalLM", {**DECODER, "num_experts": 2}, "linear_attention"),
    "conv": ("Lfm2Config", "Lfm2ForCausalLM", {**DECODER, "layer_types": ["conv", "full_attention"]}, "type conv"),
    "mamba": ("MambaConfig", "MambaForCausalLM", SIZES, "type linear_attention"),
    "latent": ("DeepseekV3Config", "DeepseekV3ForCausalLM", {**DECODER, **LATENT, "v_head_dim": 8}, "16 wide .* 8 "),
    "bidirectional": ("BertConfig", "BertLMHeadModel", SIZES, "later tokens"),
    "encoder_decoder": (
        "T5Config",
        "T5ForConditionalGeneration",
        {"d_model": 32, "d_kv": 8, "num_layers": 1},
        "encoder",
    ),
    "cross": ("GPT2Config", "GPT2LMHeadModel", {**GPT2, "attn_pdrop": 0.0, "add_cross_attention": True}, "encoder"),
    "no_interface": ("BloomConfig", "BloomForCausalLM", SIZES, "AttentionInterface"),
    "heterogeneous": ("Gemma4TextConfig", "Gemma4ForCausalLM", DECODER, "per_layer_config"),
    "alibi": (*LLAMA, {**DECODER, "alibi": True}, "ALiBi"),
    "relative": (*LLAMA, {**DECODER, "position_embedding_type": "relative_key"}, "'relative_key'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_models_are_refused_by_name(case: str) -> None:
    config, model, settings, sentence = REFUSED[case]
    with torch.device("meta"):
        bad = getattr(transformers, model)(getattr(transformers, config)(**settings))
    good = MODELS["llama"].build()
    with pytest.raises(ValueError, match=rf"^two.decoder \({model}\) cannot be trained.*{sentence}"):
        install(nn.ModuleDict({"one": good, "two": nn.ModuleDict({"decoder": bad})}))
    assert good.config._attn_implementation == "eager"
    assert not good._forward_pre_hooks


def test_models_of_several_kinds_of_input_are_refused() -> None:
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**DECODER, "head_dim": 8}
    config = transformers.Gemma3Config(text_config=text, vision_config={**vision, "image_size": 28, "patch_size": 14})
    with torch.device("meta"):
        model = transformers.Gemma3ForConditionalGeneration(config)
    with pytest.raises(ValueError, match="models of its own for text_config, vision_config"):
        install(model)


def test_models_within_models_are_judged_by_their_own_configs() -> None:
    outer, inner = MODELS["llama"].build(), MODELS["qwen3"].build(attention_dropout=0.1)
    outer.model.draft = inner
    with pytest.raises(ValueError, match=r"\(Qwen3ForCausalLM\).*attention_dropout=0\.1"):
        install(outer)
    inner.config.attention_dropout = 0.0
    installed = install(outer)
    assert [heads.head_dim for heads in installed.heads] == [8, 16]
    assert inner.config._attn_implementation == "libra"
    installed.restore()
    assert inner.config._attn_implementation == "eager"


def test_a_convolution_in_a_decoder_is_refused_and_one_of_width_1_is_not() -> None:
    model = MODELS["llama"].build()
    model.model.layers[1].conv = nn.Conv1d(32, 32, 1)
    install(model).restore()
    model.model.layers[1].conv = nn.Conv1d(32, 32, 4)
    with pytest.raises(ValueError, match=r"model\.layers\.1\.conv is a convolution"):
        install(model)


class SomeMamba2Mixer(nn.Module):
    pass


def test_a_mixer_without_a_convolution_is_refused_by_the_name_of_its_class() -> None:
    model = MODELS["llama"].build()
    model.model.layers[1].mixer = SomeMamba2Mixer()
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mixer is a SomeMamba2Mixer"):
        install(model)


def test_dropout_counts_in_training_alone() -> None:
    model = MODELS["llama"].build(attention_dropout=0.1).eval()
    installed = install(model, training=False)
    inputs = packed((5, 2))
    assert model(**inputs).logits.isfinite().all()
    with pytest.raises(ValueError, match=r"attention dropout 0\.1"):
        model.train()(**inputs)
    installed.restore()


MIXING = {
    "LSTM": nn.LSTM(4, 4),
    "GRUCell": nn.GRUCell(4, 4),
    "MultiheadAttention": nn.MultiheadAttention(4, 2),
    "TransformerEncoderLayer": nn.TransformerEncoderLayer(4, 2, 4),
    "TransformerDecoderLayer": nn.TransformerDecoderLayer(4, 2, 4),
    "Transformer": nn.Transformer(4, 2, 1, 1, 4, batch_first=True),
}


@pytest.mark.parametrize("kind", MIXING)
def test_layers_of_torch_that_mix_rows_are_refused_by_their_place(kind: str) -> None:
    root = nn.ModuleDict({"head": nn.Linear(2, 2), "body": nn.Sequential(nn.Linear(2, 2), MIXING[kind])})
    with pytest.raises(ValueError, match=rf"^body\.1 is a {kind},.*core_attention"):
        install(root)


def attend(module: Any = None, **changes: Any) -> Any:
    rows = torch.randn(1, 4, 6, 8)
    arguments = {"query": rows, "key": rows[:, :2], "value": rows[:, :2], "attention_mask": None}
    arguments |= {"scaling": None, "dropout": 0.0, "position_ids": torch.arange(6)[None], **changes}
    return libra_attention_forward(module or nn.Module(), **arguments)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "mask": ({"attention_mask": torch.zeros(1, 1, 6, 6)}, "attention_mask.*position_ids"),
    "dropout": ({"dropout": 0.1}, r"dropout 0\.1"),
    "sinks": ({"s_aux": torch.zeros(4)}, "s_aux"),
    "softcap": ({"softcap": 30.0}, r"softcap=30\.0"),
    "bias": ({"position_bias": torch.zeros(1, 4, 6, 6)}, "position_bias"),
    "head_mask": ({"head_mask": torch.ones(4)}, "head_mask"),
    "weights": ({"output_attentions": True}, "output_attentions=True"),
    "not_causal": ({"is_causal": False}, "is_causal=False"),
    "indexer": ({"indices": torch.zeros(1, 6, 2)}, "indices"),
    "other_mean": ({"num_items_in_batch": torch.tensor(7)}, "num_items_in_batch"),
    "unknown": ({"colour": "red"}, "colour='red'"),
    "unknown_false": ({"colour": False}, "colour=False"),
    "unknown_zero": ({"colour": 0}, "colour=0"),
    "cache": ({"past_key_values": object()}, "past_key_values"),
    "cross": ({"query": torch.randn(1, 4, 3, 8)}, "from 3 tokens to 6"),
    "widths": ({"value": torch.randn(1, 2, 6, 4)}, "values of width 4 and keys of width 8"),
    "no_positions": ({"position_ids": None}, "not told position_ids"),
}


@pytest.mark.parametrize("case", WRONG)
def test_arguments_of_attention_are_refused_by_name(case: str) -> None:
    changes, sentence = WRONG[case]
    with pytest.raises(ValueError, match=sentence):
        attend(**changes)


def test_arguments_without_effect_are_taken() -> None:
    out, weights = attend(
        is_causal=True,
        softcap=None,
        s_aux=None,
        output_attentions=False,
        use_cache=False,
        past_key_values=None,
        cu_seq_lens_q=torch.tensor([0, 6]),
        max_length_k=6,
        colour=None,
    )
    assert out.shape == (1, 6, 4, 8)
    assert weights is None


def test_a_layer_that_is_not_causal_is_refused() -> None:
    layer = nn.Module()
    layer.is_causal = False
    with pytest.raises(ValueError, match="not causal"):
        attend(layer)


@pytest.mark.parametrize(
    ("setting", "value"), [("scale_attn_weights", False), ("scale_attn_by_inverse_layer_idx", True)]
)
def test_a_scale_that_a_layer_keeps_to_itself_is_refused(setting: str, value: bool) -> None:
    layer = nn.Module()
    setattr(layer, setting, value)
    attend(layer, scaling=0.5)
    with pytest.raises(ValueError, match="scales its scores"):
        attend(layer)


def test_a_layer_that_keeps_its_window_to_itself_is_refused() -> None:
    """Its mask has a window, and its attention is not told of it."""
    settings = {**DECODER, "num_local_experts": 2, "sliding_window": 3, "experts_implementation": "eager"}
    model = Tiny(config="PhimoeConfig", model="PhimoeForCausalLM", settings=settings).build()
    install(model)
    with pytest.raises(ValueError, match=r"layer 0, a PhimoeAttention, attends with sliding_window=None.* means 3"):
        model(**packed((5, 2)))


def test_a_layer_with_other_heads_than_its_config_says_is_refused() -> None:
    model = MODELS["llama"].build()
    install(model)
    model.config.num_key_value_heads = 1
    with pytest.raises(ValueError, match=r"2 KV heads of width 8.*\(4, 1, 8\)"):
        model(**packed((5, 2)))


def test_masks_and_padding_given_to_a_model_are_refused() -> None:
    inputs = packed((5, 2))
    for name in ("llama", "gemma3", "gpt2"):
        model = MODELS[name].build()
        install(model)
        for mask in (torch.ones(1, 7, dtype=torch.long), torch.zeros(1, 1, 7, 7)):
            with pytest.raises(ValueError, match="attention_mask"):
                model(**inputs, attention_mask=mask)


def test_masks_that_are_more_than_causal_are_refused() -> None:
    from transformers import masking_utils

    causal, window = masking_utils.causal_mask_function, masking_utils.sliding_window_causal_mask_function(3)
    packs = masking_utils.packed_sequence_mask_function(torch.tensor([[0, 0, 1]]))
    for mask in (causal, window, masking_utils.and_masks(window, packs), masking_utils.and_masks(causal, packs)):
        assert no_mask(1, 3, 3, mask_function=mask) is None
    wrong = {
        "or_masks": masking_utils.or_masks(causal, window),
        "blockwise_overlay": masking_utils.and_masks(causal, masking_utils.blockwise_overlay(torch.zeros(1, 3))),
        "chunked_overlay": masking_utils.and_masks(masking_utils.chunked_overlay(2, torch.zeros(1)), causal),
        "bidirectional_mask_function": masking_utils.bidirectional_mask_function,
        "lambda": masking_utils.and_masks(causal, lambda *args: True),
    }
    for name, mask in wrong.items():
        with pytest.raises(ValueError, match=name):
            no_mask(1, 3, 3, mask_function=mask)


def test_generation_with_a_cache_is_refused() -> None:
    model = MODELS["llama"].build().eval()
    install(model)
    with pytest.raises(ValueError, match=r"attention_mask|from 1 tokens to"):
        model.generate(packed((5,))["input_ids"], max_new_tokens=3, do_sample=False)


class Echo:
    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, window: int | None, scale: float | None) -> Tensor:
        return q


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "gpt2"])
def test_under_a_strategy_a_model_is_given_positions_and_one_packed_sequence(name: str) -> None:
    model, inputs = MODELS[name].build(), packed((5, 2))
    installed = install(model)
    assert model(inputs["input_ids"]).logits.isfinite().all()  # without a strategy it may count by itself
    session = Echo()
    active_attention.activate(session)
    try:
        assert model(**inputs).logits.isfinite().all()
        with pytest.raises(ValueError, match=r"called without position_ids.*position_ids=batch\['position_ids'\]"):
            model(inputs["input_ids"])
        with pytest.raises(ValueError, match=r"a batch of 2 sequences.*PackingCollator"):
            model(**{key: value.expand(2, -1) for key, value in inputs.items()})
        installed.restore()
        model(inputs["input_ids"])
    finally:
        active_attention.deactivate(session)
