"""Configs of decoders as the hub has them: read whole, counted as published, or refused by the name of a key.

What config.json does not say means, for every architecture, what it means to the class.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tests.interop.decoder_configs import (
    BLOOM_560M,
    FALCON_7B,
    FALCON_40B,
    GPT2,
    GPT_NEO_125M,
    GRANITE_2B,
    LLAMA_2_7B,
    LLAMA_3_2_1B,
    LLAMA_3_8B,
    MISTRAL_7B,
    OPT_125M,
    OPT_350M,
    PARAMETERS,
    PHI_2,
    PHI_3_MINI_4K,
    QWEN2_05B,
    SMOLLM3_3B,
    STARCODER_1B,
    XGLM_564M,
)
from tests.interop.gemma_configs import GEMMA2_2B, GEMMA3_1B, GEMMA_2B, OLMO_1B
from tests.interop.parity import section_of
from tformer.build import build_model, count_parameters
from tformer.interop.architectures import ARCHITECTURES
from tformer.interop.choose import choose_class
from tformer.nn.positions.rope import RopeOptions, RopePositions, RopeScaling
from tformer.recipe.model import Model, layer_sections
from tformer.support.errors import InputError


@pytest.mark.parametrize("name", PARAMETERS)
def test_released_configs_are_read_and_count_as_published(name: str) -> None:
    config, expected = PARAMETERS[name]
    model = section_of(config)
    assert count_parameters(model) == expected
    table = ARCHITECTURES[config["model_type"]].links(model, config["architectures"][0])
    built = build_model(model, device="meta")
    assert {entry.ours for entry in table} == set(built.state_dict()) - set(built.tied_names())


def test_what_is_not_in_the_sizes_is_read_too() -> None:
    stretched, plain = section_of(LLAMA_3_2_1B), section_of(LLAMA_3_8B)
    assert stretched.decoder and plain.decoder
    assert stretched.decoder.positions == RopeOptions(
        base=500000.0,
        scaling=RopeScaling(factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=8192),
    )
    assert plain.decoder.positions == RopeOptions(base=500000.0)
    assert (plain.max_seq_len, plain.decoder.norm.eps, plain.decoder.num_kv_heads) == (8192, 1e-5, 8)
    assert (stretched.tie.output, plain.tie.output) == (True, False)


LLAMA3_ROPE = LLAMA_3_2_1B["rope_scaling"]


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_parameters": {"rope_theta": 500000.0, **LLAMA3_ROPE}, "rope_theta": None, "rope_scaling": None},
        {"rope_parameters": LLAMA3_ROPE, "rope_scaling": None},
        {"rope_scaling": {"type": "llama3", **{k: v for k, v in LLAMA3_ROPE.items() if k != "rope_type"}}},
        {"rope_scaling": LLAMA3_ROPE, "rope_parameters": {"rope_type": "default", "rope_theta": 1.0}},
    ],
    ids=["newer", "base-outside", "older-type", "older-goes-first"],
)
def test_older_and_newer_names_of_rope_are_one_model(keys: dict[str, Any]) -> None:
    """As the library itself resolves them."""
    config = LLAMA_3_2_1B | keys
    assert section_of(config) == section_of(LLAMA_3_2_1B)
    theirs: Any = transformers.LlamaConfig(**json.loads(json.dumps(config))).rope_parameters
    assert (theirs["rope_type"], theirs["rope_theta"], theirs["factor"]) == ("llama3", 500000.0, 32.0)


def test_the_length_before_stretching_may_stand_outside() -> None:
    """Where it goes before the one inside: the frequencies are the library's."""
    rope = {"rope_theta": 500.0, **LLAMA3_ROPE, "original_max_position_embeddings": 64}
    config = transformers.LlamaConfig(hidden_size=20, num_attention_heads=5)
    config.rope_parameters, config.original_max_position_embeddings = rope, 16
    theirs = LlamaRotaryEmbedding(config).inv_freq
    model = section_of(LLAMA_2_7B | {"rope_parameters": rope, "original_max_position_embeddings": 16})
    assert model.decoder and isinstance(model.decoder.positions, RopeOptions)
    ours = RopePositions(model.decoder.positions, head_dim=4, max_seq_len=2).formula(torch.tensor([1]))
    torch.testing.assert_close(ours[0], torch.cat((theirs.cos(), theirs.sin())).double(), atol=1e-6, rtol=0)


def test_rope_is_written_under_newer_and_older_names_alike() -> None:
    """An older version of the library passes over `rope_parameters`."""
    keys = choose_class(section_of(LLAMA_3_2_1B), family="llama", model_type="llama").config
    assert keys["rope_theta"] == 500000.0 and keys["rope_scaling"] == keys["rope_parameters"]
    assert section_of(LLAMA_2_7B | keys) == section_of(LLAMA_3_2_1B)
    plain = choose_class(section_of(LLAMA_3_8B), family="llama", model_type="llama").config
    assert plain["rope_parameters"] == {"rope_type": "default", "rope_theta": 500000.0}
    assert plain["rope_theta"] == 500000.0 and "rope_scaling" not in plain


def test_a_missing_rope_means_base_ten_thousand() -> None:
    model = section_of({key: value for key, value in LLAMA_2_7B.items() if key != "rope_scaling"})
    assert model.decoder and model.decoder.positions == RopeOptions(base=10000.0)


GALACTICA = {"learned_embeddings": True, "scale_embeddings": False, "enable_bias": False}
QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 32768}


SLIDING = {"sliding_window": 8, "layer_types": ["sliding_attention"] * 24}


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        (MISTRAL_7B | {"sliding_window": 4096}, [4095] * 32),
        ({key: value for key, value in MISTRAL_7B.items() if key != "sliding_window"}, [4095] * 32),
        (QWEN2_05B | QWEN_WINDOW | {"max_window_layers": 23}, [None] * 23 + [32767]),
        (QWEN2_05B | SLIDING, [7] * 24),
        (GPT_NEO_125M, [None, 255] * 6),
        (QWEN2_05B | SLIDING | {"layer_types": ["sliding_attention", "full_attention"] * 12}, [7, None] * 12),
    ],
    ids=["mistral", "mistral-default", "qwen2-last-layer", "qwen2-all", "gpt-neo", "qwen2-alternating"],
)
def test_a_window_is_that_of_its_layers_without_the_own_key(config: dict[str, Any], windows: list[int | None]) -> None:
    stack = section_of(config).decoder
    assert stack is not None
    found = [layer.attention for layer in layer_sections(stack, path="model.decoder")]
    assert [getattr(attention, "window", None) for attention in found] == windows


@pytest.mark.parametrize("newer", [False, True])
def test_gemma_3_has_windows_and_a_base_of_their_own_in_five_of_six_layers(newer: bool) -> None:
    config = dict(GEMMA3_1B)
    if newer:
        for key in ("rope_theta", "rope_local_base_freq", "rope_scaling"):
            del config[key]
        config["rope_parameters"] = {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }
    stack = section_of(config).decoder
    assert stack is not None
    layers = layer_sections(stack, path="model.decoder")
    assert [getattr(layer.attention, "window", None) for layer in layers] == ([511] * 5 + [None]) * 4 + [511] * 2
    assert {getattr(layer.attention, "window", None): layer.positions.base for layer in layers} == {511: 1e4, None: 1e6}


@pytest.mark.parametrize(
    "config",
    [
        OPT_125M | GALACTICA,
        MISTRAL_7B | {"sliding_window": 32768},
        QWEN2_05B | {"use_sliding_window": True},  # a window of all positions
        QWEN2_05B | QWEN_WINDOW | {"max_window_layers": 24},  # of 24 layers: none slides
        QWEN2_05B | QWEN_WINDOW | {"max_window_layers": 0, "layer_types": ["full_attention"] * 24},
        QWEN2_05B | {"sliding_window": None, "layer_types": ["full_attention"] * 24},
        BLOOM_560M | {"n_embed": None, "hidden_size": 1024, "slow_but_exact": True, "pretraining_tp": 4},
        GPT2 | {"reorder_and_upcast_attn": True, "n_embd": None, "hidden_size": 768},
        LLAMA_2_7B | {"partial_rotary_factor": 1.0, "num_key_value_heads": None},
        LLAMA_2_7B | {"is_llama_config": True, "rope_interleaved": False, "max_sequence_length": 2048},
        QWEN2_05B | {"_attn_implementation_autoset": True, "transformers.js_config": {"kv_cache_dtype": "fp16"}},
    ],
    ids=lambda config: config["model_type"],
)
def test_features_that_switch_nothing_on_are_read(config: dict[str, Any]) -> None:
    assert section_of(config).decoder is not None


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (GPT2 | {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        (GPT2 | {"scale_attn_weights": False}, "scale_attn_weights"),
        (GPT2 | {"add_cross_attention": True}, "add_cross_attention"),
        (GPT2 | {"activation_function": "mish"}, "activation_function"),
        (GPT2 | {"hidden_size": 1024}, "n_embd 768 and hidden_size 1024"),
        (LLAMA_2_7B | {"rope_scaling": {"type": "axial", "factor": 2.0}}, "rope_scaling: rope_type"),
        (LLAMA_2_7B | {"rope_parameters": {"rope_type": "proportional"}}, "rope_parameters: rope_type"),
        (LLAMA_2_7B | {"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 3}}, "rope_scaling: beta_fast"),
        (
            LLAMA_2_7B | {"rope_scaling": {"type": "su", "long_factor": [1.0]}},
            "rope_scaling: the key short_factor",
        ),
        (LLAMA_2_7B | {"rope_parameters": {"rope_type": "yarn", "mscale": 0.7}}, "rope_parameters: mscale"),
        (PHI_2 | {"qk_layernorm": "yes"}, "qk_layernorm"),
        (PHI_3_MINI_4K | {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type: found 'linear'"),
        (
            SMOLLM3_3B | {"no_rope_layers": [1, 0]},
            "no_rope_layers: found [1, 0], expected 0 or 1 for each of 36 layers",
        ),
        (SMOLLM3_3B | {"layer_types": ["sliding_attention"]}, "layer_types"),
        (FALCON_7B | {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn"),
        (FALCON_40B | {"parallel_attn": False}, "parallel_attn"),
        (LLAMA_3_2_1B | {"rope_scaling": {**LLAMA3_ROPE, "beta_fast": 32}}, "rope_scaling: beta_fast"),
        (LLAMA_3_2_1B | {"rope_scaling": {**LLAMA3_ROPE, "factor": None}}, "rope_scaling: the key factor"),
        (LLAMA_2_7B | {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "rope_parameters: full_attention"),
        (LLAMA_2_7B | {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (LLAMA_2_7B | {"quantization_config": {"bits": 4}}, "quantization_config"),
        (LLAMA_2_7B | {"hidden_act": "xielu"}, "hidden_act"),
        (LLAMA_2_7B | {"rms_norm_eps": float("nan")}, "rms_norm_eps: found nan, expected a finite number"),
        (LLAMA_2_7B | {"rope_scaling": {"type": "dynamic", "factor": float("inf")}}, "rope_scaling: factor: found inf"),
        (LLAMA_2_7B | {"num_attention_heads": 30, "head_dim": 128}, "num_attention_heads"),
        (LLAMA_2_7B | {"pretraining_temperature": 2.0}, "pretraining_temperature"),
        (MISTRAL_7B | {"sliding_window": 1}, "sliding_window"),
        (MISTRAL_7B | {"attention_bias": True}, "attention_bias"),
        (QWEN2_05B | {"sliding_window": 8, "layer_types": ["sliding_attention"] * 23}, "layer_types"),
        (QWEN2_05B | {"sliding_window": 8, "layer_types": ["chunked_attention"] * 24}, "layer_types"),
        (OPT_350M | {"tie_word_embeddings": False}, "tie_word_embeddings"),
        (GPT_NEO_125M | {"num_layers": 13}, "attention_types"),
        (GPT_NEO_125M | {"attention_types": [[["global", "dilated"], 6]]}, "attention_types"),
        (GPT_NEO_125M | {"attention_types": [[["global"], 10**15]]}, "attention_types"),
        (GPT_NEO_125M | {"attention_types": [[[], 10**15]]}, "attention_types"),
        *((config | {"num_hidden_layers": 2**40}, "num_hidden_layers") for config in (GEMMA2_2B, MISTRAL_7B)),
        (GPT_NEO_125M | {"attention_types": ["global"]}, "attention_types"),
        (GPT_NEO_125M | {"attention_types": [[[["global"]], 12]]}, "attention_types"),
        (GPT_NEO_125M | {"window_size": 1}, "window_size"),
        (STARCODER_1B | {"scale_attn_weights": False}, "scale_attn_weights"),
        (STARCODER_1B | {"multi_query": "one"}, "multi_query"),
        (XGLM_564M | {"add_cross_attention": True}, "add_cross_attention"),
        (OPT_125M | {"learned_embeddings": False}, "learned_embeddings"),
        (OPT_125M | {"scale_embeddings": True}, "scale_embeddings"),
        (BLOOM_560M | {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm"),
        (GEMMA_2B | {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (GEMMA3_1B | {"rope_parameters": {"rope_theta": 1.0}}, "rope_parameters: found rope_theta"),
        (GEMMA3_1B | {"rope_scaling": {"rope_type": "ntk", "factor": 8.0}}, "rope_parameters: rope_type"),
        (GEMMA3_1B | {"rope_parameters": {"full_attention": 3}}, "rope_parameters: full_attention"),
        (GEMMA2_2B | {"layer_types": ["full_attention"]}, "layer_types"),
        (GEMMA2_2B | {"layer_types": [[]] * 26}, "layer_types"),
        (GEMMA2_2B | {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        (GRANITE_2B | {"logits_scaling": -8.0}, "logits_scaling"),
        (GRANITE_2B | {"embedding_multiplier": 0.0}, "embedding_multiplier"),
        (GRANITE_2B | {"embedding_multiplier": 10**400}, "embedding_multiplier"),
        (OLMO_1B | {"clip_qkv": 8.0}, "clip_qkv"),
        (BLOOM_560M | {"n_head": 8}, "n_head 8 and num_attention_heads 16"),
    ],
    ids=lambda value: value if isinstance(value, str) else value["model_type"],
)
def test_what_tformer_lacks_is_refused_by_the_name_of_its_key(config: dict[str, Any], key: str) -> None:
    with pytest.raises(InputError) as refused:
        section_of(config)
    assert f"config.json: {key}" in refused.value.message and "\n" not in refused.value.message


CLASSES = [
    (name, written)
    for name, architecture in ARCHITECTURES.items()
    if architecture.code is None  # the others are no classes of the library
    for written in architecture.classes
]
WITHOUT_WINDOW = {"mistral": {"sliding_window": None}}  # its own, 4096, would be refused


@pytest.mark.parametrize(("model_type", "class_name"), CLASSES)
def test_a_missing_key_means_the_default_of_the_class(model_type: str, class_name: str) -> None:
    def of_class(values: dict[str, Any]) -> Model:
        return section_of({**values, "model_type": model_type, **WITHOUT_WINDOW.get(model_type, {})}, class_name)

    assert of_class({}) == of_class(transformers.CONFIG_MAPPING[model_type]().to_dict())
