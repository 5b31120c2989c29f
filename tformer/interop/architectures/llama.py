"""Llama: pre-norm decoder with RMSNorm, RoPE in halves, grouped key/value heads, a gated feed-forward.

Mistral and Qwen2 are this body with biases in other places and attention windows: they share what is public here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tformer.build import resolve_sizes
from tformer.errors import InputError
from tformer.interop.architecture import Architecture
from tformer.interop.architectures.parts import (
    ACTIVATIONS,
    activation_name,
    d_ff_of,
    size_or_missing,
    stack_of,
    token_links,
)
from tformer.interop.architectures.rope import read_rope, write_rope
from tformer.interop.config import Config
from tformer.interop.mapping import Link, both, fused, link
from tformer.recipe.model import Model

PREFIX = "model."
SKIPPED = (r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",)  # a formula's numbers, once a stored buffer

MISSING: Mapping[str, int | None] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "max_position_embeddings": 2048,
}
"""What a missing size means to LlamaForCausalLM."""


def read_body(
    config: Config, missing: Mapping[str, int | None], *, qkv_bias: bool, out_bias: bool, mlp_bias: bool
) -> dict[str, Any]:
    """The model section. `missing`: the class's sizes where a config has none; the biases are the class's to say."""
    width = config.size("hidden_size", default=missing["hidden_size"])
    heads = config.size("num_attention_heads", default=missing["num_attention_heads"])
    length = config.size("max_position_embeddings", default=missing["max_position_embeddings"])
    stack = {
        "num_layers": config.size("num_hidden_layers", default=missing["num_hidden_layers"]),
        "num_heads": heads,
        "num_kv_heads": size_or_missing(config, "num_key_value_heads", missing["num_key_value_heads"]) or heads,
        "head_dim": config.size("head_dim", default=None) or width // heads,
        "positions": read_rope(config, max_seq_len=length),
        "attention": {"qkv_bias": qkv_bias, "out_bias": out_bias},
        "feedforward": {
            "d_ff": config.size("intermediate_size", default=missing["intermediate_size"]),
            "activation": config.choose("hidden_act", ACTIVATIONS, default="silu"),
            "gated": True,
            "bias": mlp_bias,
        },
        "norm": {"kind": "rmsnorm", "place": "pre", "eps": config.take("rms_norm_eps", default=1e-6, kind=float)},
        "final_norm": True,
        "attention_dropout": config.take("attention_dropout", default=0.0, kind=float),
    }
    return {
        "d_model": width,
        "max_seq_len": length,
        "vocab_size": config.size("vocab_size", default=missing["vocab_size"]),
        "tie": {"output": config.take("tie_word_embeddings", default=False, kind=bool)},
        "decoder": stack,
        "heads": [{"kind": "lm"}],
    }


def write_body(model: Model) -> dict[str, Any]:
    decoder, sizes = stack_of(model, "decoder"), resolve_sizes(model, "decoder")
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.d_model,
        "intermediate_size": d_ff_of(model, decoder),
        "num_hidden_layers": decoder.num_layers,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "head_dim": sizes.head_dim,
        "hidden_act": activation_name(decoder.feedforward.activation),
        "max_position_embeddings": model.max_seq_len,
        "rms_norm_eps": decoder.norm.eps,
        "attention_dropout": decoder.attention_dropout,
        "tie_word_embeddings": model.tie.output,
        **write_rope(decoder),
    }


def links(model: Model, class_name: str) -> list[Link]:
    """The table of all three: which biases there are, the model section says."""
    decoder, sizes = stack_of(model, "decoder"), resolve_sizes(model, "decoder")
    d_ff = d_ff_of(model, decoder)
    queries, keys, values = (
        sizes.num_heads * sizes.head_dim,
        sizes.num_kv_heads * sizes.head_dim,
        sizes.num_kv_heads * sizes.value_dim,
    )
    table = [
        *token_links(model, "model.embed_tokens.weight"),
        link("decoder.final_norm.weight", "model.norm.weight"),
    ]
    for layer in range(decoder.num_layers):
        ours, theirs = f"decoder.blocks.{layer}", f"model.layers.{layer}"
        qkv = [f"{theirs}.self_attn.{name}_proj" for name in ("q", "k", "v")]
        gated = [f"{theirs}.mlp.{name}_proj" for name in ("gate", "up")]
        biased = decoder.feedforward.bias
        table.append(link(f"{ours}.self_attention_norm.weight", f"{theirs}.input_layernorm.weight"))
        table += fused(f"{ours}.self_attention.qkv", qkv, (queries, keys, values), bias=decoder.attention.qkv_bias)
        table += both(f"{ours}.self_attention.out", f"{theirs}.self_attn.o_proj", bias=decoder.attention.out_bias)
        table.append(link(f"{ours}.feedforward_norm.weight", f"{theirs}.post_attention_layernorm.weight"))
        table += fused(f"{ours}.feedforward.up", gated, (d_ff, d_ff), bias=biased)
        table += both(f"{ours}.feedforward.down", f"{theirs}.mlp.down_proj", bias=biased)
    return table


def _read(config: Config, class_name: str) -> dict[str, Any]:
    biased = config.take("attention_bias", default=False, kind=bool)
    mlp_biased = config.take("mlp_bias", default=False, kind=bool)
    config.ignore("is_llama_config", "max_sequence_length")  # left by converters (SmolLM2, LLaMA 1), read by nobody
    values = read_body(config, MISSING, qkv_bias=biased, out_bias=biased, mlp_bias=mlp_biased)
    width, heads = values["d_model"], values["decoder"]["num_heads"]
    if width % heads:
        raise InputError(
            f"{config.name}: num_attention_heads: {heads} do not divide hidden_size {width}, which this class demands"
        )
    return values


def _write(model: Model, class_name: str) -> dict[str, Any]:
    decoder = stack_of(model, "decoder")
    return {
        **write_body(model),
        "attention_bias": decoder.attention.qkv_bias,
        "mlp_bias": decoder.feedforward.bias,
    }


LLAMA = Architecture(
    model_type="llama",
    classes={"LlamaForCausalLM": ("lm",)},
    family="llama",
    read=_read,
    write=_write,
    links=links,
    prefix=PREFIX,
    skipped=SKIPPED,
)
