"""ELECTRA (2003.10555): the discriminator that finds replaced tokens, the generator that replaced them, classifiers.

Embeddings may be narrower than the layers; `embeddings_project` then leads up, and the generator's head down again.
"""

from __future__ import annotations

from typing import Any

from tformer.interop.architecture import Architecture
from tformer.interop.architectures.bert import CONFIG, LEGACY_NAMES, body_links, buffers, read_body, write_body
from tformer.interop.architectures.parts import head_dropout, pooled_links, sequence_head
from tformer.interop.config import Config
from tformer.interop.mapping import Link, both, link
from tformer.recipe.model import Model
from tformer.support.errors import InputError

MASKED, CLASSIFIER = "ElectraForMaskedLM", "ElectraForSequenceClassification"
SMALL = CONFIG.defaulting(hidden_size=256, num_attention_heads=4, intermediate_size=1024)


def read(config: Config, class_name: str) -> dict[str, Any]:
    config.ignore("summary_activation", "summary_last_dropout", "summary_type", "summary_use_proj")  # multiple choice
    values = read_body(config, SMALL)
    size = config.size("embedding_size", default=128)
    values["embedding"]["size"] = None if size == values["d_model"] else size
    if class_name == CLASSIFIER:
        dropout = config.take("classifier_dropout", default=None, kind=float)
        return {**values, "heads": [sequence_head(config, activation="gelu", dropout=dropout)]}
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
    values = write_body(model) | {"embedding_size": size}
    return values | ({"classifier_dropout": head_dropout(model)} if class_name == CLASSIFIER else {})


def links(model: Model, class_name: str) -> list[Link]:
    output = "generator_lm_head"
    table = body_links(model, "electra", output=output if class_name == MASKED else None)
    if model.embedding.size not in (None, model.d_model):
        table += both("embedding.project", "electra.embeddings_project")
    if class_name == CLASSIFIER:
        return [*table, *pooled_links(model, pooler="classifier.dense", project="classifier.out_proj")]
    if class_name != MASKED:
        table += both("heads.replaced_token.dense", "discriminator_predictions.dense")
        return [*table, *both("heads.replaced_token.project", "discriminator_predictions.dense_prediction")]
    table += both("heads.masked_lm.dense", "generator_predictions.dense")
    table += both("heads.masked_lm.norm", "generator_predictions.LayerNorm")
    table.append(link("heads.masked_lm.bias", f"{output}.bias"))
    return table if model.tie.output else [*table, link("heads.masked_lm.weight", f"{output}.weight")]


ELECTRA = Architecture(
    model_type="electra",
    classes={
        "ElectraForPreTraining": ("replaced_token",),
        MASKED: ("masked_lm",),
        CLASSIFIER: ("classifier",),
        "ElectraModel": (),
    },
    family="electra",
    read=read,
    write=write,
    links=links,
    prefix="electra.",
    renamed=LEGACY_NAMES,
    skipped=(
        buffers("electra"),
        r"discriminator_predictions\.(dense|dense_prediction)\.(weight|bias)",
        r"generator_(lm_head|predictions\.(dense|LayerNorm))\.(weight|bias)",
    ),
    special_ids={"pad": 0},
    slow_tokenizer="BertTokenizer",
)
