"""GPT-NeoX, GPT-J, Phi and StableLM: pre-norm decoders that rotate a share of each head.

GPT-NeoX   attention and feed-forward network side by side, by a key; q, k and v fused head by head
GPT-J      side by side after one norm; neighbouring coordinates are rotated; attention has no biases, the output one
Phi        side by side after one norm; biases everywhere; by a key LayerNorm of queries and keys
StableLM   a gated network without biases; by keys side by side after one norm, and LayerNorm of queries and keys
           with separate gains for each head
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from tformer.build import resolve_sizes
from tformer.interop.architecture import Architecture, Gguf
from tformer.interop.architectures import gpt2, llama
from tformer.interop.architectures.llama import ROPE_NAMES, with_rope, write_rope
from tformer.interop.architectures.parts import decoder_links, qkv_by_group, stack_of
from tformer.interop.architectures.table import ConfigKey, ConfigTable
from tformer.interop.config import Config
from tformer.interop.mapping import Link
from tformer.nn.positions.rope import RopeOptions
from tformer.recipe.model import Model

ROWS = (
    *(row for row in llama.ROWS if row.keys not in ("head_dim", "rms_norm_eps")),
    ConfigKey("layer_norm_eps", "decoder.norm.eps", 1e-5),
)
QK_EPS = ConfigKey("layer_norm_eps", "decoder.norm.eps decoder.attention.qk_norm_eps", 1e-5)
FIXED = {"decoder.norm.place": "pre", "decoder.final_norm": True, "heads": [{"kind": "lm"}]}


def read(
    config: Config, class_name: str, *, table: ConfigTable, share: float, names: tuple[str, str] = ROPE_NAMES
) -> dict[str, Any]:
    return with_rope(config, table.read(config), share=share, names=names)


def write(model: Model, class_name: str, *, table: ConfigTable, names: tuple[str, str] = ROPE_NAMES) -> dict[str, Any]:
    return table.write(model) | write_rope(stack_of(model, "decoder"), has_share=True, names=names)


OF_NEOX = ConfigTable(
    rows=(
        *ROWS,
        ConfigKey("hidden_dropout", "decoder.dropout embedding.dropout", 0.0),
        ConfigKey("attention_bias", "decoder.attention.qkv_bias decoder.attention.out_bias", True),
        ConfigKey("use_parallel_residual", "decoder.residual", True, values={True: "parallel", False: "sequential"}),
    ),
    fixed=FIXED,
).defaulting(
    **{"vocab_size": 50432, "hidden_size": 6144, "intermediate_size": 24576, "num_hidden_layers": 44},
    **{"num_attention_heads": 64, "hidden_act": "gelu"},
)
NEOX_NAMES = ("rotary_emb_base", "rotary_pct")
NEOX_LAYER = {
    "self_attention_norm": "input_layernorm",
    "self_attention.qkv": "attention.query_key_value",
    "self_attention.out": "attention.dense",
    "feedforward_norm": "post_attention_layernorm",
    "feedforward.up": "mlp.dense_h_to_4h",
    "feedforward.down": "mlp.dense_4h_to_h",
}


def neox_links(model: Model, class_name: str) -> list[Link]:
    return decoder_links(
        model,
        "gpt_neox.embed_in.weight",
        "gpt_neox.layers",
        NEOX_LAYER,
        "gpt_neox.final_layer_norm",
        layouts={"self_attention.qkv": qkv_by_group(model)},
        output="embed_out",
    )


GPT_NEOX = Architecture(
    model_type="gpt_neox",
    classes={"GPTNeoXForCausalLM": ("lm",), "GPTNeoXModel": ()},
    family="gpt",
    read=partial(read, table=OF_NEOX, share=0.25, names=NEOX_NAMES),
    write=partial(write, table=OF_NEOX, names=NEOX_NAMES),
    links=neox_links,
    prefix="gpt_neox.",
    # the causal mask and the frequencies, buffers in old files
    skipped=(r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",),
    special_ids={"bos": 0, "eos": 2},
)

OF_GPTJ = replace(
    gpt2.CONFIG,
    fixed=FIXED
    | {
        "decoder.residual": "parallel_one_norm",
        "decoder.attention": {"kind": "full", "qkv_bias": False, "out_bias": False},
        "heads": [{"kind": "lm", "bias": True}],
    },
    expected={"rotary": True, "scale_attn_weights": True},
).defaulting(
    **{"vocab_size": 50400, "n_positions": 2048, "n_embd": 4096, "n_layer": 28, "n_head": 16, "resid_pdrop": 0.0},
    **{"attn_pdrop": 0.0, "embd_pdrop": 0.0, "tie_word_embeddings": False},
)
GPTJ_LAYER = {
    "self_attention_norm": "ln_1",
    "self_attention.qkv": "attn.q_proj attn.k_proj attn.v_proj",
    "self_attention.out": "attn.out_proj",
    "feedforward.up": "mlp.fc_in",
    "feedforward.down": "mlp.fc_out",
}


def read_gptj(config: Config, class_name: str) -> dict[str, Any]:
    section = OF_GPTJ.read(config)
    share = config.size("rotary_dim", default=64) * section["decoder"]["num_heads"] / section["d_model"]
    section["decoder"]["positions"] = {"kind": "rope", "layout": "interleaved", "share": share}
    return section


def write_gptj(model: Model, class_name: str) -> dict[str, Any]:
    positions, size = stack_of(model, "decoder").positions, resolve_sizes(model, "decoder").head_dim
    return OF_GPTJ.write(model) | {"rotary_dim": positions.width(size) if isinstance(positions, RopeOptions) else size}


GPTJ = Architecture(
    model_type="gptj",
    classes={"GPTJForCausalLM": ("lm",), "GPTJModel": ()},
    family="gpt",
    read=read_gptj,
    write=write_gptj,
    links=lambda model, _: decoder_links(
        model, "transformer.wte.weight", "transformer.h", GPTJ_LAYER, "transformer.ln_f"
    ),
    prefix="transformer.",
    skipped=(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",),
    special_ids={"bos": 50256, "eos": 50256},
    slow_tokenizer="GPT2Tokenizer",
)

OF_PHI = replace(
    OF_NEOX,
    rows=(
        *ROWS,
        ConfigKey("num_key_value_heads", "decoder.num_kv_heads", lambda section: section["decoder"]["num_heads"]),
        ConfigKey("resid_pdrop", "decoder.dropout", 0.0),
        ConfigKey("embd_pdrop", "embedding.dropout", 0.0),
        ConfigKey("qk_layernorm", "decoder.attention.qk_norm", False, values={False: False, True: "layernorm"}),
        QK_EPS,
    ),
    fixed=FIXED | {"decoder.residual": "parallel_one_norm", "heads": [{"kind": "lm", "bias": True}]},
).defaulting(
    **{"vocab_size": 51200, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24},
    **{"num_attention_heads": 32, "hidden_act": "gelu_new"},
)
PHI_LAYER = {
    "self_attention_norm": "input_layernorm",
    "self_attention.qkv": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
    "self_attention.out": "self_attn.dense",
    "self_attention.q_norm": "self_attn.q_layernorm",
    "self_attention.k_norm": "self_attn.k_layernorm",
    "feedforward.up": "mlp.fc1",
    "feedforward.down": "mlp.fc2",
}
PHI = Architecture(
    model_type="phi",
    classes={"PhiForCausalLM": ("lm",), "PhiModel": ()},
    family="gpt",
    read=partial(read, table=OF_PHI, share=0.5),
    write=partial(write, table=OF_PHI),
    links=lambda model, _: decoder_links(
        model, "model.embed_tokens.weight", "model.layers", PHI_LAYER, "model.final_layernorm"
    ),
    prefix="model.",
    special_ids={"bos": 1, "eos": 2},
    slow_tokenizer="GPT2Tokenizer",
    gguf=Gguf(
        "phi2",
        {key: name for key, name in llama.GGUF_KEYS.items() if name not in ("head_dim", "rms_norm_eps")}
        | {"attention.layer_norm_epsilon": "layer_norm_eps", "rope.dimension_count": "partial_rotary_factor"},
        assumed=lambda config: {"tie_word_embeddings": False},
    ),
)

OF_STABLELM = ConfigTable(
    rows=(
        *ROWS,
        ConfigKey("num_key_value_heads", "decoder.num_kv_heads", 32),
        ConfigKey("hidden_dropout", "decoder.dropout", 0.0),
        ConfigKey("use_qkv_bias", "decoder.attention.qkv_bias", False),
        ConfigKey(
            "use_parallel_residual",
            "decoder.residual",
            False,
            values={False: "sequential", True: "parallel_one_norm"},
        ),
        ConfigKey("qk_layernorm", "decoder.attention.qk_norm", False, values={False: False, True: "groupnorm"}),
        QK_EPS,
    ),
    fixed=FIXED
    | {
        "decoder.feedforward": {"gated": True, "bias": False},
        "decoder.attention": {"kind": "full", "out_bias": False},
    },
).defaulting(
    **{"vocab_size": 50304, "hidden_size": 2560, "intermediate_size": 6912, "num_hidden_layers": 32},
    **{"num_attention_heads": 32, "hidden_act": "silu", "max_position_embeddings": 4096},
)


def stablelm_links(model: Model, class_name: str) -> list[Link]:
    """Links of the weights; norms of queries and keys, if there are any, are separate for each head."""
    sizes = resolve_sizes(model, "decoder")
    norms = {
        f"self_attention.{one}_norm": " ".join(f"self_attn.{one}_layernorm.norms.{head}" for head in range(heads))
        for one, heads in (("q", sizes.num_heads), ("k", sizes.num_kv_heads))
    }
    return llama.links(model, class_name, layer=llama.LAYER | norms)


STABLELM = Architecture(
    model_type="stablelm",
    classes={"StableLmForCausalLM": ("lm",), "StableLmModel": ()},
    family="llama",
    read=partial(read, table=OF_STABLELM, share=0.25),
    write=partial(write, table=OF_STABLELM),
    links=stablelm_links,
    prefix="model.",
    special_ids={"bos": 0, "eos": 0},
)
