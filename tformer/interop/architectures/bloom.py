"""BLOOM: pre-norm decoder with ALiBi, a norm after the embeddings, tanh gelu, q, k and v fused head by head."""

from __future__ import annotations

from tformer.interop.architecture import Architecture
from tformer.interop.architectures.parts import decoder_links, qkv_by_group
from tformer.interop.architectures.table import ConfigKey, ConfigTable
from tformer.interop.mapping import Link, both
from tformer.recipe.model import Model

# Keys of the framework that trained it (fused kernels, order of summation); `n_inner` is not used by any class.
TRAINED_WITH = (
    *("attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion", "n_inner", "offset_alibi"),
    *("skip_bias_add", "skip_bias_add_qkv", "slow_but_exact"),
)


CONFIG = ConfigTable(
    rows=(
        ConfigKey("vocab_size", "vocab_size", 250880),
        ConfigKey("n_embed hidden_size", "d_model", 64, written="hidden_size"),
        ConfigKey("", "decoder.feedforward.d_ff", lambda section: 4 * section["d_model"]),
        ConfigKey("n_layer num_hidden_layers", "decoder.num_layers", 2),
        ConfigKey("n_head num_attention_heads", "decoder.num_heads", 8),
        ConfigKey("seq_length", "max_seq_len", 2048),
        ConfigKey("layer_norm_epsilon", "decoder.norm.eps", 1e-5),
        ConfigKey("hidden_dropout", "decoder.dropout", 0.0),
        ConfigKey("attention_dropout", "decoder.attention_dropout", 0.0),
        ConfigKey("tie_word_embeddings", "tie.output", True),
    ),
    fixed={
        "embedding.norm": True,
        "decoder.positions.kind": "alibi",
        "decoder.feedforward.activation": "gelu_tanh",
        "decoder.norm.place": "pre",
        "decoder.final_norm": True,
        "heads": [{"kind": "lm"}],
    },
    expected={"apply_residual_connection_post_layernorm": False},
    ignored=TRAINED_WITH,
)


LAYER = {
    "self_attention_norm": "input_layernorm",
    "self_attention.qkv": "self_attention.query_key_value",
    "self_attention.out": "self_attention.dense",
    "feedforward_norm": "post_attention_layernorm",
    "feedforward.up": "mlp.dense_h_to_4h",
    "feedforward.down": "mlp.dense_4h_to_h",
}


def links(model: Model, class_name: str) -> list[Link]:
    layouts = {"self_attention.qkv": qkv_by_group(model)}
    return [
        *both("embedding.norm", "transformer.word_embeddings_layernorm"),
        *decoder_links(
            model, "transformer.word_embeddings.weight", "transformer.h", LAYER, "transformer.ln_f", layouts=layouts
        ),
    ]


BLOOM = Architecture(
    model_type="bloom",
    classes={"BloomForCausalLM": ("lm",), "BloomModel": ()},
    family="gpt",
    read=CONFIG.read,
    write=CONFIG.write,
    links=links,
    prefix="transformer.",
    special_ids={"bos": 1, "eos": 2},
)
