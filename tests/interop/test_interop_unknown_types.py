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
from tformer.interop.importing import import_folder
from tformer.interop.unknown_types import unknown_type

# model_type -> the nearest type, and keys that this one does not have, in a configuration of defaults
NEAREST: dict[str, tuple[str, str]] = {
    "mixtral": ("mistral", "num_experts_per_tok, num_local_experts, router_aux_loss_coef, router_jitter_noise"),
    "cohere": ("phi", "logit_scale"),
    "openai-gpt": ("gpt2", "afn"),
    "xlnet": ("electra", "start_n_top and 1 more"),
}

# The keys are those of a known type.
FITTING = {"deit": "vit", "codegen": "gptj", "xlm-roberta-xl": "xlm-roberta", "persimmon": "stablelm"}


def write_config(folder: Path, name: str) -> None:
    transformers.CONFIG_MAPPING[name]().save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["model_type"] == name


@pytest.mark.parametrize("name", NEAREST)
def test_a_refusal_names_the_nearest_type_and_the_keys_that_it_lacks(name: str, tmp_path: Path, out: Path) -> None:
    write_config(tmp_path, name)
    error, (nearest, keys) = tiny.refusal(tmp_path, out), NEAREST[name]
    start = f"{tmp_path / 'config.json'}: model_type: found {name!r}, which tformer does not read; "
    assert error.message.startswith(f"{start}keys that {nearest!r} does not have: ") and keys in error.message
    assert f"the nearest of the types that tformer reads is {nearest!r}" in (error.hint or "")


@pytest.mark.parametrize("name", FITTING)
def test_a_configuration_with_the_keys_of_a_known_type_suggests_it(name: str, tmp_path: Path, out: Path) -> None:
    write_config(tmp_path, name)
    error = tiny.refusal(tmp_path, out)
    assert f"its keys are those of {FITTING[name]!r}" in error.message and repr(FITTING[name]) in (error.hint or "")


@pytest.mark.slow
def test_every_configuration_of_transformers_is_refused_in_one_clear_line() -> None:
    names = [name for name in transformers.CONFIG_MAPPING if name not in ARCHITECTURES]
    refused = 0
    for name in names:
        try:
            config = json.loads(transformers.CONFIG_MAPPING[name]().to_json_string())
        except Exception:  # some have no defaults, or need another package
            continue
        error = unknown_type(config, name="config.json")
        assert "\n" not in error.message and error.message.startswith("config.json: model_type: found ")
        assert re.search("keys that '.*' does not have: |its keys are those of |known: ", error.message)
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
def test_a_key_that_is_off_is_not_listed_and_a_type_may_be_anything(model_type: Any, tmp_path: Path, out: Path) -> None:
    folder = tiny.gpt2(tmp_path / "folder")
    tiny.edit_json(folder / "config.json", {"model_type": model_type, "mystery_gate": 0.5, "other_gate": False})
    message = tiny.refusal(folder, out).message
    assert message.endswith("keys that 'gpt2' does not have: mystery_gate")


KEYS = ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size", "intermediate_size")


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
