"""GPT-2, Llama, Mistral, Qwen2, Qwen3, OPT and Bloom with the head of a language model, there and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.interop.parity import assert_parity, imported, padding, randomised, saved, tokens
from tests.interop.tiny_models import IDS, config_of, make
from tformer.build import build_model
from tformer.interop.choose import choose_class
from tformer.recipe.model import Model

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def batch(*, left: bool, vocabulary: int = 61) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    mask = padding(13, 13, 9, 5, left=left)
    return {"input_ids": tokens(3, 13, vocabulary=vocabulary), "attention_mask": mask}, mask


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize(
    "values",
    [
        {"head_dim": 6, "tie_word_embeddings": False},  # 4 heads of 6 beside a width of 20
        {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 1},
        {"head_dim": 4, "mlp_bias": True, "hidden_act": "gelu", "num_key_value_heads": 4},
        {"head_dim": 6, "rope_parameters": {"rope_theta": 500.0, "original_max_position_embeddings": 8, **LLAMA3}},
    ],
    ids=["odd-heads", "biases-tied", "mlp-bias-gelu", "llama3-scaling"],
)
def test_llama(tmp_path: Path, values: dict[str, Any], left: bool) -> None:
    inputs, mask = batch(left=left)
    reference = make("Llama", "CausalLM", **values)
    model, _ = assert_parity(reference, inputs, tmp_path, mask=mask)
    assert bool(model.tied_names()) == values.get("tie_word_embeddings", False)


def test_llama3_scaling_changes_what_is_computed(tmp_path: Path) -> None:
    """Otherwise the parity above would prove nothing about it."""
    rope = {"rope_theta": 500.0, "original_max_position_embeddings": 8, **LLAMA3}
    reference = make("Llama", "CausalLM", head_dim=6, rope_parameters=rope)
    model, foreign = imported(saved(randomised(reference), tmp_path / "model"))
    values = foreign.model.model_dump()
    values["decoder"]["positions"]["scaling"] = None
    plain = build_model(Model.model_validate(values)).eval()
    plain.load_state_dict(model.state_dict())
    ids = tokens(1, 29, vocabulary=61)
    difference = (plain(ids).logits - model(ids).logits).abs().max()
    assert difference > 0.01 * model(ids).logits.abs().max()


@pytest.mark.parametrize("values", [{"sliding_window": None, "head_dim": 8}, {"sliding_window": 29, "head_dim": 6}])
@pytest.mark.parametrize("heads", [(4, 2), (3, 1)], ids=str)  # 3 heads do not divide 20: Llama's class refuses that
def test_mistral(tmp_path: Path, values: dict[str, Any], heads: tuple[int, int]) -> None:
    inputs, mask = batch(left=False)
    reference = make("Mistral", "CausalLM", num_attention_heads=heads[0], num_key_value_heads=heads[1], **values)
    assert_parity(reference, inputs, tmp_path, mask=mask, model_type="mistral")


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize("window", [2, 5, 12])
def test_mistral_with_a_window(tmp_path: Path, window: int, left: bool) -> None:
    inputs, mask = batch(left=left)
    reference = make("Mistral", "CausalLM", head_dim=6, sliding_window=window, tie_word_embeddings=False)
    _, foreign = assert_parity(reference, inputs, tmp_path, mask=mask)
    assert foreign.model.decoder and getattr(foreign.model.decoder.attention, "window", None) == window - 1


@pytest.mark.parametrize("name", ["Qwen2", "Qwen3"])
@pytest.mark.parametrize(
    "layers", [{"max_window_layers": 1}, {"layer_types": ["sliding_attention", "full_attention"] * 2}]
)
def test_windows_of_some_layers(tmp_path: Path, name: str, layers: dict[str, Any]) -> None:
    inputs, mask = batch(left=False)
    reference = make(
        name,
        "CausalLM",
        head_dim=6,
        num_hidden_layers=4,
        use_sliding_window=True,
        sliding_window=4,
        tie_word_embeddings=False,
        **layers,
    )
    _, foreign = assert_parity(reference, inputs, tmp_path, mask=mask)
    config = reference.config
    assert foreign.model.decoder and len(foreign.model.decoder.layers) == config.layer_types.count("sliding_attention")


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize(
    "values", [{"tie_word_embeddings": True}, {"tie_word_embeddings": False, "attention_bias": True}]
)
def test_qwen3(tmp_path: Path, values: dict[str, Any], left: bool) -> None:
    inputs, mask = batch(left=left)
    reference = make("Qwen3", "CausalLM", head_dim=6, **values)
    model, _ = assert_parity(reference, inputs, tmp_path, mask=mask)
    assert bool(model.tied_names()) == values["tie_word_embeddings"]


@pytest.mark.parametrize("kind", [True, "learned"])
def test_normalised_queries_and_keys_are_exported_as_qwen3(kind: bool | str) -> None:
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
    randomised(built)
    model, weights = section, {n: t for n, t in built.state_dict().items() if n not in built.tied_names()}
    for step in choice.steps:
        model, weights = step.apply(model, weights)
    other = build_model(model).eval()
    other.load_state_dict(weights, strict=False)
    ids = tokens(2, 9, vocabulary=61)
    torch.testing.assert_close(other(ids).logits, built(ids).logits, atol=1e-5, rtol=0)


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


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
def test_qwen2(tmp_path: Path, left: bool, tied: bool) -> None:
    inputs, mask = batch(left=left)
    values = {"tie_word_embeddings": tied, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    heads = {"head_dim": 6} if tied else {"num_attention_heads": 5, "num_key_value_heads": 1}
    reference = make("Qwen2", "CausalLM", **values, **heads)
    assert_parity(reference, inputs, tmp_path, mask=mask, model_type="qwen2")


def test_biases_on_queries_keys_and_values_alone_are_exported_as_qwen2(tmp_path: Path) -> None:
    reference = make("Qwen2", "CausalLM", head_dim=6)
    _, foreign = imported(saved(randomised(reference), tmp_path / "model"))
    assert choose_class(foreign.model, family="llama").class_name == "Qwen2ForCausalLM"


def opt_config(**values: Any) -> Any:
    sizes = {
        "vocab_size": 57,
        "hidden_size": 20,
        "ffn_dim": 33,
        "num_hidden_layers": 3,
        "num_attention_heads": 5,
        "max_position_embeddings": 19,
        "word_embed_proj_dim": 20,
        "pad_token_id": 1,
    }
    return transformers.OPTConfig(**{**sizes, **values})


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize(
    "values",
    [
        {},
        {"tie_word_embeddings": False, "activation_function": "gelu"},
        {"enable_bias": False, "layer_norm_elementwise_affine": False},  # Galactica
        {"_remove_final_layer_norm": True},
    ],
    ids=["opt", "untied-gelu", "no-biases", "no-final-norm"],
)
def test_opt(tmp_path: Path, values: dict[str, Any], left: bool) -> None:
    inputs, mask = batch(left=left, vocabulary=57)
    reference = transformers.OPTForCausalLM(opt_config(**values))
    assert_parity(reference, inputs, tmp_path, mask=mask)


def test_opt_at_its_last_position(tmp_path: Path) -> None:
    assert_parity(transformers.OPTForCausalLM(opt_config()), {"input_ids": tokens(2, 19, vocabulary=57)}, tmp_path)


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize(
    ("heads", "tied"), [(4, True), (5, False), (3, True)], ids=["4-heads-tied", "5-heads-untied", "3-heads-tied"]
)
def test_bloom(tmp_path: Path, heads: int, tied: bool, left: bool) -> None:
    inputs, mask = batch(left=left)
    config = transformers.BloomConfig(
        vocab_size=61,
        hidden_size=heads * 6,
        n_layer=3,
        n_head=heads,
        layer_norm_epsilon=0.02,
        tie_word_embeddings=tied,
        **IDS,
    )
    model, foreign = assert_parity(transformers.BloomForCausalLM(config), inputs, tmp_path, mask=mask)
    assert bool(model.tied_names()) == tied
    assert foreign.model.max_seq_len == 2048  # ALiBi has no length


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
def test_gpt2(tmp_path: Path, left: bool) -> None:
    reference = transformers.GPT2LMHeadModel(config_of("GPT2", layer_norm_epsilon=0.02))
    mask = padding(11, 11, 8, 5, left=left)
    inputs = {"input_ids": tokens(3, 11, vocabulary=61), "attention_mask": mask}
    places = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    assert_parity(reference, inputs, tmp_path, mask=mask, their_inputs=inputs | places)


def test_gpt2_with_an_untied_output_and_another_activation(tmp_path: Path) -> None:
    reference = transformers.GPT2LMHeadModel(config_of("GPT2", tie_word_embeddings=False, activation_function="relu"))
    model, _ = assert_parity(reference, {"input_ids": tokens(2, 23, vocabulary=61)}, tmp_path)
    assert not model.tied_names()
