"""BLOOM: pre-norm decoder with ALiBi, a norm after the embeddings, tanh gelu, q, k and v fused head by head."""

from __future__ import annotations

from typing import Any

from tformer.interop.architecture import Architecture
from tformer.interop.architectures.parts import size_by_any_name, stack_of, token_links
from tformer.interop.config import Config
from tformer.interop.mapping import Link, both, interleaved_rows, link
from tformer.recipe.model import Model

# Keys of the framework that trained it (fused kernels, order of summation); `n_inner` is not used by any class.
TRAINED_WITH = (
    "attention_softmax_in_fp32",
    "bias_dropout_fusion",
    "masked_softmax_fusion",
    "n_inner",
    "offset_alibi",
    "skip_bias_add",
    "skip_bias_add_qkv",
    "slow_but_exact",
)


def read(config: Config, class_name: str) -> dict[str, Any]:
    config.expect("apply_residual_connection_post_layernorm", False)
    config.ignore(*TRAINED_WITH)
    width = size_by_any_name(config, "n_embed", "hidden_size", default=64)
    stack = {
        "num_layers": size_by_any_name(config, "n_layer", "num_hidden_layers", default=2),
        "num_heads": size_by_any_name(config, "n_head", "num_attention_heads", default=8),
        "positions": {"kind": "alibi"},
        "feedforward": {"d_ff": 4 * width, "activation": "gelu_tanh"},
        "norm": {"place": "pre", "eps": config.take("layer_norm_epsilon", default=1e-5, kind=float)},
        "final_norm": True,
        "dropout": config.take("hidden_dropout", default=0.0, kind=float),
        "attention_dropout": config.take("attention_dropout", default=0.0, kind=float),
    }
    return {
        "d_model": width,
        "max_seq_len": config.size("seq_length", default=2048),
        "vocab_size": config.size("vocab_size", default=250880),
        "embedding": {"norm": True},
        "tie": {"output": config.take("tie_word_embeddings", default=True, kind=bool)},
        "decoder": stack,
        "heads": [{"kind": "lm"}],
    }


def write(model: Model, class_name: str) -> dict[str, Any]:
    decoder = stack_of(model, "decoder")
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.d_model,
        "n_layer": decoder.num_layers,
        "n_head": decoder.num_heads,
        "seq_length": model.max_seq_len,
        "layer_norm_epsilon": decoder.norm.eps,
        "hidden_dropout": decoder.dropout,
        "attention_dropout": decoder.attention_dropout,
        "tie_word_embeddings": model.tie.output,
    }


def links(model: Model, class_name: str) -> list[Link]:
    decoder = stack_of(model, "decoder")
    by_head = interleaved_rows(heads=decoder.num_heads, parts=3)
    table = [
        *token_links(model, "transformer.word_embeddings.weight"),
        *both("embedding.norm", "transformer.word_embeddings_layernorm"),
        *both("decoder.final_norm", "transformer.ln_f"),
    ]
    for layer in range(decoder.num_layers):
        ours, theirs = f"decoder.blocks.{layer}", f"transformer.h.{layer}"
        qkv, fused = f"{ours}.self_attention.qkv", f"{theirs}.self_attention.query_key_value"
        table += both(f"{ours}.self_attention_norm", f"{theirs}.input_layernorm")
        table += [link(f"{qkv}.{kind}", f"{fused}.{kind}", layout=by_head) for kind in ("weight", "bias")]
        table += both(f"{ours}.self_attention.out", f"{theirs}.self_attention.dense")
        table += both(f"{ours}.feedforward_norm", f"{theirs}.post_attention_layernorm")
        table += both(f"{ours}.feedforward.up", f"{theirs}.mlp.dense_h_to_4h")
        table += both(f"{ours}.feedforward.down", f"{theirs}.mlp.dense_4h_to_h")
    return table


BLOOM = Architecture(
    model_type="bloom",
    classes={"BloomForCausalLM": ("lm",), "BloomModel": ()},
    family="gpt",
    read=read,
    write=write,
    links=links,
    prefix="transformer.",
    special_ids={"bos": 1, "eos": 2},
)
