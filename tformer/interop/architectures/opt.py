"""OPT: pre-norm decoder with learned positions; the first two rows of the position table are unused.

Biases, and the gains and biases of its norms, are all there or (Galactica) all absent. OPT-350m alone is post-norm with
narrow embeddings: refused.
"""

from __future__ import annotations

from typing import Any

from tformer.interop.architecture import Architecture
from tformer.interop.architectures.parts import layer_links, stack_of, token_links
from tformer.interop.architectures.table import ConfigTable, Row
from tformer.interop.config import Config
from tformer.interop.mapping import Link, both, link
from tformer.recipe.model import Model
from tformer.support.errors import InputError

BIASED = "decoder.attention.qkv_bias decoder.attention.out_bias decoder.feedforward.bias"
CONFIG = ConfigTable(
    rows=(
        Row("vocab_size", "vocab_size", 50272),
        Row("hidden_size", "d_model", 768),
        Row("ffn_dim", "decoder.feedforward.d_ff", 3072),
        Row("num_hidden_layers", "decoder.num_layers", 12),
        Row("num_attention_heads", "decoder.num_heads", 12),
        Row("max_position_embeddings", "max_seq_len", 2048),
        Row("activation_function", "decoder.feedforward.activation", "relu"),
        Row("enable_bias", BIASED, True),
        Row("layer_norm_elementwise_affine", "decoder.norm.learned", True),
        Row("dropout", "decoder.dropout", 0.1),
        Row("attention_dropout", "decoder.attention_dropout", 0.0),
        Row("activation_dropout", "decoder.activation_dropout", 0.0),
        Row("layerdrop", "decoder.layerdrop", 0.0),
        Row("tie_word_embeddings", "tie.output", True),
    ),
    fixed={
        "decoder.positions": {"kind": "learned", "offset": 2},
        "decoder.attention.kind": "full",
        "decoder.norm": {"place": "pre", "eps": 1e-5},
        "heads": [{"kind": "lm"}],
    },
    expected={"do_layer_norm_before": True, "learned_embeddings": True},
    written={"do_layer_norm_before": True},
)


LAYER = {
    "self_attention.qkv": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
    "self_attention.out": "self_attn.out_proj",
    "feedforward.up": "fc1",
    "feedforward.down": "fc2",
    "self_attention_norm": "self_attn_layer_norm",
    "feedforward_norm": "final_layer_norm",
}


def read(config: Config, class_name: str) -> dict[str, Any]:
    section = CONFIG.read(config)
    width, embedded = section["d_model"], config.size("word_embed_proj_dim", default=None)
    if embedded not in (None, width):
        raise InputError(
            f"{config.name}: word_embed_proj_dim: found {embedded}, tformer has this architecture with "
            f"hidden_size ({width}) only"
        )
    section["decoder"]["final_norm"] = not config.take("_remove_final_layer_norm", default=False, kind=bool)
    return section


def write(model: Model, class_name: str) -> dict[str, Any]:
    final_norm = stack_of(model, "decoder").final_norm
    return CONFIG.write(model) | {"word_embed_proj_dim": model.d_model, "_remove_final_layer_norm": not final_norm}


def links(model: Model, class_name: str) -> list[Link]:
    decoder = stack_of(model, "decoder")
    table = [
        *token_links(model, "model.decoder.embed_tokens.weight"),
        link("decoder.positions.weight", "model.decoder.embed_positions.weight"),
    ]
    if decoder.final_norm and decoder.norm.learned:
        table += both("decoder.final_norm", "model.decoder.final_layer_norm")
    return table + layer_links(model, "decoder", "model.decoder.layers", LAYER)


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
