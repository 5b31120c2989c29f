"""Mistral: Llama without any bias, with a sliding window in every layer of its first release."""

from __future__ import annotations

from typing import Any

from tformer.interop.architecture import Architecture
from tformer.interop.architectures import llama
from tformer.interop.architectures.parts import size_or_missing
from tformer.interop.config import Config
from tformer.recipe.model import Model

CONFIG = llama.CONFIG.defaulting(intermediate_size=14336, max_position_embeddings=131072)


def read(config: Config, class_name: str) -> dict[str, Any]:
    values = llama.read_body(config, CONFIG, kv_heads=8, qkv_bias=False, out_bias=False, mlp_bias=False)
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
