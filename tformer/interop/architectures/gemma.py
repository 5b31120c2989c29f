"""Gemma 1, 2 and 3 (texts): Llama with gains 1 + w, token vectors times the rounded sqrt(D), and GELU's tanh form.

    Gemma 1  `hidden_act: gelu` means the tanh form too, as in the files of its release
    Gemma 2  norms before and after each sublayer, soft caps of scores and logits, windows in every second layer
    Gemma 3  norms of queries and keys with gains 1 + w, windows in five of six layers, whose base of rotary positions
             is another; no caps if the keys are missing

`query_pre_attn_scalar` s means the factor 1 / sqrt(s) of the scores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from tformer.build import resolve_sizes
from tformer.interop.architecture import Gguf
from tformer.interop.architectures import llama
from tformer.interop.architectures.parts import size_or_missing, stack_of
from tformer.interop.architectures.table import ConfigKey, ConfigTable
from tformer.interop.config import Config
from tformer.nn.heads import LmHeadOptions
from tformer.recipe.model import Model, layer_sections
from tformer.support.errors import InputError

NORM = {"kind": "rmsnorm", "place": "pre", "unit_offset": True}
SIZES = {"vocab_size": 256000, "hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 28}
SIZES |= {"num_attention_heads": 16, "head_dim": 256}
OF_GEMMA = ConfigTable(
    (*llama.ROWS, llama.BIAS),
    llama.FIXED | {"embedding.scale": "rounded", "decoder.norm": NORM},
    expected={"use_bidirectional_attention": (None, False)},
    ignored=("hidden_activation",),
).defaulting(**SIZES, hidden_act="gelu_pytorch_tanh", max_position_embeddings=8192, tie_word_embeddings=True)
OF_GEMMA2 = replace(
    OF_GEMMA,
    rows=[replace(row, keys="hidden_activation") if row.keys == "hidden_act" else row for row in OF_GEMMA.rows],
    fixed={**OF_GEMMA.fixed, "decoder.norm": NORM | {"place": "sandwich"}},
    ignored=("hidden_act", "cache_implementation"),
).defaulting(hidden_size=2304, intermediate_size=9216, num_hidden_layers=26, num_attention_heads=8)
OF_GEMMA3 = replace(
    OF_GEMMA2,
    rows=(ConfigKey("rms_norm_eps", "decoder.attention.qk_norm_eps", 1e-6), *OF_GEMMA2.rows),
    fixed={**OF_GEMMA2.fixed, "decoder.attention.qk_norm": "unit_offset"},
    ignored=("hidden_act", "cache_implementation", "_sliding_window_pattern"),
).defaulting(vocab_size=262208, max_position_embeddings=131072)


def read_gemma(config: Config, class_name: str) -> dict[str, Any]:
    section = llama.read(config, class_name, table=OF_GEMMA, kv_heads=16)
    if section["decoder"]["feedforward"]["activation"] == "gelu":
        section["decoder"]["feedforward"]["activation"] = "gelu_tanh"
    return section


def read_later(config: Config, *, caps: Sequence[float | None], **options: Any) -> dict[str, Any]:
    """The model section of Gemma 2 or 3 without windows. caps: of scores and of logits, where the keys are missing."""
    section = llama.read(config, "", kv_heads=4, **options)
    cap, last_cap = (
        config.take(key, default=None, kind=float) if key in config.values else missing
        for key, missing in zip(("attn_logit_softcapping", "final_logit_softcapping"), caps, strict=True)
    )
    scalar = config.positive("query_pre_attn_scalar", default=256)
    section["decoder"]["attention"] |= {"scale": scalar**-0.5, "softcap": cap}
    return section | {"heads": [{"kind": "lm", "softcap": last_cap}]}


def read_gemma2(config: Config, class_name: str) -> dict[str, Any]:
    section = read_later(config, table=OF_GEMMA2, caps=(50.0, 30.0))
    slides = llama.sliding_layers(config, [layer % 2 == 0 for layer in range(section["decoder"]["num_layers"])])
    return llama.with_windows(config, section, size_or_missing(config, "sliding_window", llama.MISSING_WINDOW), slides)


def with_rope_of(config: Config, section: dict[str, Any], *, kind: str) -> dict[str, Any]:
    """The section with the positions of a kind of layer: newer files have them by kind, older ones in three keys."""
    newer = config.take("rope_parameters", default={}, kind=dict)
    scaling = config.take("rope_scaling", default={}, kind=dict)
    bases = {
        llama.FULL: config.take("rope_theta", default=1e6, kind=float),
        llama.SLIDING: config.take("rope_local_base_freq", default=1e4, kind=float),
    }
    if unknown := newer.keys() - bases.keys():
        raise InputError(f"{config.name}: rope_parameters: found {min(unknown)}, expected {' and '.join(bases)}")
    own = Config(newer, name=f"{config.name}: rope_parameters").take(kind, default={}, kind=dict)
    values = {"rope_theta": bases[kind], **own, **(scaling if kind == llama.FULL else {})}
    return llama.with_rope(Config({"rope_parameters": values}, name=config.name), section)


def read_gemma3(config: Config, class_name: str) -> dict[str, Any]:
    section = read_later(config, table=OF_GEMMA3, caps=(None, None), rope=partial(with_rope_of, kind=llama.FULL))
    pattern, layers = config.size("sliding_window_pattern", default=6), section["decoder"]["num_layers"]
    slides = llama.sliding_layers(config, [(layer + 1) % pattern > 0 for layer in range(layers)])
    window = config.size("sliding_window", default=llama.MISSING_WINDOW)
    local = with_rope_of(config, section, kind=llama.SLIDING)["decoder"]["positions"]
    return llama.with_windows(config, section, window, slides, positions={"scaling": None} | local)


def write_later(model: Model, class_name: str, *, table: ConfigTable) -> dict[str, Any]:
    first = layer_sections(stack_of(model, "decoder"), path="model.decoder")[0]
    caps = [head.softcap for head in model.heads if isinstance(head, LmHeadOptions)]
    scale, windows = first.attention.scale, llama.written_windows(model)
    return {
        **llama.write(model, class_name, table=table),
        **windows,
        "sliding_window": windows["sliding_window"] or llama.MISSING_WINDOW,  # the class wants one
        "query_pre_attn_scalar": resolve_sizes(model, "decoder").head_dim if scale == "auto" else round(scale**-2),
        "attn_logit_softcapping": first.attention.softcap,
        "final_logit_softcapping": caps[0] if caps else None,
    }


def write_gemma3(model: Model, class_name: str) -> dict[str, Any]:
    keys = write_later(model, class_name, table=OF_GEMMA3)
    layers = layer_sections(stack_of(model, "decoder"), path="model.decoder")
    ropes = {kind: llama.write_rope(layer) for kind, layer in zip(keys["layer_types"], layers, strict=True)}
    of_kind = {kind: rope["rope_parameters"] for kind, rope in ropes.items()}
    older = {"rope_local_base_freq": ropes[llama.SLIDING]["rope_theta"]} if llama.SLIDING in ropes else {}
    return keys | ropes.get(llama.FULL, {}) | older | {"rope_parameters": of_kind}


def gains(model: Model, name: str, tensor: Tensor, *, more: float = 1.0) -> Tensor:
    """The tensor as a GGUF file has it: gains 1 + w in place of w. more: -1 for the inverse."""
    return tensor + more if name.endswith("norm.weight") else tensor


def assumed(config: Mapping[str, Any], *, largest: int = 0) -> dict[str, Any]:
    """Keys that llama.cpp assumes. largest: number of layers of the size whose scores have another factor; 0: none."""
    width, heads = config["hidden_size"], config["num_attention_heads"]
    scalar = width // heads if config["num_hidden_layers"] == largest else config["head_dim"]
    return {"tie_word_embeddings": True} | ({"query_pre_attn_scalar": scalar} if largest else {})


IN_GGUF = Gguf("gemma", llama.GGUF_KEYS, gains, partial(gains, more=-1.0), assumed)
GEMMA = replace(
    llama.LLAMA,
    model_type="gemma",
    classes={"GemmaForCausalLM": ("lm",), "GemmaModel": ()},
    read=read_gemma,
    write=partial(llama.write, table=OF_GEMMA),
    special_ids={"pad": 0, "eos": 1, "bos": 2},
    slow_tokenizer=None,
    ctranslate2=None,
    gguf=IN_GGUF,
)
LATER_KEYS = llama.GGUF_KEYS | {
    "attention.sliding_window": "sliding_window",
    "final_logit_softcapping": "final_logit_softcapping",
}
OUTPUT_NORMS = {
    "self_attention_out_norm": "post_attention_layernorm",
    "feedforward_norm": "pre_feedforward_layernorm",
    "feedforward_out_norm": "post_feedforward_layernorm",
}
GEMMA2 = replace(
    GEMMA,
    model_type="gemma2",
    classes={"Gemma2ForCausalLM": ("lm",), "Gemma2Model": ()},
    read=read_gemma2,
    write=partial(write_later, table=OF_GEMMA2),
    links=partial(llama.links, layer=llama.LAYER | OUTPUT_NORMS),
    ctranslate2=lambda config: {
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "query_pre_attn_scalar": config["head_dim"],
    },
    gguf=replace(
        IN_GGUF,
        name="gemma2",
        keys=LATER_KEYS | {"attn_logit_softcapping": "attn_logit_softcapping"},
        assumed=partial(assumed, largest=46),
    ),
)
GEMMA3 = replace(
    GEMMA2,
    model_type="gemma3_text",
    classes={"Gemma3ForCausalLM": ("lm",), "Gemma3TextModel": ()},
    read=read_gemma3,
    write=write_gemma3,
    ctranslate2=None,
    gguf=replace(
        IN_GGUF,
        name="gemma3",
        keys=LATER_KEYS | {"rope.freq_base_swa": "rope_local_base_freq"},
        assumed=lambda config: (
            assumed(config, largest=62)
            | ({} if "sliding_window" in config else {"layer_types": [llama.FULL] * config["num_hidden_layers"]})
        ),
    ),
)
