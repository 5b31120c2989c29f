"""Tiny recipes of the shapes that GGUF files have, from a config.json each, with rows of 32 numbers and more."""

from __future__ import annotations

from typing import Any

from tformer.interop.architectures import ARCHITECTURES
from tformer.interop.config import Config

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 0.02,
}
OF_HEADS = SIZES | {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 5}
FACTORS = {"short_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5], "long_factor": [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]}
OF_PHI3 = {"partial_rotary_factor": 0.75, "rope_scaling": {"type": "longrope", **FACTORS}, "tie_word_embeddings": True}
LINEAR = {"rope_type": "linear", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama 3": ("llama", {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 64}, "num_attention_heads": 2}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {"sliding_window": None, "rope_scaling": LINEAR}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "gemma": ("gemma", {"head_dim": 32}),
    "gemma2": ("gemma2", OF_HEADS | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0}),
    "gemma3": ("gemma3_text", OF_HEADS | {"num_hidden_layers": 7, "rope_scaling": LINEAR}),
    "phi": ("phi", {"partial_rotary_factor": 0.5, "layer_norm_eps": 0.02}),
    "phi3": ("phi3", {"sliding_window": None}),
    "phi3, short texts": ("phi3", OF_PHI3 | {"original_max_position_embeddings": 512, "max_position_embeddings": 1024}),
    "phi3, long texts": ("phi3", OF_PHI3 | {"original_max_position_embeddings": 8}),
}
FAMILIES = ("gpt2", "llama", "qwen2", "qwen3")


def shape(name: str, **changes: Any) -> dict[str, Any]:
    """The recipe of a shape."""
    model_type, own = SHAPES[name]
    architecture = ARCHITECTURES[model_type]
    [class_name] = [each for each, heads in architecture.classes.items() if heads]
    values = {**SIZES, "vocab_size": 300, **own, **changes}
    section = architecture.section(Config(values, name=name), class_name)
    del section["vocab_size"]  # the tokenizer's
    return {"arch": architecture.family, "model": section}
