"""Llama, and the rotary positions and weights that Mistral and Qwen2 share with it.

Newer files say `rope_parameters: {rope_type, rope_theta, ...}`, older ones `rope_theta` beside `rope_scaling: {type or
rope_type, ...}`. Both are written with equal values: older versions of the library ignore the newer key and use a base
of 10,000.
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
from tformer.interop.config import Config
from tformer.interop.mapping import Link, both, fused, link
from tformer.nn.positions.rope import RopeOptions
from tformer.recipe.model import Model, Stack

DEFAULT_BASE = 10000.0
KNOWN = {
    "default": ("rope_theta",),
    "llama3": ("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""Types of RoPE scaling that tformer has -> the keys of each."""


def read_rope(config: Config, *, max_seq_len: int) -> dict[str, Any]:
    """The `positions` of a stack. InputError for a RoPE type, or a key of it, that tformer lacks."""
    config.expect("partial_rotary_factor", 1.0, 1)
    newer = config.take("rope_parameters", default={}, kind=dict)
    older = config.take("rope_scaling", default={}, kind=dict)
    name, found = ("rope_scaling", older) if older else ("rope_parameters", newer)
    base = config.take("rope_theta", default=DEFAULT_BASE, kind=float)
    before = config.size("original_max_position_embeddings", default=None)  # Phi's place for it, which goes first
    rope = Config(found, name=f"{config.name}: {name}")
    rope_type = str(found.get("rope_type", found.get("type", "default")))
    if rope_type not in KNOWN:
        raise InputError(f"{rope.name}: rope_type: found {rope_type!r}, tformer has {' and '.join(KNOWN)} only")
    rope.expect("partial_rotary_factor", 1.0, 1)
    for key, value in found.items():
        if key not in (*KNOWN[rope_type], "rope_type", "type", "partial_rotary_factor"):
            raise InputError(
                f"{rope.name}: {key}: found {value!r}, a key that tformer does not support for {rope_type}"
            )
    positions = {"kind": "rope", "layout": "halves", "base": rope.take("rope_theta", default=base, kind=float)}
    if rope_type == "llama3":
        inner = rope.size("original_max_position_embeddings", default=max_seq_len)
        positions["scaling"] = {
            "factor": rope.take("factor", kind=float),
            "low_freq_factor": rope.take("low_freq_factor", kind=float),
            "high_freq_factor": rope.take("high_freq_factor", kind=float),
            "original_max_seq_len": before or inner,
        }
    return positions


def write_rope(stack: Stack) -> dict[str, Any]:
    """The keys of config.json; those of plain RoPE where the stack's positions are of another kind."""
    positions = stack.positions if isinstance(stack.positions, RopeOptions) else RopeOptions()
    keys: dict[str, Any] = {"rope_theta": positions.base}
    scaling = positions.scaling
    if scaling is None:
        return {**keys, "rope_parameters": {"rope_type": "default", **keys}}
    stretched = {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_seq_len,
        **keys,
    }
    return {**keys, "rope_parameters": stretched, "rope_scaling": dict(stretched)}


PREFIX = "model."
SKIPPED = (r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",)  # given by a formula, a buffer in old files

MISSING: Mapping[str, int | None] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "max_position_embeddings": 2048,
}
"""Default sizes of LlamaForCausalLM."""


def read_body(
    config: Config, missing: Mapping[str, int | None], *, qkv_bias: bool, out_bias: bool, mlp_bias: bool
) -> dict[str, Any]:
    """The model section. missing: the class's default sizes; the biases are arguments, because no key states them."""
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
    """Links of Llama, Mistral and Qwen2; the model section says which biases exist."""
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
    config.ignore("is_llama_config", "max_sequence_length")  # left by converters (SmolLM2, LLaMA 1), without effect
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
    special_ids={"bos": 1, "eos": 2},
    ctranslate2=("LlamaLoader", {}),
)
