"""Mistral: Llama without any bias, with a sliding window in every layer of its first release."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tformer.interop.architecture import Architecture
from tformer.interop.architectures import llama
from tformer.interop.architectures.parts import size_or_missing
from tformer.interop.config import Config
from tformer.recipe.model import Model

MISSING: Mapping[str, int | None] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}


def read(config: Config, class_name: str) -> dict[str, Any]:
    values = llama.read_body(config, MISSING, qkv_bias=False, out_bias=False, mlp_bias=False)
    window = size_or_missing(config, "sliding_window", llama.MISSING_WINDOW)
    return llama.with_windows(config, values, window, [True] * values["decoder"]["num_layers"])


def write(model: Model, class_name: str) -> dict[str, Any]:
    return {**llama.write_body(model), "sliding_window": llama.windows_of(model)[0]}


MISTRAL = Architecture(
    model_type="mistral",
    classes={"MistralForCausalLM": ("lm",), "MistralModel": ()},
    family="llama",
    read=read,
    write=write,
    links=llama.links,
    prefix=llama.PREFIX,
    skipped=llama.SKIPPED,
    special_ids={"bos": 1, "eos": 2},
)
