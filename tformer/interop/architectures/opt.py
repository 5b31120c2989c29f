"""OPT: pre-norm decoder with learned positions; the first two rows of the position table are unused.

Biases, and the gains and biases of its norms, are all there or (Galactica) all absent. OPT-350m alone is post-norm with
narrow embeddings: refused.
"""

from __future__ import annotations

from typing import Any

from tformer.interop.architecture import Architecture
from tformer.interop.architectures.parts import ACTIVATIONS, activation_name, d_ff_of, stack_of, token_links
from tformer.interop.config import Config
from tformer.interop.mapping import Link, both, fused, link
from tformer.recipe.model import Model
from tformer.support.errors import InputError

OFFSET = 2
EPS = 1e-5  # fixed in the class


def read(config: Config, class_name: str) -> dict[str, Any]:
    config.expect("do_layer_norm_before", True)
    config.expect("learned_embeddings", True)
    width = config.size("hidden_size", default=768)
    embedded = config.size("word_embed_proj_dim", default=None)
    if embedded not in (None, width):
        raise InputError(
            f"{config.name}: word_embed_proj_dim: found {embedded}, tformer has this architecture with "
            f"hidden_size ({width}) only"
        )
    biased = config.take("enable_bias", default=True, kind=bool)
    stack = {
        "num_layers": config.size("num_hidden_layers", default=12),
        "num_heads": config.size("num_attention_heads", default=12),
        "positions": {"kind": "learned", "offset": OFFSET},
        "attention": {"qkv_bias": biased, "out_bias": biased},
        "feedforward": {
            "d_ff": config.size("ffn_dim", default=3072),
            "activation": config.choose("activation_function", ACTIVATIONS, default="relu"),
            "bias": biased,
        },
        "norm": {
            "place": "pre",
            "eps": EPS,
            "learned": config.take("layer_norm_elementwise_affine", default=True, kind=bool),
        },
        "final_norm": not config.take("_remove_final_layer_norm", default=False, kind=bool),
        "dropout": config.take("dropout", default=0.1, kind=float),
        "attention_dropout": config.take("attention_dropout", default=0.0, kind=float),
        "activation_dropout": config.take("activation_dropout", default=0.0, kind=float),
        "layerdrop": config.take("layerdrop", default=0.0, kind=float),
    }
    return {
        "d_model": width,
        "max_seq_len": config.size("max_position_embeddings", default=2048),
        "vocab_size": config.size("vocab_size", default=50272),
        "tie": {"output": config.take("tie_word_embeddings", default=True, kind=bool)},
        "decoder": stack,
        "heads": [{"kind": "lm"}],
    }


def write(model: Model, class_name: str) -> dict[str, Any]:
    decoder = stack_of(model, "decoder")
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.d_model,
        "word_embed_proj_dim": model.d_model,
        "ffn_dim": d_ff_of(model, decoder),
        "num_hidden_layers": decoder.num_layers,
        "num_attention_heads": decoder.num_heads,
        "max_position_embeddings": model.max_seq_len,
        "activation_function": activation_name(decoder.feedforward.activation),
        "do_layer_norm_before": True,
        "_remove_final_layer_norm": not decoder.final_norm,
        "enable_bias": decoder.attention.qkv_bias,
        "layer_norm_elementwise_affine": decoder.norm.learned,
        "dropout": decoder.dropout,
        "attention_dropout": decoder.attention_dropout,
        "activation_dropout": decoder.activation_dropout,
        "layerdrop": decoder.layerdrop_rate,
        "tie_word_embeddings": model.tie.output,
    }


def links(model: Model, class_name: str) -> list[Link]:
    decoder, width = stack_of(model, "decoder"), model.d_model
    biased, learned = decoder.attention.qkv_bias, decoder.norm.learned
    table = [
        *token_links(model, "model.decoder.embed_tokens.weight"),
        link("decoder.positions.weight", "model.decoder.embed_positions.weight"),
    ]
    if decoder.final_norm and learned:
        table += both("decoder.final_norm", "model.decoder.final_layer_norm")
    for layer in range(decoder.num_layers):
        ours, theirs = f"decoder.blocks.{layer}", f"model.decoder.layers.{layer}"
        qkv = [f"{theirs}.self_attn.{name}_proj" for name in ("q", "k", "v")]
        table += fused(f"{ours}.self_attention.qkv", qkv, (width, width, width), bias=biased)
        table += both(f"{ours}.self_attention.out", f"{theirs}.self_attn.out_proj", bias=biased)
        table += both(f"{ours}.feedforward.up", f"{theirs}.fc1", bias=biased)
        table += both(f"{ours}.feedforward.down", f"{theirs}.fc2", bias=biased)
        if learned:
            table += both(f"{ours}.self_attention_norm", f"{theirs}.self_attn_layer_norm")
            table += both(f"{ours}.feedforward_norm", f"{theirs}.final_layer_norm")
    return table


OPT = Architecture(
    model_type="opt",
    classes={"OPTForCausalLM": ("lm",), "OPTModel": ()},
    family="gpt",
    read=read,
    write=write,
    links=links,
    prefix="model.",
    skipped=(r"model\.decoder\.version",),
    special_ids={"pad": 1, "bos": 2, "eos": 2},
    slow_tokenizer="GPT2Tokenizer",
)
