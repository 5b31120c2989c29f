"""ALBERT (1909.11942): BERT with narrow embeddings, and layers that share their weights by groups."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tformer.interop.architecture import Architecture
from tformer.interop.architectures import bert
from tformer.interop.architectures.parts import classes_of, head_dropout, sequence_head, stack_of, with_tasks
from tformer.interop.architectures.table import ConfigKey
from tformer.interop.config import Config
from tformer.interop.mapping import Link, both
from tformer.recipe.model import Model
from tformer.support.errors import InputError

MASKED = "AlbertForMaskedLM"
BASE = bert.CONFIG.defaulting(
    **{"vocab_size": 30000, "hidden_size": 4096, "num_attention_heads": 64, "intermediate_size": 16384},
    **{"hidden_act": "gelu_new", "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
)
CONFIG = replace(
    BASE,
    rows=(
        *BASE.rows,
        ConfigKey("embedding_size", "embedding.size", 128),
        ConfigKey("num_hidden_groups", "encoder.layer_groups", 1),
    ),
    expected={**BASE.expected, "inner_group_num": 1},
    ignored=("down_scale_factor", "gap_size", "net_structure_type", "num_memory_blocks"),
)
LAYER = {
    "self_attention.qkv": "attention.query attention.key attention.value",
    "self_attention.out": "attention.dense",
    "self_attention_norm": "attention.LayerNorm",
    "feedforward.up": "ffn",
    "feedforward.down": "ffn_output",
    "feedforward_norm": "full_layer_layer_norm",
}


def read(config: Config, class_name: str) -> dict[str, Any]:
    values = bert.read_body(config, CONFIG)
    if values["embedding"]["size"] == values["d_model"] or not values["tie"]["output"]:
        raise InputError(
            f"{config.name}: embedding_size: found {values['embedding']['size']} beside hidden_size "
            f"{values['d_model']} and tie_word_embeddings {values['tie']['output']}, tformer has this class with "
            "embeddings narrower than the layers, to which the output is tied"
        )
    if bert.is_classifier(class_name):
        dropout = config.take("classifier_dropout_prob", default=0.1, kind=float)
        return {**values, "heads": [sequence_head(config, activation="tanh", dropout=dropout)]}
    config.ignore("classifier_dropout_prob")
    heads = [{"kind": "masked_lm", "activation": values["encoder"]["feedforward"]["activation"]}]
    return {**values, "heads": heads if class_name == MASKED else [*heads, {"kind": "next_sentence"}]}


def write(model: Model, class_name: str) -> dict[str, Any]:
    stack, dropout = stack_of(model, "encoder"), head_dropout(model)
    values = CONFIG.write(model) | {
        "type_vocab_size": model.embedding.token_types or bert.NO_TYPES,
        "embedding_size": model.embedding.size or model.d_model,
        "num_hidden_groups": stack.layer_groups or stack.num_layers,
        "inner_group_num": 1,
    }
    return values | ({} if dropout is None else {"classifier_dropout_prob": dropout})


NAMES = bert.Names(
    "albert",
    layers="encoder.albert_layer_groups",
    layer={module: " ".join(f"albert_layers.0.{name}" for name in names.split()) for module, names in LAYER.items()},
    dense="predictions.dense",
    norm="predictions.LayerNorm",
    output="predictions.decoder",
    bias="predictions.bias",
    pooler="albert.pooler",
    sentences=("albert.pooler", "sop_classifier.classifier"),
)


def links(model: Model, class_name: str) -> list[Link]:
    narrow = both("embedding.project", "albert.encoder.embedding_hidden_mapping_in")
    return [*bert.encoder_links(model, class_name, names=NAMES), *narrow]


PLAIN = Architecture(
    model_type="albert",
    classes=classes_of("Albert", "PreTraining", "MaskedLM", "SequenceClassification"),
    family="bert",
    read=read,
    write=write,
    links=links,
    prefix="albert.",
    pooler="albert.pooler",
    skipped=(
        bert.buffers("albert"),
        r"(albert\.pooler|sop_classifier\.classifier)\.(weight|bias)",
        r"predictions\.(bias|(dense|LayerNorm|decoder)\.(weight|bias))",
    ),
    special_ids={"pad": 0, "bos": 2, "eos": 3},
    slow_tokenizer="AlbertTokenizer",
)
ALBERT = with_tasks(PLAIN, dropouts={"token_classifier": ("classifier_dropout_prob", 0.1)})
