"""MPNet (2004.09297): positions counted from the padding as in RoBERTa, and T5's bias, one table for all layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tformer.interop.architecture import Architecture
from tformer.interop.architectures import bert
from tformer.interop.architectures.parts import classes_of, sequence_head, with_tasks
from tformer.interop.architectures.roberta import NAMES, skipped
from tformer.interop.config import Config
from tformer.interop.mapping import Link, link
from tformer.recipe.model import Model

OFFSET = 2  # rows before the first position: the class counts from the id 1, whatever the config says
CONFIG = replace(
    bert.CONFIG.defaulting(vocab_size=30527),
    rows=[row for row in bert.CONFIG.defaulting(vocab_size=30527).rows if row.keys != "type_vocab_size"],
    fixed={
        **bert.CONFIG.fixed,
        "encoder.positions": {"kind": "learned_t5_bias", "ids": "nonpad_cumsum", "offset": OFFSET},
    },
    expected={"relative_attention_num_buckets": 32, "pad_token_id": OFFSET - 1},
    written={"relative_attention_num_buckets": 32, "pad_token_id": OFFSET - 1},
)
LAYER = bert.LAYER | {
    "self_attention.qkv": "attention.attn.q attention.attn.k attention.attn.v",
    "self_attention.out": "attention.attn.o",
    "self_attention_norm": "attention.LayerNorm",
}


def read(config: Config, class_name: str) -> dict[str, Any]:
    values = bert.read_body(config, CONFIG)
    values["max_seq_len"] -= OFFSET
    if bert.is_classifier(class_name):
        return {**values, "heads": [sequence_head(config, activation="tanh")]}
    return {**values, "heads": [{"kind": "masked_lm", "activation": "gelu"}]}


def write(model: Model, class_name: str) -> dict[str, Any]:
    return CONFIG.write(model) | {"max_position_embeddings": model.max_seq_len + OFFSET}


NAMES = replace(NAMES, body="mpnet", layer=LAYER)


def links(model: Model, class_name: str) -> list[Link]:
    bias = link("encoder.positions.relative.weight", "mpnet.encoder.relative_attention_bias.weight")
    return [*bert.encoder_links(model, class_name, names=NAMES), bias]


PLAIN = Architecture(
    model_type="mpnet",
    classes=classes_of("MPNet", "MaskedLM", "SequenceClassification"),
    family="roberta",
    read=read,
    write=write,
    links=links,
    prefix="mpnet.",
    pooler="mpnet.pooler.dense",
    skipped=skipped("mpnet"),
    special_ids={"pad": 1, "bos": 0, "eos": 2},
    slow_tokenizer="MPNetTokenizer",
)
MPNET = with_tasks(PLAIN)
