"""OLMo, OLMo 2, Granite, Starcoder2, Phi-3 and SmolLM3: Llama with other norms, scales, windows or positions.

OLMo        LayerNorm without parameters; checkpoints that clip queries, keys and values are refused
OLMo 2      norms on the outputs of sublayers before the sum, and of all queries and all keys of a token
Granite     factors of embeddings, scores, outputs of sublayers and logits
Starcoder2  LayerNorm, biases by one key, a plain feed-forward network; a sliding window in every layer or none
Phi-3       one matrix of q, k, v and one of gate and value; a share of each head is rotated, longrope; windows
SmolLM3     no positions in every fourth layer, which alone may have windows
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from tformer.interop.architecture import Gguf
from tformer.interop.architectures import llama
from tformer.interop.architectures.parts import size_or_missing, stack_of
from tformer.interop.architectures.table import ConfigKey, ConfigTable
from tformer.interop.config import Config
from tformer.nn.heads import LmHeadOptions
from tformer.recipe.model import Model, layer_sections
from tformer.support.errors import InputError

PLAIN = replace(llama.LLAMA, ctranslate2=None, gguf=None, special_ids={}, slow_tokenizer=None)

OF_OLMO = ConfigTable(
    (*(row for row in llama.ROWS if row.keys != "rms_norm_eps"), llama.BIAS),
    llama.FIXED | {"decoder.norm": {"kind": "layernorm", "place": "pre", "learned": False, "eps": 1e-5}},
    expected={"clip_qkv": None},
).defaulting(vocab_size=50304)
OLMO = replace(
    PLAIN,
    model_type="olmo",
    classes={"OlmoForCausalLM": ("lm",), "OlmoModel": ()},
    read=partial(llama.read, table=OF_OLMO),
    write=partial(llama.write, table=OF_OLMO),
    special_ids={"pad": 1, "eos": 50279},
)

OF_OLMO2 = ConfigTable(
    (ConfigKey("rms_norm_eps", "decoder.attention.qk_norm_eps", 1e-5), *llama.ROWS, llama.BIAS),
    llama.FIXED | {"decoder.norm.place": "res_post", "decoder.attention.qk_norm": "width"},
).defaulting(vocab_size=50304, rms_norm_eps=1e-5)
OUTPUT_NORMS = {"self_attention_norm": "post_attention_layernorm", "feedforward_norm": "post_feedforward_layernorm"}
OLMO2 = replace(
    OLMO,
    model_type="olmo2",
    classes={"Olmo2ForCausalLM": ("lm",), "Olmo2Model": ()},
    read=partial(llama.read, table=OF_OLMO2),
    write=partial(llama.write, table=OF_OLMO2),
    links=partial(llama.links, layer=llama.LAYER | OUTPUT_NORMS),
)

MULTIPLIERS = (
    ConfigKey("attention_multiplier", "decoder.attention.scale", 1.0),
    ConfigKey("residual_multiplier", "decoder.residual_multiplier", 1.0),
)
OF_GRANITE = replace(llama.OF_LLAMA, rows=(*llama.OF_LLAMA.rows, *MULTIPLIERS))


def read_granite(config: Config, class_name: str) -> dict[str, Any]:
    section = llama.read(config, class_name, table=OF_GRANITE)
    factor = config.positive("embedding_multiplier", default=1.0)
    section["embedding"] = {"scale": factor if factor != 1.0 else False}
    section["heads"] = [{"kind": "lm", "scale": 1.0 / config.positive("logits_scaling", default=1.0)}]
    return section


def write_granite(model: Model, class_name: str) -> dict[str, Any]:
    factor, heads = model.embedding.scale, [head for head in model.heads if isinstance(head, LmHeadOptions)]
    return {
        **llama.write(model, class_name, table=OF_GRANITE),
        "embedding_multiplier": factor if isinstance(factor, float) else 1.0,
        "logits_scaling": 1.0 / heads[0].factor(model.d_model) if heads else 1.0,
    }


GRANITE = replace(
    PLAIN,
    model_type="granite",
    classes={"GraniteForCausalLM": ("lm",), "GraniteModel": ()},
    read=read_granite,
    write=write_granite,
    special_ids={"bos": 1, "eos": 2},
)

SIZES = {"vocab_size": 49152, "hidden_size": 3072, "intermediate_size": 12288, "num_hidden_layers": 30}
SIZES |= {"num_attention_heads": 24, "max_position_embeddings": 4096}
OF_STARCODER2 = ConfigTable(
    (
        *(replace(row, keys="norm_epsilon") if row.keys == "rms_norm_eps" else row for row in llama.ROWS),
        ConfigKey("use_bias", "decoder.attention.qkv_bias decoder.attention.out_bias decoder.feedforward.bias", True),
        ConfigKey("residual_dropout", "decoder.dropout", 0.0),
        ConfigKey("embedding_dropout", "embedding.dropout", 0.0),
    ),
    llama.FIXED | {"decoder.feedforward.gated": False, "decoder.norm": {"kind": "layernorm", "place": "pre"}},
    # of the training code; the class reads none of them
    ignored=(
        *("activation_function", "attention_softmax_in_fp32", "layer_norm_epsilon", "mlp_type", "norm_type"),
        *("scale_attention_softmax_in_fp32", "scale_attn_weights"),
    ),
).defaulting(**SIZES, hidden_act="gelu_pytorch_tanh", norm_epsilon=1e-5, tie_word_embeddings=True)
STARCODER2 = replace(
    PLAIN,
    model_type="starcoder2",
    classes={"Starcoder2ForCausalLM": ("lm",), "Starcoder2Model": ()},
    read=partial(llama.read_mistral, table=OF_STARCODER2, kv_heads=2, missing=None),
    write=partial(llama.write_mistral, table=OF_STARCODER2),
    links=partial(llama.links, layer=llama.LAYER | {"feedforward.up": "mlp.c_fc", "feedforward.down": "mlp.c_proj"}),
    special_ids={"bos": 50256, "eos": 50256},
)

OF_PHI3 = ConfigTable(
    (*llama.ROWS, ConfigKey("resid_pdrop", "decoder.dropout", 0.0), ConfigKey("embd_pdrop", "embedding.dropout", 0.0)),
    llama.FIXED,
    ignored=("auto_map",),  # released folders name code that computes what the class does
).defaulting(
    vocab_size=32064, hidden_size=3072, intermediate_size=8192, max_position_embeddings=4096, rms_norm_eps=1e-5
)


def read_phi3(config: Config, class_name: str) -> dict[str, Any]:
    rope = partial(llama.with_rope, share=1.0, original=4096)
    section = llama.read(config, class_name, table=OF_PHI3, rope=rope)
    kind = section["decoder"]["positions"].get("scaling", {"kind": "longrope"})["kind"]
    if kind != "longrope":
        raise InputError(f"{config.name}: rope_type: found {kind!r}, this class has default and longrope only")
    window = size_or_missing(config, "sliding_window", None)
    return llama.with_windows(config, section, window, [True] * section["decoder"]["num_layers"])


def write_phi3(model: Model, class_name: str) -> dict[str, Any]:
    decoder = stack_of(model, "decoder")
    scaling = getattr(decoder.positions, "scaling", None)
    return {
        **llama.write(model, class_name, table=OF_PHI3),
        **llama.write_rope(decoder, has_share=True),
        "sliding_window": llama.windows_of(model)[0],
        llama.ORIGINAL: model.max_seq_len if scaling is None else scaling.original_max_seq_len,
    }


PHI3_LAYER = llama.LAYER | {"self_attention.qkv": "self_attn.qkv_proj", "feedforward.up": "mlp.gate_up_proj"}
PHI3 = replace(
    PLAIN,
    model_type="phi3",
    classes={"Phi3ForCausalLM": ("lm",), "Phi3Model": ()},
    read=read_phi3,
    write=write_phi3,
    links=partial(llama.links, layer=PHI3_LAYER),
    special_ids={"bos": 1, "eos": 32000, "pad": 32000},
    slow_tokenizer="LlamaTokenizer",
    gguf=Gguf(
        "phi3",
        {key: name for key, name in llama.GGUF_KEYS.items() if name != "head_dim"}
        | {"rope.dimension_count": "partial_rotary_factor", "attention.sliding_window": "sliding_window"}
        | {"rope.scaling.original_context_length": llama.ORIGINAL},
        assumed=lambda config: {"sliding_window": None},  # llama.cpp reads the key and has no windows here
        scalings=("longrope",),
    ),
)

OF_SMOLLM3 = replace(llama.OF_LLAMA, ignored=("max_window_layers",)).defaulting(
    **{"vocab_size": 128256, "hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16},
    **{"max_position_embeddings": 32768, "tie_word_embeddings": True},
)


def read_smollm3(config: Config, class_name: str) -> dict[str, Any]:
    rope = partial(llama.with_rope, base=2e6)
    section = llama.read(config, class_name, table=OF_SMOLLM3, kv_heads=4, rope=rope)
    count, every = section["decoder"]["num_layers"], config.size("no_rope_layer_interval", default=4)
    usual = [int((layer + 1) % every != 0) for layer in range(count)]
    rotates = config.take("no_rope_layers", default=usual, kind=list)[:count]
    if len(rotates) < count or any(each not in (0, 1) for each in rotates):
        raise InputError(
            f"{config.name}: no_rope_layers: found {rotates!r}, expected 0 or 1 for each of {count} layers"
        )
    wanted = config.take("use_sliding_window", default=False, kind=bool)
    slides = llama.sliding_layers(config, [not each for each in rotates])
    window = size_or_missing(config, "sliding_window", None)
    section = llama.with_windows(config, section, window, [wanted and each for each in slides])
    layers = section["decoder"].setdefault("layers", {})
    for layer in (number for number, each in enumerate(rotates) if not each):
        layers[layer] = layers.get(layer, {}) | {"positions": {"kind": "none"}}
    return section


def write_smollm3(model: Model, class_name: str) -> dict[str, Any]:
    layers = layer_sections(stack_of(model, "decoder"), path="model.decoder")
    rotates = [layer.positions.kind == "rope" for layer in layers]
    return {
        **llama.write(model, class_name, table=OF_SMOLLM3),
        **llama.write_rope(layers[rotates.index(True) if any(rotates) else 0]),
        "no_rope_layers": [int(each) for each in rotates],
        "use_sliding_window": any(llama.windows_of(model)),
        **llama.written_windows(model),
    }


SMOLLM3 = replace(
    PLAIN,
    model_type="smollm3",
    classes={"SmolLM3ForCausalLM": ("lm",), "SmolLM3Model": ()},
    read=read_smollm3,
    write=write_smollm3,
    special_ids={"bos": 128000, "eos": 128001, "pad": 128004},
)
