"""LED (2004.05150, section 7): BART whose encoder has Longformer's windows and global tokens, and more positions.

The first token of a source is global, as users of the class ask for by `global_attention_mask`. The tables of positions
have a length for each side and no unused rows.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from tformer.interop.architectures import bart
from tformer.interop.architectures.longformer import global_links, window_per_layer, with_windows
from tformer.interop.architectures.table import ConfigKey
from tformer.interop.config import Config
from tformer.interop.mapping import Link
from tformer.interop.weight_files import WeightFiles
from tformer.recipe.model import Model

CONFIG = bart.body("post", {"kind": "learned"}, embedding_norm=True, ignored=("attention_dropout_prob",))
CONFIG = replace(
    CONFIG,
    rows=(
        *(row for row in CONFIG.rows if row.keys not in ("max_position_embeddings", "scale_embedding")),
        ConfigKey("max_encoder_position_embeddings", "max_seq_len", 16384),
        ConfigKey("max_decoder_position_embeddings", "max_target_len", 1024),
    ),
)
PARTS = {"q_proj": "longformer_self_attn.query", "k_proj": "longformer_self_attn.key"}
PARTS |= {"v_proj": "longformer_self_attn.value", "out_proj": "output"}


def read(config: Config, class_name: str) -> dict[str, Any]:
    values = bart.read_generator(config, class_name, table=CONFIG)
    return values | {"encoder": with_windows(config, values["encoder"], global_tokens=1)}


def write(model: Model, class_name: str) -> dict[str, Any]:
    return CONFIG.write(model) | {"attention_window": window_per_layer(model)}


def in_led(name: str) -> str:
    """The name in LED's files of a tensor of BART's."""
    name = re.sub(r"(encoder\.layers\.\d+\.self_attn)\.(\w+)", lambda found: f"{found[1]}.{PARTS[found[2]]}", name)
    return re.sub(r"^model\.", "led.", name)


def links(model: Model, class_name: str) -> list[Link]:
    table = [
        replace(one, theirs=tuple(map(in_led, one.theirs)), also=tuple(map(in_led, one.also)))
        for one in bart.generator_links(model, class_name)
    ]
    return table + global_links(model, "led.encoder.layers.{}.self_attn.longformer_self_attn")


def of_files(section: dict[str, Any], files: WeightFiles) -> dict[str, Any]:
    return section | {"heads": [{"kind": "lm", "bias": bart.LOGITS_BIAS in files.specs}]}


def differs(model: Model) -> list[str]:
    return ["the first token of a source is global here; transformers makes it so by global_attention_mask only"]


LED = replace(
    bart.PLAIN,
    model_type="led",
    classes={"LEDForConditionalGeneration": ("lm",), "LEDModel": ()},
    read=read,
    write=write,
    links=links,
    prefix="led.",
    skipped=tuple(pattern.replace("model", "led") for pattern in bart.SKIPPED),
    of_files=of_files,
    undecided=(),
    differs=differs,
    special_ids={"pad": 1, "bos": 0, "eos": 2, "decoder_start": 2},
    slow_tokenizer="LEDTokenizer",
    ctranslate2=None,
)
