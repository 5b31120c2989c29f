"""Falcon: pre-norm decoder with q, k and v fused group by group. Its kinds by three keys:

    new_decoder_architecture   40B, 11B: groups of queries; attention and network side by side, with two norms or one
    multi_query, parallel_attn 7B: one key and value head; side by side after one norm
    neither                    RW: a key and value for each query head, or one; one after the other; often ALiBi

ALiBi's slopes and their products with positions are rounded to bf16, in every precision.
"""

from __future__ import annotations

from typing import Any

from tformer.build import resolve_sizes
from tformer.interop.architecture import Architecture
from tformer.interop.architectures.bloom import LAYER
from tformer.interop.architectures.llama import ROPE_NAMES, with_rope, write_rope
from tformer.interop.architectures.parts import decoder_links, qkv_by_group, stack_of
from tformer.interop.architectures.table import ConfigKey, ConfigTable
from tformer.interop.config import Config
from tformer.interop.mapping import Link
from tformer.recipe.model import Model

CONFIG = ConfigTable(
    rows=(
        ConfigKey("vocab_size", "vocab_size", 65024),
        ConfigKey("hidden_size n_embed", "d_model", 4544),
        ConfigKey("ffn_hidden_size", "decoder.feedforward.d_ff", lambda section: 4 * section["d_model"]),
        ConfigKey("num_hidden_layers", "decoder.num_layers", 32),
        ConfigKey("num_attention_heads", "decoder.num_heads", 71),
        ConfigKey("num_kv_heads", "decoder.num_kv_heads", lambda section: section["decoder"]["num_heads"]),
        ConfigKey("activation", "decoder.feedforward.activation", "gelu"),
        ConfigKey("max_position_embeddings", "max_seq_len", 2048),
        ConfigKey("layer_norm_epsilon", "decoder.norm.eps", 1e-5),
        ConfigKey("bias", "decoder.attention.qkv_bias decoder.attention.out_bias decoder.feedforward.bias", False),
        ConfigKey("hidden_dropout", "decoder.dropout", 0.0),
        ConfigKey("attention_dropout", "decoder.attention_dropout", 0.0),
        ConfigKey("tie_word_embeddings", "tie.output", True),
    ),
    fixed={
        "decoder.positions": {"kind": "alibi", "rounded": True},
        "decoder.norm.place": "pre",
        "decoder.final_norm": True,
        "heads": [{"kind": "lm"}],
    },
    ignored=("auto_map",),  # released folders name code that computes what the class does
)


def read(config: Config, class_name: str) -> dict[str, Any]:
    section = CONFIG.read(config)
    decoder = section["decoder"]
    new = config.take("new_decoder_architecture", default=False, kind=bool)
    one_key = config.take("multi_query", default=True, kind=bool)
    parallel = config.take("parallel_attn", default=True, kind=bool)
    norms = config.expect("num_ln_in_parallel_attn", *((2, 1) if new else (1,)))
    if new:
        config.expect("parallel_attn", True)
        decoder["residual"] = "parallel" if norms == 2 else "parallel_one_norm"
    else:
        decoder["residual"] = "parallel_one_norm" if parallel else "sequential"
        decoder["num_kv_heads"] = 1 if one_key else decoder["num_heads"]
    if not config.take("alibi", default=False, kind=bool):
        return with_rope(config, section)
    config.ignore("rope_parameters", "rope_scaling", *ROPE_NAMES)
    return section


def write(model: Model, class_name: str) -> dict[str, Any]:
    decoder, sizes = stack_of(model, "decoder"), resolve_sizes(model, "decoder")
    in_groups = sizes.num_kv_heads not in (1, sizes.num_heads)
    new = decoder.residual == "parallel" or (in_groups and decoder.residual == "parallel_one_norm")
    alibi = decoder.positions.kind == "alibi"
    return {
        **CONFIG.write(model),
        "alibi": alibi,
        "new_decoder_architecture": new,
        "multi_query": sizes.num_kv_heads == 1,
        "parallel_attn": decoder.residual != "sequential",
        "num_ln_in_parallel_attn": 2 if decoder.residual == "parallel" else 1,
        **({} if alibi else write_rope(decoder)),
    }


TWO_NORMS = LAYER | {"self_attention_norm": "ln_attn", "feedforward_norm": "ln_mlp"}


def links(model: Model, class_name: str) -> list[Link]:
    modules = TWO_NORMS if stack_of(model, "decoder").residual == "parallel" else LAYER
    layouts = {"self_attention.qkv": qkv_by_group(model)}
    table = "transformer.word_embeddings.weight"
    return decoder_links(model, table, "transformer.h", modules, "transformer.ln_f", layouts=layouts)


FALCON = Architecture(
    model_type="falcon",
    classes={"FalconForCausalLM": ("lm",), "FalconModel": ()},
    family="gpt",
    read=read,
    write=write,
    links=links,
    prefix="transformer.",
    special_ids={"bos": 11, "eos": 11},
)
