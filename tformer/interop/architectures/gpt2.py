"""GPT-2, GPT-BigCode and GPT-Neo: pre-norm decoders with learned positions.

GPT-2        one fused q, k, v matrix stored [in, out] (its Conv1D)
GPT-BigCode  keys and values of one head (`multi_query`), fused as rows q, k, v; of all heads: head by head
GPT-Neo      unscaled scores, windows in every second layer, which count the query's own key
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

from torch import Tensor

from tformer.build import resolve_sizes
from tformer.interop.architecture import Architecture, Gguf
from tformer.interop.architectures.llama import windows_of, with_windows
from tformer.interop.architectures.parts import layer_links, qkv_by_group, token_links
from tformer.interop.architectures.table import ConfigKey, ConfigTable
from tformer.interop.config import Config
from tformer.interop.mapping import TRANSPOSED, Link, TensorLayout, both, link
from tformer.recipe.model import Model
from tformer.support.errors import InputError

# Keys without effect here: the order of operations, sizes of the first release, the head of another class.
OF_OTHERS = (
    *("n_ctx", "n_special", "predict_special_tokens", "reorder_and_upcast_attn", "summary_activation"),
    *("summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj"),
)


CONFIG = ConfigTable(
    rows=(
        ConfigKey("vocab_size", "vocab_size", 50257),
        ConfigKey("n_positions max_position_embeddings", "max_seq_len", 1024),
        ConfigKey("n_embd hidden_size", "d_model", 768),
        ConfigKey("n_layer num_hidden_layers", "decoder.num_layers", 12),
        ConfigKey("n_head num_attention_heads", "decoder.num_heads", 12),
        ConfigKey("n_inner", "decoder.feedforward.d_ff", lambda section: 4 * section["d_model"]),
        ConfigKey("activation_function", "decoder.feedforward.activation", "gelu_new"),
        ConfigKey("layer_norm_epsilon", "decoder.norm.eps", 1e-5),
        ConfigKey("resid_pdrop", "decoder.dropout", 0.1),
        ConfigKey("attn_pdrop", "decoder.attention_dropout", 0.1),
        ConfigKey("embd_pdrop", "embedding.dropout", 0.1),
        ConfigKey("tie_word_embeddings", "tie.output", True),
    ),
    fixed={
        "decoder.positions.kind": "learned",
        "decoder.norm.place": "pre",
        "decoder.final_norm": True,
        "heads": [{"kind": "lm"}],
    },
    expected={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
    ignored=OF_OTHERS,
)


LAYER = {
    "self_attention_norm": "ln_1",
    "self_attention.qkv": "attn.c_attn",
    "self_attention.out": "attn.c_proj",
    "feedforward_norm": "ln_2",
    "feedforward.up": "mlp.c_fc",
    "feedforward.down": "mlp.c_proj",
}
LAYOUTS = {module: TRANSPOSED for module, name in LAYER.items() if ".c_" in name}


def links(
    model: Model, class_name: str, *, layer: Mapping[str, str] = LAYER, layouts: Mapping[str, TensorLayout] = LAYOUTS
) -> list[Link]:
    return [
        *token_links(model, "transformer.wte.weight"),
        link("decoder.positions.weight", "transformer.wpe.weight"),
        *both("decoder.final_norm", "transformer.ln_f"),
        *layer_links(model, "decoder", "transformer.h", layer, layouts),
    ]


CONV1D = re.compile(r".*\.(c_attn|c_proj|c_fc)\.weight")


def stored_in_gguf(model: Model, name: str, tensor: Tensor) -> Tensor:
    """The tensor as a GGUF file has it: matrices are [out, in]."""
    return tensor.T if CONV1D.fullmatch(name) else tensor


GGUF_KEYS = {
    "context_length": "n_positions",
    "embedding_length": "n_embd",
    "block_count": "n_layer",
    "feed_forward_length": "n_inner",
    "attention.head_count": "n_head",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
}

GPT2 = Architecture(
    model_type="gpt2",
    classes={"GPT2LMHeadModel": ("lm",), "GPT2Model": ()},
    family="gpt",
    read=CONFIG.read,
    write=CONFIG.write,
    links=links,
    prefix="transformer.",
    skipped=(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",),  # the causal mask, a buffer in old files
    special_ids={"bos": 50256, "eos": 50256},
    slow_tokenizer="GPT2Tokenizer",
    ctranslate2=lambda config: {
        "layer_norm_epsilon": 1e-5,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
    },
    gguf=Gguf("gpt2", GGUF_KEYS, stored_in_gguf, stored_in_gguf, scalings=()),
)


OF_BIGCODE = replace(
    CONFIG,
    ignored=(
        *OF_OTHERS,
        *("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "num_key_value_heads"),
        *("inference_runner", "max_batch_size", "max_sequence_length", "pad_key_length", "pre_allocate_kv_cache"),
        "validate_runner_input",
    ),
).defaulting(activation_function="gelu_pytorch_tanh")


def read_bigcode(config: Config, class_name: str) -> dict[str, Any]:
    section = OF_BIGCODE.read(config)
    section["decoder"]["num_kv_heads"] = 1 if config.take("multi_query", default=True, kind=bool) else None
    return section


GPT_BIGCODE = replace(
    GPT2,
    model_type="gpt_bigcode",
    classes={"GPTBigCodeForCausalLM": ("lm",), "GPTBigCodeModel": ()},
    read=read_bigcode,
    write=lambda model, _: OF_BIGCODE.write(model) | {"multi_query": resolve_sizes(model, "decoder").num_kv_heads == 1},
    links=lambda model, name: links(model, name, layouts={"self_attention.qkv": qkv_by_group(model)}),
    slow_tokenizer=None,
    ctranslate2=None,
    gguf=None,
)

OF_NEO = ConfigTable(
    rows=(
        ConfigKey("vocab_size", "vocab_size", 50257),
        ConfigKey("max_position_embeddings", "max_seq_len", 2048),
        ConfigKey("hidden_size", "d_model", 2048),
        ConfigKey("num_layers num_hidden_layers", "decoder.num_layers", 24),
        ConfigKey("num_heads num_attention_heads", "decoder.num_heads", 16),
        ConfigKey("intermediate_size", "decoder.feedforward.d_ff", lambda section: 4 * section["d_model"]),
        ConfigKey("activation_function", "decoder.feedforward.activation", "gelu_new"),
        ConfigKey("layer_norm_epsilon", "decoder.norm.eps", 1e-5),
        ConfigKey("resid_dropout", "decoder.dropout", 0.0),
        ConfigKey("attention_dropout", "decoder.attention_dropout", 0.0),
        ConfigKey("embed_dropout", "embedding.dropout", 0.0),
        ConfigKey("tie_word_embeddings", "tie.output", True),
    ),
    fixed={**CONFIG.fixed, "decoder.attention": {"kind": "full", "scale": 1.0, "qkv_bias": False}},
    ignored=("attention_layers", *OF_OTHERS),  # the first follows from attention_types
)
OF_LAYERS = [[["global", "local"], 12]]  # the default: twelve pairs
NEO_WINDOW = 256


def read_neo(config: Config, class_name: str) -> dict[str, Any]:
    section = OF_NEO.read(config)
    types, layers = config.take("attention_types", default=OF_LAYERS, kind=list), section["decoder"]["num_layers"]
    try:
        every = (kind for several, times in types if several for _ in range(times) for kind in several)
        kinds = list(islice(every, layers + 1))
    except (TypeError, ValueError):
        kinds = []
    if len(kinds) != layers or any(kind not in ("global", "local") for kind in kinds):
        expected = f"expected [[names, times], ...] of global and local for {layers} layers"
        raise InputError(f"{config.name}: attention_types: found {types!r}, {expected}")
    window = config.size("window_size", default=NEO_WINDOW)
    return with_windows(config, section, window, [kind == "local" for kind in kinds], key="window_size")


def write_neo(model: Model, class_name: str) -> dict[str, Any]:
    windows = windows_of(model)
    kinds = ["local" if window else "global" for window in windows]
    found = {"attention_types": [[kinds, 1]], "window_size": next(filter(None, windows), NEO_WINDOW)}
    return OF_NEO.write(model) | found


NEO_LAYER = LAYER | {
    "self_attention.qkv": "attn.attention.q_proj attn.attention.k_proj attn.attention.v_proj",
    "self_attention.out": "attn.attention.out_proj",
}
GPT_NEO = replace(
    GPT2,
    model_type="gpt_neo",
    classes={"GPTNeoForCausalLM": ("lm",), "GPTNeoModel": ()},
    read=read_neo,
    write=write_neo,
    links=partial(links, layer=NEO_LAYER, layouts={}),
    skipped=(r"transformer\.h\.\d+\.attn\.attention\.(bias|masked_bias)",),
    ctranslate2=None,
    gguf=None,
)
