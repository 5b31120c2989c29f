"""Qwen2 and Qwen3: Llama with sliding windows in some layers, which are off by default.

Qwen2 has biases on queries, keys and values only. Qwen3 has none by default, and normalises the queries and keys of
each head before their rotation, with gains that all heads of a layer share.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tformer.interop.architecture import Architecture
from tformer.interop.architectures import llama
from tformer.interop.architectures.parts import stack_of
from tformer.interop.config import Config
from tformer.recipe.model import Model

CONFIG = llama.CONFIG.defaulting(vocab_size=151936, intermediate_size=22016, max_position_embeddings=32768)
OF_QWEN3 = CONFIG.defaulting(head_dim=128)


def read(config: Config, class_name: str) -> dict[str, Any]:
    values = llama.read_body(config, CONFIG, kv_heads=32, qkv_bias=True, out_bias=False, mlp_bias=False)
    return llama.read_layer_windows(config, values)


def write(model: Model, class_name: str) -> dict[str, Any]:
    return {**llama.write_body(model), **llama.write_layer_windows(model)}


def read_qwen3(config: Config, class_name: str) -> dict[str, Any]:
    biased = config.take("attention_bias", default=False, kind=bool)
    values = llama.read_body(
        config, OF_QWEN3, kv_heads=32, qkv_bias=biased, out_bias=biased, mlp_bias=False, qk_norm=True
    )
    return llama.read_layer_windows(config, values)


def write_qwen3(model: Model, class_name: str) -> dict[str, Any]:
    return {**write(model, class_name), "attention_bias": stack_of(model, "decoder").attention.qkv_bias}


QWEN2 = Architecture(
    model_type="qwen2",
    classes={"Qwen2ForCausalLM": ("lm",), "Qwen2Model": ()},
    family="llama",
    read=read,
    write=write,
    links=llama.links,
    prefix=llama.PREFIX,
    skipped=llama.SKIPPED,
    own_tokenizer_rules=True,
)
QWEN3 = replace(
    QWEN2,
    model_type="qwen3",
    classes={"Qwen3ForCausalLM": ("lm",), "Qwen3Model": ()},
    read=read_qwen3,
    write=write_qwen3,
)
