"""BERT, and the config keys and layer weights that RoBERTa and ELECTRA share with it.

    token + type + position -> norm -> layers of (attention, norm, feed-forward, norm), post-norm

BERT (1810.04805) and RoBERTa (1907.11692) differ in where positions begin, ELECTRA (2003.10555) in the width of its
embeddings; their heads are in their own files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tformer.interop.architecture import Architecture
from tformer.interop.architectures.parts import (
    TASKS,
    classes_of,
    head_dropout,
    layer_links,
    pooled_links,
    sequence_head,
    stack_of,
    with_tasks,
)
from tformer.interop.architectures.table import ConfigKey, ConfigTable
from tformer.interop.config import Config
from tformer.interop.mapping import SAME, Link, TensorLayout, both, link
from tformer.recipe.model import Model
from tformer.support.errors import InputError

CONFIG = ConfigTable(
    rows=(
        ConfigKey("vocab_size", "vocab_size", 30522),
        ConfigKey("hidden_size", "d_model", 768),
        ConfigKey("num_hidden_layers", "encoder.num_layers", 12),
        ConfigKey("num_attention_heads", "encoder.num_heads", 12),
        ConfigKey("intermediate_size", "encoder.feedforward.d_ff", 3072),
        ConfigKey("max_position_embeddings", "max_seq_len", 512),
        ConfigKey("type_vocab_size", "embedding.token_types", 2),
        ConfigKey("hidden_act", "encoder.feedforward.activation", "gelu"),
        ConfigKey("layer_norm_eps", "encoder.norm.eps", 1e-12),
        ConfigKey("hidden_dropout_prob", "encoder.dropout embedding.dropout", 0.1),
        ConfigKey("attention_probs_dropout_prob", "encoder.attention_dropout", 0.1),
        ConfigKey("tie_word_embeddings", "tie.output", True),
    ),
    fixed={
        "embedding.norm": True,
        "encoder.positions.kind": "learned",
        "encoder.norm.place": "post",
        "encoder.final_norm": False,
    },
    expected={"position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False},
)
"""The section without heads. `max_seq_len` is the number of rows of the position table."""

LEGACY_NAMES = ((r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias"))
"""Names of gain and bias in files converted from the first TensorFlow release."""

NO_TYPES = 2
"""Rows of zeros written for a model without token types, because these classes always have them."""

TWICE = TensorLayout(join=lambda parts: parts[0], split=lambda ours: (ours, ours.clone()))
"""One tensor under two names; where they differ, the model computes with the first."""


LAYER = {
    "self_attention.qkv": "attention.self.query attention.self.key attention.self.value",
    "self_attention.out": "attention.output.dense",
    "self_attention_norm": "attention.output.LayerNorm",
    "feedforward.up": "intermediate.dense",
    "feedforward.down": "output.dense",
    "feedforward_norm": "output.LayerNorm",
}


def read_body(config: Config, table: ConfigTable = CONFIG) -> dict[str, Any]:
    """The `model` section without heads."""
    section = table.read(config)
    refuse_odd_heads(config, "num_attention_heads", section["encoder"]["num_heads"], section["d_model"])
    return section


def refuse_odd_heads(config: Config, key: str, heads: int, width: int) -> None:
    """Raise InputError unless the width is a multiple of the number of heads: no key states the head size."""
    if width % heads:
        raise InputError(f"{config.name}: {key}: found {heads}, expected a divisor of the width {width}")


def write(model: Model, class_name: str) -> dict[str, Any]:
    """The keys of BERT, RoBERTa and ELECTRA."""
    values = CONFIG.write(model) | {"type_vocab_size": model.embedding.token_types or NO_TYPES}
    return values | ({"classifier_dropout": head_dropout(model)} if is_classifier(class_name) else {})


def is_classifier(class_name: str) -> bool:
    return class_name.endswith("ForSequenceClassification")


def classifier_head(config: Config, activation: str) -> dict[str, Any]:
    return sequence_head(
        config, activation=activation, dropout=config.take("classifier_dropout", default=None, kind=float)
    )


@dataclass(frozen=True)
class Names:
    """Names of the modules in the files of an encoder that is built as BERT.

    body: the prefix of all but the heads. layers: without their number; layer: see `layer_links`.
    dense, norm, output: of the masked language model; bias: beside the projection; "": the projection alone has one.
    pooler, project: of a classifier. sentences: the same of the prediction of the next sentence.
    """

    body: str
    layers: str = "encoder.layer"
    layer: Mapping[str, str] = field(default_factory=lambda: LAYER)
    dense: str = "cls.predictions.transform.dense"
    norm: str = "cls.predictions.transform.LayerNorm"
    output: str = "cls.predictions.decoder"
    bias: str = "cls.predictions.bias"
    pooler: str = "pooler.dense"
    project: str = "classifier"
    sentences: tuple[str, str] | None = None


def encoder_links(model: Model, class_name: str, *, names: Names) -> list[Link]:
    """Links of embeddings, layers and heads."""
    tables, classifies = f"{names.body}.embeddings", is_classifier(class_name)
    also = [f"{names.output}.weight"] if model.tie.output and not classifies else []
    table = [link("embedding.weight", f"{tables}.word_embeddings.weight", also=also)]
    if model.embedding.token_types:
        table.append(link("embedding.token_types", f"{tables}.token_type_embeddings.weight"))
    if stack_of(model, "encoder").positions.kind != "none":
        table.append(link("encoder.positions.weight", f"{tables}.position_embeddings.weight"))
    table += both("embedding.norm", f"{tables}.LayerNorm")
    table += layer_links(model, "encoder", f"{names.body}.{names.layers}", names.layer)
    if classifies:
        return [*table, *pooled_links(model, pooler=names.pooler, project=names.project)]
    table += [*both("heads.masked_lm.dense", names.dense), *both("heads.masked_lm.norm", names.norm)]
    if names.sentences is not None:
        pooler, project = names.sentences
        table += [*both("heads.next_sentence.pooler", pooler), *both("heads.next_sentence.project", project)]
    return table + prediction_links(model, bias=names.bias, output=names.output)


def buffers(body: str) -> str:
    """The pattern of buffers in older files: position ids and token type ids."""
    return rf"{body}\.embeddings\.(position_ids|token_type_ids)"


def prediction_links(model: Model, *, bias: str, output: str) -> list[Link]:
    """The projection to the vocabulary, whose bias BERT's and RoBERTa's classes have twice.

    The two are tied together with the embeddings. Where nothing is tied they compute with the projection's own, and the
    other lies idle.

    Args:
        bias: the name of the bias beside the projection; "": there is none.
        output: of the projection, which has its own bias.
    """
    if model.tie.output:
        return [link("heads.masked_lm.bias", bias or f"{output}.bias", also=[f"{output}.bias"] if bias else [])]
    return [
        link("heads.masked_lm.weight", f"{output}.weight"),
        link(
            "heads.masked_lm.bias",
            f"{output}.bias",
            *([bias] if bias else []),
            layout=TWICE if bias else SAME,
        ),
    ]


MASKED = "BertForMaskedLM"


def read(config: Config, class_name: str) -> dict[str, Any]:
    config.ignore("directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers")
    config.ignore("pooler_size_per_head", "pooler_type")
    values = read_body(config)
    if is_classifier(class_name):
        return {**values, "heads": [classifier_head(config, "tanh")]}
    heads = [{"kind": "masked_lm", "activation": values["encoder"]["feedforward"]["activation"]}]
    return {**values, "heads": heads if class_name == MASKED else [*heads, {"kind": "next_sentence"}]}


NAMES = Names("bert", pooler="bert.pooler.dense", sentences=("bert.pooler.dense", "cls.seq_relationship"))
PLAIN = Architecture(
    model_type="bert",
    classes=classes_of("Bert", "PreTraining", "MaskedLM", "SequenceClassification"),
    family="bert",
    read=read,
    write=write,
    links=partial(encoder_links, names=NAMES),
    prefix="bert.",
    pooler="bert.pooler.dense",
    renamed=LEGACY_NAMES,
    skipped=(
        buffers("bert"),
        r"bert\.pooler\.dense\.(weight|bias)",
        r"cls\.seq_relationship\.(weight|bias)",
        r"cls\.predictions\.(bias|(decoder|transform\.(dense|LayerNorm))\.(weight|bias))",
    ),
    special_ids={"pad": 0},
    slow_tokenizer="BertTokenizer",
)
BERT = with_tasks(
    PLAIN,
    dropouts=dict.fromkeys(("token_classifier", "multiple_choice"), ("classifier_dropout", None)),
    tasks=TASKS,
)
