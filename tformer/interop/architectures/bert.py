"""BERT (1810.04805): masked words, the next sentence, and classifiers on its pooled first token."""

from __future__ import annotations

from typing import Any

from tformer.interop.architecture import Architecture
from tformer.interop.architectures.bert_body import (
    LEGACY_NAMES,
    body_links,
    buffers,
    prediction_links,
    read_body,
    write_body,
)
from tformer.interop.architectures.parts import head_dropout, pooled_links, sequence_head
from tformer.interop.config import Config
from tformer.interop.mapping import Link, both
from tformer.recipe.model import Model

MASKED, CLASSIFIER = "BertForMaskedLM", "BertForSequenceClassification"


def read(config: Config, class_name: str) -> dict[str, Any]:
    config.ignore("directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers")
    config.ignore("pooler_size_per_head", "pooler_type")
    values = read_body(config)
    if class_name == CLASSIFIER:
        dropout = config.take("classifier_dropout", default=None, kind=float)
        return {**values, "heads": [sequence_head(config, activation="tanh", dropout=dropout)]}
    heads = [{"kind": "masked_lm", "activation": values["encoder"]["feedforward"]["activation"]}]
    return {**values, "heads": heads if class_name == MASKED else [*heads, {"kind": "next_sentence"}]}


def write(model: Model, class_name: str) -> dict[str, Any]:
    return write_body(model) | ({"classifier_dropout": head_dropout(model)} if class_name == CLASSIFIER else {})


def links(model: Model, class_name: str) -> list[Link]:
    if class_name == CLASSIFIER:
        return [*body_links(model, "bert"), *pooled_links(model, pooler="bert.pooler.dense", project="classifier")]
    predictions, output = "cls.predictions", "cls.predictions.decoder"
    table = body_links(model, "bert", output=output)
    table += both("heads.masked_lm.dense", f"{predictions}.transform.dense")
    table += both("heads.masked_lm.norm", f"{predictions}.transform.LayerNorm")
    table += prediction_links(model, bias=f"{predictions}.bias", output=output)
    if class_name != MASKED:
        table += both("heads.next_sentence.pooler", "bert.pooler.dense")
        table += both("heads.next_sentence.project", "cls.seq_relationship")
    return table


BERT = Architecture(
    model_type="bert",
    classes={
        "BertForPreTraining": ("masked_lm", "next_sentence"),
        MASKED: ("masked_lm",),
        CLASSIFIER: ("classifier",),
    },
    family="bert",
    read=read,
    write=write,
    links=links,
    prefix="bert.",
    renamed=LEGACY_NAMES,
    skipped=(
        buffers("bert"),
        r"bert\.pooler\.dense\.(weight|bias)",
        r"cls\.seq_relationship\.(weight|bias)",
        r"cls\.predictions\.(bias|(decoder|transform\.(dense|LayerNorm))\.(weight|bias))",
    ),
)
