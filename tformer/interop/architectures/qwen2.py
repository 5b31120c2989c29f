"""Qwen2: Llama with biases on queries, keys and values only, and sliding windows that are off by default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tformer.interop.architecture import Architecture
from tformer.interop.architectures import llama
from tformer.interop.architectures.parts import refuse_short_window, size_or_missing
from tformer.interop.config import Config
from tformer.recipe.model import Model

MISSING: Mapping[str, int | None] = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
}
MISSING_WINDOW = 4096
MISSING_FULL_LAYERS = 28  # default number of first layers without a window


def read(config: Config, class_name: str) -> dict[str, Any]:
    values = llama.read_body(config, MISSING, qkv_bias=True, out_bias=False, mlp_bias=False)
    window = size_or_missing(config, "sliding_window", MISSING_WINDOW)
    wanted = config.take("use_sliding_window", default=False, kind=bool)
    full = config.take("max_window_layers", default=MISSING_FULL_LAYERS)
    kinds = config.take("layer_types", default=[], kind=list)
    slides = set(kinds) != {"full_attention"} if kinds else wanted and values["decoder"]["num_layers"] > full
    if slides:
        refuse_short_window(config, window, values["max_seq_len"])
    return values


def write(model: Model, class_name: str) -> dict[str, Any]:
    return {**llama.write_body(model), "use_sliding_window": False, "sliding_window": None}


QWEN2 = Architecture(
    model_type="qwen2",
    classes={"Qwen2ForCausalLM": ("lm",)},
    family="llama",
    read=read,
    write=write,
    links=llama.links,
    prefix=llama.PREFIX,
    skipped=llama.SKIPPED,
    own_tokenizer_rules=True,
)
