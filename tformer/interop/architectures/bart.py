"""BART: post-norm, learned positions and a norm of the embeddings. Its classifier reads the decoder at the last `</s>`.

The classifier's decoder reads the source itself, shifted right behind `decoder_start_token_id`, so that the position of
the last real token has seen all of it.
"""

from __future__ import annotations

from typing import Any

from tformer.interop.architecture import Architecture
from tformer.interop.architectures.bart_family import (
    COPIES,
    SKIPPED,
    TABLE,
    Traits,
    body_links,
    generator_links,
    of_files,
    read_body,
    read_generator,
    write_body,
)
from tformer.interop.architectures.parts import head_dropout, pooled_links, sequence_head
from tformer.interop.config import Config
from tformer.interop.mapping import Link, link
from tformer.recipe.model import Model

TRAITS = Traits("post", learned_positions=True, embedding_norm=True)
CLASSIFIER = "BartForSequenceClassification"
NUM_LABELS = 3  # of a config that says nothing


def read(config: Config, class_name: str) -> dict[str, Any]:
    if class_name != CLASSIFIER:
        return read_generator(config, class_name, traits=TRAITS)
    config.expect("tie_word_embeddings", True)
    head = sequence_head(
        config,
        default_labels=NUM_LABELS,
        pooling="eos",
        pooler=True,
        activation="tanh",
        dropout=config.take("classifier_dropout", default=0.0, kind=float),
    )
    return read_body(config, TRAITS) | {"heads": [head]}


def write(model: Model, class_name: str) -> dict[str, Any]:
    return write_body(model, class_name) | {"classifier_dropout": head_dropout(model) or 0.0}


def links(model: Model, class_name: str) -> list[Link]:
    if class_name != CLASSIFIER:
        return generator_links(model, class_name)
    head = pooled_links(model, pooler="classification_head.dense", project="classification_head.out_proj")
    return [link("embedding.weight", TABLE, also=COPIES), *body_links(model), *head]


BART = Architecture(
    model_type="bart",
    classes={"BartForConditionalGeneration": ("lm",), CLASSIFIER: ("classifier",)},
    family="bart",
    read=read,
    write=write,
    links=links,
    prefix="model.",
    skipped=SKIPPED,
    of_files=of_files,
    undecided=("model.tie.output",),
)
