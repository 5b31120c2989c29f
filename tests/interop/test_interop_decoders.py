"""GPT-2, Llama, Mistral, Qwen2, Qwen3, OPT and Bloom with the head of a language model, there and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from tests.interop.parity import assert_agree, assert_parity, imported, padding, randomized, saved, tokens
from tests.interop.tiny_models import IDS, config_of, make
from tformer.build import build_model
from tformer.interop.choose import choose_class
from tformer.interop.weight_files import outgoing
from tformer.recipe.model import Model, layer_sections

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALED: dict[str, dict[str, Any]] = {  # beside a factor of 4; texts of 13 tokens are longer than 6 and 8
    "linear": {},
    "dynamic": {},
    "yarn": {"original_max_position_embeddings": 6, "beta_fast": 4.0, "beta_slow": 0.5},
    "longrope": {
        "original_max_position_embeddings": 6, "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 1.5, 3.0, 4.0]
    },
}  # fmt: skip
ROPE = {"rope_theta": 500.0, "original_max_position_embeddings": 8, **LLAMA3}
WINDOWS = {"head_dim": 6, "num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 4}
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"] * 2}
PLAIN_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}

TWO_BASES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
}

# case: (name of the class, values of its config), beside a width of 20 and 4 heads
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, odd heads": ("Llama", {"head_dim": 6, "tie_word_embeddings": False}),
    "llama, biases": ("Llama", {"head_dim": 8, "attention_bias": True, "num_key_value_heads": 1}),
    "llama, tied": ("Llama", {"head_dim": 8, "tie_word_embeddings": True}),
    "llama, gelu": ("Llama", {"head_dim": 4, "mlp_bias": True, "hidden_act": "gelu", "num_key_value_heads": 4}),
    "llama, scaled": ("Llama", {"head_dim": 6, "rope_parameters": ROPE}),
    **{f"llama, {kind}": ("Llama", {"head_dim": 8, "max_position_embeddings": 8, "rope_parameters": {
           "rope_type": kind, "rope_theta": 500.0, "factor": 4.0, **values}}) for kind, values in SCALED.items()},
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 8}),
    "mistral, a window of all": ("Mistral", {"sliding_window": 29, "head_dim": 6}),
    # 3 heads do not divide 20: Llama's class refuses that
    "mistral, 3 heads": ("Mistral", {"sliding_window": None, "head_dim": 8, "num_attention_heads": 3,
                                     "num_key_value_heads": 1}),
    **{f"mistral, window {size}": ("Mistral", {"head_dim": 6, "sliding_window": size, "tie_word_embeddings": False})
       for size in (2, 5, 12)},
    **{f"{name}, last layers": (name, {**WINDOWS, "max_window_layers": 1}) for name in ("Qwen2", "Qwen3")},
    **{f"{name}, alternating layers": (name, {**WINDOWS, **ALTERNATING}) for name in ("Qwen2", "Qwen3")},
    "qwen2, tied": ("Qwen2", {"head_dim": 6, "tie_word_embeddings": True, **PLAIN_ROPE}),
    "qwen2": ("Qwen2", {"num_attention_heads": 5, "num_key_value_heads": 1, "tie_word_embeddings": False,
                        **PLAIN_ROPE}),
    "qwen3, tied": ("Qwen3", {"head_dim": 6, "tie_word_embeddings": True}),
    "qwen3, biases": ("Qwen3", {"head_dim": 6, "tie_word_embeddings": False, "attention_bias": True}),
    "opt": ("OPT", {"num_attention_heads": 5}),
    "opt, untied": ("OPT", {"tie_word_embeddings": False, "activation_function": "gelu"}),
    "opt, Galactica": ("OPT", {"enable_bias": False, "layer_norm_elementwise_affine": False}),
    "opt, no final norm": ("OPT", {"_remove_final_layer_norm": True}),
    **{f"bloom, {heads} heads": ("Bloom", {"hidden_size": heads * 6, "n_head": heads, "layer_norm_epsilon": 0.02,
                                           "tie_word_embeddings": heads != 5}) for heads in (3, 4, 5)},
    "neox": ("GPTNeoX", {}),
    "neox, in turn": ("GPTNeoX", {"use_parallel_residual": False, "attention_bias": False, "hidden_act": "gelu_new",
                                  "rope_parameters": {"rope_type": "default", "rope_theta": 99.0,
                                                      "partial_rotary_factor": 1.0}}),
    "neox, tied": ("GPTNeoX", {"tie_word_embeddings": True}),
    "gpt-j": ("GPTJ", {"layer_norm_epsilon": 0.02}),
    "gpt-j, half": ("GPTJ", {"n_inner": 20, "n_head": 2, "rotary_dim": 10, "tie_word_embeddings": True}),
    "phi": ("Phi", {}),
    "phi, longer": ("Phi", {"partial_rotary_factor": 0.75, "max_position_embeddings": 8,
                            "rope_parameters": {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 100.0}}),
    "phi, norms of queries and keys": ("Phi", {"qk_layernorm": True}),
    "stablelm": ("StableLm", {}),
    "stablelm, norms of each head": ("StableLm", {"qk_layernorm": True, "use_parallel_residual": True}),
    "stablelm, side by side": ("StableLm", {"use_parallel_residual": True, "use_qkv_bias": True,
                                            "tie_word_embeddings": True}),
    "opt, post-norm and narrow": ("OPT", {"do_layer_norm_before": False, "word_embed_proj_dim": 12}),
    "opt, narrow": ("OPT", {"word_embed_proj_dim": 12, "_remove_final_layer_norm": True}),
    "xglm": ("XGLM", {}),
    "xglm, unscaled": ("XGLM", {"scale_embedding": False, "tie_word_embeddings": False}),
    "gpt-neo": ("GPTNeo", {}),
    "gpt-neo, global": ("GPTNeo", {"attention_types": [[["global"], 3]], "tie_word_embeddings": False}),
    "gpt-bigcode": ("GPTBigCode", {}),
    "gpt-bigcode, keys of every head": ("GPTBigCode", {"multi_query": False, "tie_word_embeddings": False}),
    "gemma": ("Gemma", {"hidden_act": "gelu"}),
    "gemma, biases": ("Gemma", {"attention_bias": True, "tie_word_embeddings": False}),
    "gemma2": ("Gemma2", {"query_pre_attn_scalar": 10, "sliding_window": 4, "attn_logit_softcapping": 2.0,
                          "final_logit_softcapping": 1.5}),
    "gemma2, no caps": ("Gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None,
                                   "sliding_window": 4, "layer_types": ["full_attention"] * 3}),
    "gemma3": ("Gemma3Text", {"sliding_window": 4, "num_hidden_layers": 7, "rope_parameters": TWO_BASES}),
    "gemma3, capped": ("Gemma3Text", {"final_logit_softcapping": 1.5, "sliding_window": 5,
                                      "layer_types": ["sliding_attention"] * 3}),
    "olmo": ("Olmo", {"tie_word_embeddings": True}),
    "olmo2": ("Olmo2", {"attention_bias": True}),
    "olmo2, one kv head": ("Olmo2", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "granite": ("Granite", {"embedding_multiplier": 3.0, "logits_scaling": 7.0, "residual_multiplier": 0.22,
                            "attention_multiplier": 0.3}),
    "granite, biases": ("Granite", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "starcoder2": ("Starcoder2", {}),
    "starcoder2, window": ("Starcoder2", {"sliding_window": 5, "use_bias": False, "tie_word_embeddings": False}),
    "phi3": ("Phi3", {}),
    "phi3, window": ("Phi3", {"sliding_window": 5, "tie_word_embeddings": True, "num_key_value_heads": 4}),
    "phi3, a share of longrope": ("Phi3", {"partial_rotary_factor": 0.75, "original_max_position_embeddings": 6,
        "rope_parameters": {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.2], "long_factor": [1.0, 2.0, 4.0]}}),
    "smollm3": ("SmolLM3", {"attention_bias": True, "tie_word_embeddings": False}),
    "smollm3, windows": ("SmolLM3", {"no_rope_layers": [0, 1, 1, 0, 1], "use_sliding_window": True,
                                     "sliding_window": 4, "mlp_bias": True}),
    "falcon, 7B": ("Falcon", {}),
    "falcon, 40B": ("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    "falcon, 11B": ("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1,
                               "tie_word_embeddings": False}),
    "falcon, 1B": ("Falcon", {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}),
    "falcon, alibi of 3 heads": ("Falcon", {"hidden_size": 24, "num_attention_heads": 3, "alibi": True}),
    "falcon, in turn": ("Falcon", {"parallel_attn": False, "activation": "relu"}),
    "gpt2": ("GPT2", {"layer_norm_epsilon": 0.02}),
    "gpt2, untied": ("GPT2", {"tie_word_embeddings": False, "activation_function": "relu"}),
}  # fmt: skip
COUNT_PADDING = ("GPT2", "GPTNeo", "GPTBigCode", "XGLM")
SLIDING = {  # case: the window of each layer, without the own key
    **{f"mistral, window {size}": [size - 1] * 3 for size in (2, 5, 12)},
    **{f"{name}, last layers": [None, 3, 3, 3] for name in ("Qwen2", "Qwen3")},
    "phi3, window": [4, 4],
    "smollm3, windows": [3, None, None, 3, None],
    **{f"{name}, alternating layers": [3, None, 3, None] for name in ("Qwen2", "Qwen3")},
    "gpt-neo": [3, None, 3],
    "gemma2": [3, None, 3],
    "gemma3": [3] * 5 + [None, 3],
    "gemma3, capped": [4] * 3,
    "starcoder2, window": [4] * 3,
}


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize("case", CASES)
def test_a_decoder_there_and_back(tmp_path: Path, case: str, left: bool) -> None:
    name, values = CASES[case]
    reference = transformers.AutoModelForCausalLM.from_config(config_of(name, **values))
    mask = padding(13, 13, 9, 5, left=left)
    inputs = {"input_ids": tokens(3, 13, vocabulary=61), "attention_mask": mask}
    # These count positions from the left edge, padding or not, and have to be told.
    places = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)} if name in COUNT_PADDING else {}
    kind = reference.config.model_type
    model, foreign = assert_parity(
        reference, inputs, tmp_path, mask=mask, model_type=kind, their_inputs=inputs | places
    )
    assert bool(model.tied_names()) == reference.config.tie_word_embeddings
    assert foreign.model.decoder is not None
    layers = layer_sections(foreign.model.decoder, path="model.decoder")
    windows = [getattr(layer.attention, "window", None) for layer in layers]
    assert windows == SLIDING.get(case, [None] * len(layers))
    assert name != "Bloom" or foreign.model.max_seq_len == 2048  # ALiBi has no length


@pytest.mark.parametrize(("name", "length"), [("OPT", 29), ("GPT2", 23)])
def test_a_decoder_with_learned_positions_at_its_last_position(tmp_path: Path, name: str, length: int) -> None:
    reference = transformers.AutoModelForCausalLM.from_config(config_of(name))
    assert_parity(reference, {"input_ids": tokens(2, length, vocabulary=61)}, tmp_path)


def test_llama3_scaling_changes_what_is_computed(tmp_path: Path) -> None:
    """Otherwise the parity above would prove nothing about it."""
    reference = make("Llama", "CausalLM", head_dim=6, rope_parameters=ROPE)
    model, foreign = imported(saved(randomized(reference), tmp_path / "model"))
    values = foreign.model.model_dump()
    values["decoder"]["positions"]["scaling"] = None
    plain = build_model(Model.model_validate(values)).eval()
    plain.load_state_dict(model.state_dict())
    ids = tokens(1, 29, vocabulary=61)
    difference = (plain(ids).logits - model(ids).logits).abs().max()
    assert difference > 0.01 * model(ids).logits.abs().max()


@pytest.mark.parametrize("kind", [True, "learned"])
def test_normalized_queries_and_keys_are_exported_as_qwen3(kind: bool | str) -> None:
    """Without gains they get gains of one; adjacent rotary pairs become halves, with their gains."""
    attention = {"kind": "full", "qk_norm": kind, "qkv_bias": False, "out_bias": False, "qk_norm_eps": 1e-5}
    section = Model.model_validate({
        "d_model": 16,
        "vocab_size": 61,
        "tie": {"output": True},
        "decoder": {
            "num_layers": 1,
            "num_heads": 2,
            "positions": {"kind": "rope", "layout": "interleaved"},
            "attention": attention,
            "feedforward": {"activation": "silu", "gated": True, "bias": False, "d_ff": 32},
            "norm": {"kind": "rmsnorm", "place": "pre", "eps": 1e-5},
        },
    })  # fmt: skip
    choice = choose_class(section, family="gpt")
    assert choice.class_name == "Qwen3ForCausalLM"
    built = build_model(section).eval()
    randomized(built)
    model, weights = section, {n: t for n, t in built.state_dict().items() if n not in built.tied_names()}
    for step in choice.steps:
        model, weights = step.apply(model, weights)
    other = build_model(model).eval()
    other.load_state_dict(weights, strict=False)
    ids = tokens(2, 9, vocabulary=61)
    torch.testing.assert_close(other(ids).logits, built(ids).logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("name", "norm", "attention"),
    [
        ("Olmo2ForCausalLM", {"place": "res_post"}, {"qk_norm": "width", "qk_norm_eps": 1e-5}),
        ("Gemma3ForCausalLM", {"place": "sandwich", "unit_offset": True},
         {"qk_norm": "unit_offset", "qk_norm_eps": 1e-5, "scale": 0.25}),
        ("Gemma2ForCausalLM", {"place": "sandwich", "unit_offset": True}, {"softcap": 5.0, "scale": 0.25}),
        ("GraniteForCausalLM", {}, {"scale": 0.3}),
        ("StableLmForCausalLM", {"kind": "layernorm"}, {"qk_norm": "groupnorm", "qk_norm_eps": 1e-5}),
    ],
)  # fmt: skip
def test_own_models_are_exported_as_the_class_that_computes_them(
    name: str, norm: dict[str, Any], attention: dict[str, Any]
) -> None:
    """Adjacent rotary pairs become halves, with the gains of their norms."""
    is_gemma = name.startswith("Gemma")
    section = Model.model_validate({
        "d_model": 16,
        "vocab_size": 61,
        "embedding": {"scale": {"Granite": 3.0}.get(name[:7], "rounded" if is_gemma else False)},
        "decoder": {
            "num_layers": 2,
            "num_heads": 4,
            "num_kv_heads": 2,
            "positions": {"kind": "rope", "layout": "interleaved"},
            "attention": {"qkv_bias": False, "out_bias": False, **attention},
            "feedforward": {"activation": "gelu_tanh" if is_gemma else "silu", "gated": True, "bias": False},
            "norm": {"kind": "rmsnorm", "eps": 1e-5, **norm},
            "residual_multiplier": 0.7 if name.startswith("Granite") else 1.0,
        },
    })  # fmt: skip
    choice = choose_class(section, family="gpt")
    assert choice.class_name == name and len(choice.steps) == 1
    built = build_model(section).eval()
    randomized(built)
    weights = {key: value for key, value in built.state_dict().items() if key not in built.tied_names()}
    model, weights = choice.steps[0].apply(section, weights)
    other = build_model(model).eval()
    other.load_state_dict(weights, strict=False)
    ids = tokens(2, 9, vocabulary=61)
    torch.testing.assert_close(other(ids).logits, built(ids).logits, atol=1e-4, rtol=1e-5)


def test_without_being_asked_heads_that_do_not_divide_the_width_are_exported_as_mistral() -> None:
    values: dict[str, Any] = {
        "d_model": 20,
        "vocab_size": 61,
        "tie": {"output": False},
        "decoder": {
            "num_heads": 3,
            "head_dim": 6,
            "positions": {"kind": "rope"},
            "attention": {"kind": "full", "qkv_bias": False, "out_bias": False},
            "feedforward": {"d_ff": 27, "activation": "silu", "gated": True, "bias": False},
            "norm": {"kind": "rmsnorm"},
        },
    }
    chosen = choose_class(Model.model_validate(values), family="llama")
    assert (chosen.architecture.model_type, chosen.class_name) == ("mistral", "MistralForCausalLM")
    assert chosen.config["sliding_window"] is None  # a missing key would mean 4096
    values["decoder"]["num_heads"] = 4
    assert choose_class(Model.model_validate(values), family="llama").class_name == "LlamaForCausalLM"


def test_biases_on_queries_keys_and_values_alone_are_exported_as_qwen2(tmp_path: Path) -> None:
    reference = make("Qwen2", "CausalLM", head_dim=6)
    _, foreign = imported(saved(randomized(reference), tmp_path / "model"))
    assert choose_class(foreign.model, family="llama").class_name == "Qwen2ForCausalLM"


BIASED: dict[str, Any] = {"num_layers": 2, "num_heads": 4, "positions": {"kind": "rope", "share": 0.5}}
UNBIASED = {"kind": "full", "qkv_bias": False, "out_bias": False}
LLAMA = {
    **{"num_layers": 2, "num_heads": 4, "attention": UNBIASED, "norm": {"kind": "rmsnorm"}},
    "feedforward": {"activation": "silu", "gated": True, "bias": False},
}
OWN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # class -> (decoder, head)
    "GPTNeoXForCausalLM": ({**BIASED, "residual": "parallel"}, {}),
    "PhiForCausalLM": (
        {**BIASED, "residual": "parallel_one_norm", "positions": {"kind": "rope", "layout": "interleaved"},
         "attention": {"qk_norm": "layernorm", "qk_norm_eps": 1e-5}}, {"bias": True}),
    "GPTJForCausalLM": (
        {**BIASED, "residual": "parallel_one_norm", "attention": UNBIASED,
         "positions": {"kind": "rope", "layout": "interleaved", "share": 0.25}},
        {"bias": True},
    ),
    "StableLmForCausalLM": (
        {**LLAMA, "norm": {"kind": "layernorm"}, "positions": {"kind": "rope", "share": 0.25}}, {}),
    "Phi3ForCausalLM": ({**LLAMA, "positions": {"kind": "rope", "share": 0.75}}, {}),
    "SmolLM3ForCausalLM": (
        {**LLAMA, "positions": {"kind": "rope"}, "layers": {1: {"positions": {"kind": "none"}}}}, {}),
    "FalconForCausalLM": (
        {**BIASED, "residual": "parallel_one_norm", "attention": UNBIASED, "feedforward": {"bias": False},
         "positions": {"kind": "alibi", "rounded": True}}, {}),
}  # fmt: skip


@pytest.mark.parametrize("class_name", OWN)
def test_a_model_of_ones_own_is_exported_as_the_class_that_computes_it(tmp_path: Path, class_name: str) -> None:
    decoder, head = OWN[class_name]
    values = {"d_model": 32, "vocab_size": 61, "decoder": decoder, "heads": [{"kind": "lm", **head}]}
    section = Model.model_validate({**values, "tie": {"output": False}})
    choice = choose_class(section, family="gpt")
    assert choice.class_name == class_name
    ours = randomized(build_model(section)).eval()
    model, weights = section, dict(ours.state_dict())
    for step in choice.steps:
        model, weights = step.apply(model, weights)
    tensors = outgoing(*choice.architecture.written(model, class_name), weights)
    config = {"model_type": choice.architecture.model_type, "architectures": [class_name], **IDS, **choice.config}
    (tmp_path / "config.json").write_text(json.dumps(config))
    made = {name: tensors.make(name).contiguous() for name in tensors.shapes}
    save_file(made, tmp_path / "model.safetensors", metadata={"format": "pt"})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids = tokens(2, 9, vocabulary=61)
    with torch.no_grad():
        assert_agree(ours(ids).logits, theirs(ids).logits)
