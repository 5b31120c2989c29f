"""OPT and XGLM: decoders with learned positions, whose first two rows are unused, and with fairseq's sinusoids.

Biases of OPT, and the gains and biases of its norms, are all there or (Galactica) all absent. OPT-350m alone is
post-norm, with a narrow table that is projected in before positions are added and out before the logits.
"""

from __future__ import annotations

from typing import Any

from tformer.interop.architecture import Architecture
from tformer.interop.architectures.parts import decoder_links, layer_links, stack_of, token_links
from tformer.interop.architectures.table import ConfigKey, ConfigTable
from tformer.interop.config import Config
from tformer.interop.mapping import Link, both, link
from tformer.recipe.model import Model

BIASED = "decoder.attention.qkv_bias decoder.attention.out_bias decoder.feedforward.bias"
CONFIG = ConfigTable(
    rows=(
        ConfigKey("vocab_size", "vocab_size", 50272),
        ConfigKey("hidden_size", "d_model", 768),
        ConfigKey("ffn_dim", "decoder.feedforward.d_ff", 3072),
        ConfigKey("num_hidden_layers", "decoder.num_layers", 12),
        ConfigKey("num_attention_heads", "decoder.num_heads", 12),
        ConfigKey("max_position_embeddings", "max_seq_len", 2048),
        ConfigKey("activation_function", "decoder.feedforward.activation", "relu"),
        ConfigKey("enable_bias", BIASED, True),
        ConfigKey("layer_norm_elementwise_affine", "decoder.norm.learned", True),
        ConfigKey("dropout", "decoder.dropout", 0.1),
        ConfigKey("attention_dropout", "decoder.attention_dropout", 0.0),
        ConfigKey("activation_dropout", "decoder.activation_dropout", 0.0),
        ConfigKey("layerdrop", "decoder.layerdrop", 0.0),
        ConfigKey("do_layer_norm_before", "decoder.norm.place", True, values={True: "pre", False: "post"}),
        ConfigKey("tie_word_embeddings", "tie.output", True),
    ),
    fixed={
        "decoder.positions": {"kind": "learned", "offset": 2},
        "decoder.attention.kind": "full",
        "decoder.norm": {"eps": 1e-5},
        "heads": [{"kind": "lm"}],
    },
    expected={"learned_embeddings": True},
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
        section["embedding"] = {"size": embedded, "project": "first"}
        config.expect("tie_word_embeddings", True)
    removed = config.take("_remove_final_layer_norm", default=False, kind=bool)
    section["decoder"]["final_norm"] = section["decoder"]["norm"]["place"] == "pre" and not removed
    return section


def write(model: Model, class_name: str) -> dict[str, Any]:
    decoder = stack_of(model, "decoder")
    return CONFIG.write(model) | {
        "word_embed_proj_dim": model.embedding.size or model.d_model,
        "_remove_final_layer_norm": decoder.norm.place == "pre" and not decoder.final_norm,
    }


def links(model: Model, class_name: str) -> list[Link]:
    decoder = stack_of(model, "decoder")
    table = [
        *token_links(model, "model.decoder.embed_tokens.weight"),
        link("decoder.positions.weight", "model.decoder.embed_positions.weight"),
    ]
    if decoder.final_norm and decoder.norm.learned:
        table += both("decoder.final_norm", "model.decoder.final_layer_norm")
    if model.embedding.size is not None:
        table.append(link("embedding.project.weight", "model.decoder.project_in.weight"))
        table.append(link("heads.lm.project.weight", "model.decoder.project_out.weight"))
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

OF_XGLM = ConfigTable(
    rows=(
        ConfigKey("vocab_size", "vocab_size", 256008),
        ConfigKey("d_model hidden_size", "d_model", 1024),
        ConfigKey("ffn_dim", "decoder.feedforward.d_ff", 4096),
        ConfigKey("num_layers num_hidden_layers", "decoder.num_layers", 24),
        ConfigKey("attention_heads num_attention_heads", "decoder.num_heads", 16),
        ConfigKey("max_position_embeddings", "max_seq_len", 2048),
        ConfigKey("activation_function", "decoder.feedforward.activation", "gelu"),
        ConfigKey("scale_embedding", "embedding.scale", True),
        ConfigKey("dropout", "decoder.dropout embedding.dropout", 0.1),
        ConfigKey("attention_dropout", "decoder.attention_dropout", 0.1),
        ConfigKey("activation_dropout", "decoder.activation_dropout", 0.0),
        ConfigKey("layerdrop", "decoder.layerdrop", 0.0),
        ConfigKey("tie_word_embeddings", "tie.output", True),
    ),
    fixed={
        "decoder.positions": {"kind": "sinusoidal", "layout": "fairseq", "offset": 2},
        "decoder.norm": {"place": "pre", "eps": 1e-5},
        "decoder.final_norm": True,
        "heads": [{"kind": "lm"}],
    },
    expected={"add_cross_attention": False},
)


XGLM = Architecture(
    model_type="xglm",
    classes={"XGLMForCausalLM": ("lm",), "XGLMModel": ()},
    family="gpt",
    read=OF_XGLM.read,
    write=OF_XGLM.write,
    links=lambda model, _: decoder_links(model, "model.embed_tokens.weight", "model.layers", LAYER, "model.layer_norm"),
    prefix="model.",
    skipped=(r"model\.embed_positions\.weights",),
    special_ids={"pad": 1, "bos": 0, "eos": 2, "decoder_start": 2},
)
