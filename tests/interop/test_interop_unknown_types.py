"""Refusals of configurations that `transformers` writes and tformer does not read: each names what is missing."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.interop import tiny_folders as tiny
from tformer.interop.architectures import ARCHITECTURES
from tformer.interop.config import Config
from tformer.interop.importing import import_folder
from tformer.interop.unknown_types import unknown_type

EXPERTS, STATES, TOWERS = (
    "mixture-of-experts layers",
    "state-space layers in place of attention",
    "two networks or more in one model",
)
AUDIO, COMPRESSED = "an encoder of audio", "attention with compressed keys and values"

# model_type -> what the refusal says that tformer lacks; the configuration is that of the class's defaults
LACKING: dict[str, str] = {
    "mixtral": f"{EXPERTS} (num_experts_per_tok, num_local_experts, router_aux_loss_coef, router_jitter_noise)",
    "qwen2_moe": EXPERTS,
    "qwen3_moe": EXPERTS,
    "olmoe": EXPERTS,
    "phimoe": EXPERTS,
    "granitemoe": EXPERTS,
    "switch_transformers": EXPERTS,
    "deepseek_v2": COMPRESSED,
    "deepseek_v3": COMPRESSED,
    "gpt_oss": "a feed-forward network with a clipped gate (swiglu_alpha, swiglu_limit)",
    "llama4_text": "attention in chunks of a text",
    "qwen3_next": "linear attention layers with gates",
    "jamba": STATES,
    "mamba": STATES,
    "mamba2": STATES,
    "falcon_mamba": STATES,
    "zamba": STATES,
    "recurrent_gemma": "recurrent layers in place of attention",
    "rwkv": "recurrent layers in place of attention (rescale_every)",
    "lfm2": "short convolutions in place of attention",
    "diffllama": "differences of two attentions (differential) (lambda_std_dev)",
    "xlnet": "two-stream attention with relative positions",
    "xlm": "language embeddings",
    "xmod": "an adapter for each language",
    "ernie": "embeddings of tasks (task_type_vocab_size)",
    "reformer": "attention by hashing and reversible layers",
    "funnel": "pooling between layers",
    "fnet": "Fourier transforms in place of attention (tpu_short_seq_length)",
    "nystromformer": "Nystrom attention (num_landmarks, segment_means_seq_len)",
    "convbert": "convolutions beside attention (head_ratio)",
    "squeezebert": "grouped convolutions in place of matrices",
    "mobilebert": "bottlenecks and several feed-forward networks in a block",
    "ibert": "integer arithmetic (force_dequant)",
    "layoutlm": "positions of words on a page (max_2d_position_embeddings)",
    "longt5": "local and transient-global attention with T5's biases (global_block_size, local_radius)",
    "prophetnet": "prediction of several next tokens at once (ngram)",
    "rembert": "embeddings of input and output of different widths (input_embedding_size, output_embedding_size)",
    "beit": "layer scale (layer_scale_init_value)",
    "dinov2": "layer scale (layerscale_value)",
    "swin": "stages of a growing width with windows of patches (depths)",
    "clip": TOWERS,
    "siglip": TOWERS,
    "blip": TOWERS,
    "llama4": TOWERS,
    "gemma3": TOWERS,
    "qwen2_vl": TOWERS,
    "whisper": f"{AUDIO} (mask_feature_length, mask_feature_min_masks, mask_feature_prob, num_mel_bins)",
    "speech_to_text": AUDIO,
    "wav2vec2": AUDIO,
    "encodec": AUDIO,
    "encoder-decoder": f"{TOWERS} (encoder)",
    "detr": "detection of objects",
    "sam_vision_model": "other layers than ViT's",
    "informer": "forecasts of series of numbers",
    "luke": "embeddings of entities",
    "gemma3n_text": "inputs for each layer, as Gemma 3n has them",
}

# model_type -> what the nearest type lacks, and other types or recipes have
ELSEWHERE: dict[str, str] = {
    "cohere": "Cohere's scaled logits and interleaved rotary positions (logit_scale)",
    "mpt": "ALiBi in MPT's layout, without biases",
    "openai-gpt": "the post-norm layout of GPT's first release (afn)",
    "nomic_bert": "rotary positions (rope_parameters)",
    "nanochat": "soft caps of scores or logits (final_logit_softcapping)",
}

# A key states no feature, but its value is one that the nearest type refuses: model_type -> (nearest, key).
REFUSED_BY_VALUE = {"persimmon": ("stablelm", "hidden_act"), "bitnet": ("olmo2", "hidden_act")}

# The keys are those of a known type.
FITTING = {"deit": "vit", "codegen": "gptj", "xlm-roberta-xl": "xlm-roberta", "roberta-prelayernorm": "roberta"}


def write_config(folder: Path, name: str) -> None:
    transformers.CONFIG_MAPPING[name]().save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["model_type"] == name


def test_there_are_forty_and_none_is_read() -> None:
    assert len(LACKING) >= 40 and not (LACKING | ELSEWHERE | REFUSED_BY_VALUE | FITTING).keys() & ARCHITECTURES.keys()


@pytest.mark.parametrize("name", LACKING)
def test_a_configuration_is_refused_by_the_feature_that_its_keys_ask_for(name: str, tmp_path: Path, out: Path) -> None:
    write_config(tmp_path, name)
    error = tiny.refusal(tmp_path, out)
    start, _, lacks = error.message.partition(f"model_type: found {name!r}, which tformer does not read: it lacks ")
    assert start == f"{tmp_path / 'config.json'}: " and LACKING[name] in lacks
    assert "the nearest of the types that tformer reads is" in (error.hint or "")


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_feature_that_other_types_have_is_said_of_the_nearest_type(name: str, tmp_path: Path, out: Path) -> None:
    write_config(tmp_path, name)
    message = tiny.refusal(tmp_path, out).message
    assert f", the nearest type, lacks {ELSEWHERE[name]}" in message and "it lacks" not in message


@pytest.mark.parametrize("name", REFUSED_BY_VALUE)
def test_a_configuration_is_refused_by_the_value_that_the_nearest_type_lacks(
    name: str, tmp_path: Path, out: Path
) -> None:
    write_config(tmp_path, name)
    nearest, key = REFUSED_BY_VALUE[name]
    assert f"its keys are those of {nearest!r}, but {key}: found" in tiny.refusal(tmp_path, out).message


@pytest.mark.parametrize("name", FITTING)
def test_a_configuration_with_the_keys_of_a_known_type_suggests_it(name: str, tmp_path: Path, out: Path) -> None:
    write_config(tmp_path, name)
    error = tiny.refusal(tmp_path, out)
    assert f"its keys are those of {FITTING[name]!r}" in (error.hint or "") and "known: albert, " in error.message


@pytest.mark.slow
def test_every_configuration_of_transformers_is_refused_in_one_clear_line() -> None:
    """It names a feature, a key, a value, or the type whose keys it has."""
    names = [name for name in transformers.CONFIG_MAPPING if name not in ARCHITECTURES]
    refused = 0
    for name in names:
        try:
            config = json.loads(transformers.CONFIG_MAPPING[name]().to_json_string())
        except Exception:  # some have no defaults, or need another package
            continue
        error = unknown_type(config, name="config.json")
        assert "\n" not in error.message and error.message.startswith("config.json: model_type: found ")
        assert re.search(" lacks |unknown beside those of |its keys are those of |known: ", error.message)
        refused += 1
    assert refused > 300


QUANTIZED = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False},
    "awq": {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True},
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    "compressed-tensors": {"quant_method": "compressed-tensors", "format": "pack-quantized"},
    "mxfp4": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    "no quant_method": {"bits": 8},
}


@pytest.mark.parametrize("method", QUANTIZED)
def test_quantized_weights_of_a_known_type_are_refused_by_their_method(method: str, tmp_path: Path, out: Path) -> None:
    folder = tiny.gpt2(tmp_path / "folder")
    tiny.edit_json(folder / "config.json", {"quantization_config": QUANTIZED[method]})
    error = tiny.refusal(folder, out)
    assert f"quantization_config: found {method!r}: quantized weights are not read" in error.message
    assert "take the model that they were made from" in (error.hint or "")
    assert import_folder(folder, out, ignore={"quantization_config"}).class_name == "GPT2LMHeadModel"


@pytest.mark.parametrize(
    ("file", "what"),
    [
        ("adapter_config.json", "an adapter (PEFT), not a model"),
        ("model_index.json", "a pipeline of several networks (diffusers)"),
        ("recipe.yaml", "a run or a checkpoint of tformer already"),
        ("params.json", "Llama in Meta's layout"),
    ],
)
def test_a_folder_of_another_kind_is_refused_by_it(file: str, what: str, tmp_path: Path, out: Path) -> None:
    (tmp_path / file).write_text("{}")
    error = tiny.refusal(tmp_path, out)
    assert error.message == f"{tmp_path} has no config.json: it is {what}" and error.hint


@pytest.mark.parametrize("model_type", ["frobnicator", None, 3, ["gpt2"]])
def test_a_key_without_a_name_for_its_feature_is_listed(model_type: Any, tmp_path: Path, out: Path) -> None:
    folder = tiny.gpt2(tmp_path / "folder")
    tiny.edit_json(folder / "config.json", {"model_type": model_type, "mystery_gate": 0.5, "other_gate": False})
    message = tiny.refusal(folder, out).message
    assert "the key mystery_gate is unknown beside those of 'gpt2'" in message and "other_gate" not in message


KEYS = ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size", "intermediate_size")


def test_a_missing_type_lists_every_type_whose_keys_fit() -> None:
    values = transformers.BertConfig().to_dict()
    stated = {key: values[key] for key in (*KEYS, "layer_norm_eps", "max_position_embeddings", "type_vocab_size")}
    hint = unknown_type(stated, name="config.json").hint or ""
    listed = set(re.findall("'([^']+)'", hint))
    assert {"bert", "roberta", "electra", "xlm-roberta"} <= listed and not {"gpt2", "llama", "t5"} & listed
    for known in listed:  # each reads the file once its type stands there
        ARCHITECTURES[known].section(Config(stated), next(iter(ARCHITECTURES[known].classes)))


@pytest.mark.parametrize(("class_name", "known"), [("BertModel", "bert"), ("RobertaForMaskedLM", "roberta")])
def test_the_named_class_tells_types_with_the_same_keys_apart(class_name: str, known: str) -> None:
    values = transformers.BertConfig().to_dict()
    config = {key: values[key] for key in KEYS} | {"architectures": [class_name]}
    assert re.findall("'([^']+)'", unknown_type(config, name="config.json").hint or "") == [known]


def test_a_configuration_of_few_keys_suggests_nothing(tmp_path: Path, out: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "frobnicator", "vocab_size": 5}')
    error = tiny.refusal(tmp_path, out)
    assert "known: albert, " in error.message and error.hint is None


def test_the_suggested_type_reads_the_model(tmp_path: Path, out: Path) -> None:
    folder = tiny.gpt2(tmp_path / "folder")
    tiny.edit_json(folder / "config.json", {"model_type": "my_gpt2", "architectures": ["MyGPT2"]})
    assert "'gpt2'" in (tiny.refusal(folder, out).hint or "")
    tiny.edit_json(folder / "config.json", {"model_type": "gpt2", "architectures": None})
    assert import_folder(folder, out).class_name == "GPT2LMHeadModel"
