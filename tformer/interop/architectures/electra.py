"""ELECTRA (2003.10555): the discriminator that finds replaced tokens, the generator that replaced them, classifiers.

Embeddings may be narrower than the layers; `embeddings_project` then leads up, and the generator's head down again.
"""

from __future__ import annotations

from typing import Any

from tformer.interop.architecture import Architecture
from tformer.interop.architectures import bert
from tformer.interop.architectures.bert import is_classifier
from tformer.interop.architectures.parts import with_tasks
from tformer.interop.config import Config
from tformer.interop.mapping import Link, both
from tformer.recipe.model import Model
from tformer.support.errors import InputError

MASKED = "ElectraForMaskedLM"
SMALL = bert.CONFIG.defaulting(hidden_size=256, num_attention_heads=4, intermediate_size=1024)


def read(config: Config, class_name: str) -> dict[str, Any]:
    config.ignore("summary_activation", "summary_last_dropout", "summary_type", "summary_use_proj")  # multiple choice
    values = bert.read_body(config, SMALL)
    size = config.size("embedding_size", default=128)
    values["embedding"]["size"] = None if size == values["d_model"] else size
    if is_classifier(class_name):
        return {**values, "heads": [bert.classifier_head(config, "gelu")]}
    if class_name != MASKED:
        activation = values["encoder"]["feedforward"]["activation"]
        return {**values, "heads": [{"kind": "replaced_token", "activation": activation}]}
    if values["embedding"]["size"] is not None and not values["tie"]["output"]:
        raise InputError(
            f"{config.name}: tie_word_embeddings: found False with embedding_size {size} and hidden_size "
            f"{values['d_model']}, tformer has an output as narrow as the embeddings only where it is tied to them"
        )
    return {**values, "heads": [{"kind": "masked_lm", "activation": "gelu"}]}


def write(model: Model, class_name: str) -> dict[str, Any]:
    size = model.d_model if model.embedding.size is None else model.embedding.size
    return bert.write(model, class_name) | {"embedding_size": size}


NAMES = bert.Names(
    "electra",
    dense="generator_predictions.dense",
    norm="generator_predictions.LayerNorm",
    output="generator_lm_head",
    bias="",
    pooler="classifier.dense",
    project="classifier.out_proj",
)


def links(model: Model, class_name: str) -> list[Link]:
    narrow = model.embedding.size not in (None, model.d_model)
    return [
        *bert.encoder_links(model, class_name, names=NAMES),
        *(both("embedding.project", "electra.embeddings_project") if narrow else []),
        *both("heads.replaced_token.dense", "discriminator_predictions.dense"),
        *both("heads.replaced_token.project", "discriminator_predictions.dense_prediction"),
    ]


PLAIN = Architecture(
    model_type="electra",
    classes={
        "ElectraForPreTraining": ("replaced_token",),
        MASKED: ("masked_lm",),
        "ElectraForSequenceClassification": ("classifier",),
        "ElectraModel": (),
    },
    family="electra",
    read=read,
    write=write,
    links=links,
    prefix="electra.",
    renamed=bert.LEGACY_NAMES,
    skipped=(
        bert.buffers("electra"),
        r"discriminator_predictions\.(dense|dense_prediction)\.(weight|bias)",
        r"generator_(lm_head|predictions\.(dense|LayerNorm))\.(weight|bias)",
    ),
    special_ids={"pad": 0},
    slow_tokenizer="BertTokenizer",
)
ELECTRA = with_tasks(PLAIN, dropouts={"token_classifier": ("classifier_dropout", None)})
