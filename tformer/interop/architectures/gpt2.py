"""GPT-2: pre-norm decoder, learned positions, one fused q, k, v matrix stored [in, out] (its Conv1D)."""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor

from tformer.interop.architecture import Architecture, Gguf
from tformer.interop.architectures.parts import (
    ACTIVATIONS,
    activation_name,
    d_ff_of,
    size_by_any_name,
    stack_of,
    token_links,
)
from tformer.interop.config import Config
from tformer.interop.mapping import TRANSPOSED, Link, both, link
from tformer.recipe.model import Model

# Keys without effect here: the order of operations, sizes of the first release, the head of another class.
OF_OTHERS = (
    "n_ctx",
    "n_special",
    "predict_special_tokens",
    "reorder_and_upcast_attn",
    "summary_activation",
    "summary_first_dropout",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
)


def read(config: Config, class_name: str) -> dict[str, Any]:
    config.expect("scale_attn_weights", True)
    config.expect("scale_attn_by_inverse_layer_idx", False)
    config.expect("add_cross_attention", False)
    config.ignore(*OF_OTHERS)
    width = size_by_any_name(config, "n_embd", "hidden_size", default=768)
    stack = {
        "num_layers": size_by_any_name(config, "n_layer", "num_hidden_layers", default=12),
        "num_heads": size_by_any_name(config, "n_head", "num_attention_heads", default=12),
        "positions": {"kind": "learned"},
        "feedforward": {
            "d_ff": config.size("n_inner", default=None) or 4 * width,
            "activation": config.choose("activation_function", ACTIVATIONS, default="gelu_new"),
        },
        "norm": {"place": "pre", "eps": config.take("layer_norm_epsilon", default=1e-5, kind=float)},
        "final_norm": True,
        "dropout": config.take("resid_pdrop", default=0.1, kind=float),
        "attention_dropout": config.take("attn_pdrop", default=0.1, kind=float),
    }
    return {
        "d_model": width,
        "max_seq_len": size_by_any_name(config, "n_positions", "max_position_embeddings", default=1024),
        "vocab_size": config.size("vocab_size", default=50257),
        "embedding": {"dropout": config.take("embd_pdrop", default=0.1, kind=float)},
        "tie": {"output": config.take("tie_word_embeddings", default=True, kind=bool)},
        "decoder": stack,
        "heads": [{"kind": "lm"}],
    }


def write(model: Model, class_name: str) -> dict[str, Any]:
    decoder = stack_of(model, "decoder")
    return {
        "vocab_size": model.vocab_size,
        "n_positions": model.max_seq_len,
        "n_embd": model.d_model,
        "n_layer": decoder.num_layers,
        "n_head": decoder.num_heads,
        "n_inner": d_ff_of(model, decoder),
        "activation_function": activation_name(decoder.feedforward.activation),
        "layer_norm_epsilon": decoder.norm.eps,
        "resid_pdrop": decoder.dropout,
        "attn_pdrop": decoder.attention_dropout,
        "embd_pdrop": model.embedding.dropout,
        "tie_word_embeddings": model.tie.output,
    }


def links(model: Model, class_name: str) -> list[Link]:
    table = [
        *token_links(model, "transformer.wte.weight"),
        link("decoder.positions.weight", "transformer.wpe.weight"),
        *both("decoder.final_norm", "transformer.ln_f"),
    ]
    for layer in range(stack_of(model, "decoder").num_layers):
        ours, theirs = f"decoder.blocks.{layer}", f"transformer.h.{layer}"
        table += both(f"{ours}.self_attention_norm", f"{theirs}.ln_1")
        table += both(f"{ours}.self_attention.qkv", f"{theirs}.attn.c_attn", layout=TRANSPOSED)
        table += both(f"{ours}.self_attention.out", f"{theirs}.attn.c_proj", layout=TRANSPOSED)
        table += both(f"{ours}.feedforward_norm", f"{theirs}.ln_2")
        table += both(f"{ours}.feedforward.up", f"{theirs}.mlp.c_fc", layout=TRANSPOSED)
        table += both(f"{ours}.feedforward.down", f"{theirs}.mlp.c_proj", layout=TRANSPOSED)
    return table


CONV1D = re.compile(r".*\.(c_attn|c_proj|c_fc)\.weight")


def stored_in_gguf(model: Model, name: str, tensor: Tensor) -> Tensor:
    """Matrices are [out, in] in GGUF files."""
    return tensor.T if CONV1D.fullmatch(name) else tensor


GPT2 = Architecture(
    model_type="gpt2",
    classes={"GPT2LMHeadModel": ("lm",), "GPT2Model": ()},
    family="gpt",
    read=read,
    write=write,
    links=links,
    prefix="transformer.",
    skipped=(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",),  # the causal mask, a buffer in old files
    special_ids={"bos": 50256, "eos": 50256},
    slow_tokenizer="GPT2Tokenizer",
    ctranslate2=("GPT2Loader", {}),
    gguf=Gguf("gpt2", "gelu_tanh", stored_in_gguf),
)
