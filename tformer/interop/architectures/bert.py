"""BERT, and the config keys and layer weights that RoBERTa and ELECTRA share with it.

    token + type + position -> norm -> layers of (attention, norm, feed-forward, norm), post-norm

BERT (1810.04805) and RoBERTa (1907.11692) differ in where positions begin, ELECTRA (2003.10555) in the width of its
embeddings; their heads are in their own files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tformer.interop.architecture import Architecture
from tformer.interop.architectures.parts import (
    ACTIVATIONS,
    activation_name,
    d_ff_of,
    head_dropout,
    pooled_links,
    sequence_head,
    stack_of,
)
from tformer.interop.config import Config
from tformer.interop.mapping import Layout, Link, both, fused, link
from tformer.recipe.model import Model
from tformer.support.errors import InputError

DEFAULTS: Mapping[str, int] = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
}

LEGACY_NAMES = ((r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias"))
"""Names of gain and bias in files converted from the first TensorFlow release."""

NO_TYPES = 2
"""Rows of zeros written for a model without token types, because these classes always have them."""

TWICE = Layout(join=lambda parts: parts[0], split=lambda ours: (ours, ours.clone()))
"""One tensor under two names; where they differ, the model computes with the first."""


def read_body(config: Config, *, defaults: Mapping[str, int] = DEFAULTS) -> dict[str, Any]:
    """The `model` section without heads. `max_seq_len` is the number of rows of the position table."""
    config.expect("position_embedding_type", "absolute")
    config.expect("is_decoder", False)
    config.expect("add_cross_attention", False)
    sizes = {key: config.size(key, default=default) for key, default in defaults.items()}
    refuse_odd_heads(config, "num_attention_heads", sizes["num_attention_heads"], sizes["hidden_size"])
    dropout = config.take("hidden_dropout_prob", default=0.1, kind=float)
    stack = {
        "num_layers": sizes["num_hidden_layers"],
        "num_heads": sizes["num_attention_heads"],
        "positions": {"kind": "learned"},
        "feedforward": {
            "d_ff": sizes["intermediate_size"],
            "activation": config.choose("hidden_act", ACTIVATIONS, default="gelu"),
        },
        "norm": {"place": "post", "eps": config.take("layer_norm_eps", default=1e-12, kind=float)},
        "final_norm": False,
        "dropout": dropout,
        "attention_dropout": config.take("attention_probs_dropout_prob", default=0.1, kind=float),
    }
    return {
        "d_model": sizes["hidden_size"],
        "max_seq_len": sizes["max_position_embeddings"],
        "vocab_size": sizes["vocab_size"],
        "embedding": {"norm": True, "token_types": sizes["type_vocab_size"], "dropout": dropout},
        "tie": {"output": config.take("tie_word_embeddings", default=True, kind=bool)},
        "encoder": stack,
    }


def refuse_odd_heads(config: Config, key: str, heads: int, width: int) -> None:
    """Raise InputError unless the width is a multiple of the number of heads: no key states the head size."""
    if width % heads:
        raise InputError(f"{config.name}: {key}: found {heads}, expected a divisor of the width {width}")


def write_body(model: Model) -> dict[str, Any]:
    encoder = stack_of(model, "encoder")
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.d_model,
        "num_hidden_layers": encoder.num_layers,
        "num_attention_heads": encoder.num_heads,
        "intermediate_size": d_ff_of(model, encoder),
        "hidden_act": activation_name(encoder.feedforward.activation),
        "hidden_dropout_prob": encoder.dropout,
        "attention_probs_dropout_prob": encoder.attention_dropout,
        "max_position_embeddings": model.max_seq_len,
        "type_vocab_size": model.embedding.token_types or NO_TYPES,
        "layer_norm_eps": encoder.norm.eps,
        "tie_word_embeddings": model.tie.output,
    }


def body_links(model: Model, body: str, *, output: str | None = None) -> list[Link]:
    """Links of the embeddings and layers.

    Args:
        body: the name of the body on disk (`bert`).
        output: of the projection to the vocabulary, if the class has one; a tied file may repeat the embeddings there.
    """
    tables = f"{body}.embeddings"
    also = [f"{output}.weight"] if output and model.tie.output else []
    table = [
        link("embedding.weight", f"{tables}.word_embeddings.weight", also=also),
        link("embedding.token_types", f"{tables}.token_type_embeddings.weight"),
        link("encoder.positions.weight", f"{tables}.position_embeddings.weight"),
        *both("embedding.norm", f"{tables}.LayerNorm"),
    ]
    for layer in range(stack_of(model, "encoder").num_layers):
        ours, theirs = f"encoder.blocks.{layer}", f"{body}.encoder.layer.{layer}"
        parts = [f"{theirs}.attention.self.{part}" for part in ("query", "key", "value")]
        table += fused(f"{ours}.self_attention.qkv", parts, [model.d_model] * 3)
        table += both(f"{ours}.self_attention.out", f"{theirs}.attention.output.dense")
        table += both(f"{ours}.self_attention_norm", f"{theirs}.attention.output.LayerNorm")
        table += both(f"{ours}.feedforward.up", f"{theirs}.intermediate.dense")
        table += both(f"{ours}.feedforward.down", f"{theirs}.output.dense")
        table += both(f"{ours}.feedforward_norm", f"{theirs}.output.LayerNorm")
    return table


def buffers(body: str) -> str:
    """The pattern of buffers in older files: position ids and token type ids."""
    return rf"{body}\.embeddings\.(position_ids|token_type_ids)"


def prediction_links(model: Model, *, bias: str, output: str) -> list[Link]:
    """The projection to the vocabulary, whose bias BERT's and RoBERTa's classes have twice.

    The two are tied together with the embeddings. Where nothing is tied they compute with the projection's own, and the
    other lies idle.

    Args:
        bias: the name of the bias beside the projection.
        output: of the projection, which has its own bias.
    """
    if model.tie.output:
        return [link("heads.masked_lm.bias", bias, also=[f"{output}.bias"])]
    return [
        link("heads.masked_lm.weight", f"{output}.weight"),
        link("heads.masked_lm.bias", f"{output}.bias", bias, layout=TWICE),
    ]


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
        "BertModel": (),
    },
    family="bert",
    read=read,
    write=write,
    links=links,
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
