"""DistilBERT (1910.01108): BERT without token types and pooler, with other tensor names.

Positions that are fixed sinusoids (`sinusoidal_pos_embds`) lie in the file like learned ones and are read as such.
"""

from __future__ import annotations

from typing import Any

from tformer.interop.architecture import Architecture
from tformer.interop.architectures.bert import LEGACY_NAMES, buffers, refuse_odd_heads
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
from tformer.interop.mapping import Link, both, fused, link
from tformer.recipe.model import Model

MASKED, CLASSIFIER = "DistilBertForMaskedLM", "DistilBertForSequenceClassification"
EPS = 1e-12  # of every norm, not in the config


def read(config: Config, class_name: str) -> dict[str, Any]:
    config.ignore("qa_dropout", "seq_classif_dropout", "sinusoidal_pos_embds", "tie_weights_")
    dropout = config.take("dropout", default=0.1, kind=float)
    activation = config.choose("activation", ACTIVATIONS, default="gelu")
    width, heads = config.size("dim", default=768), config.size("n_heads", default=12)
    refuse_odd_heads(config, "n_heads", heads, width)
    stack = {
        "num_layers": config.size("n_layers", default=6),
        "num_heads": heads,
        "positions": {"kind": "learned"},
        "feedforward": {"d_ff": config.size("hidden_dim", default=3072), "activation": activation},
        "norm": {"place": "post", "eps": EPS},
        "final_norm": False,
        "dropout": dropout,
        "attention_dropout": config.take("attention_dropout", default=0.1, kind=float),
    }
    if class_name == CLASSIFIER:
        last = config.take("seq_classif_dropout", default=0.2, kind=float)
        head = sequence_head(config, activation="relu", dropout=last)
    else:
        head = {"kind": "masked_lm", "activation": activation}
    return {
        "d_model": width,
        "max_seq_len": config.size("max_position_embeddings", default=512),
        "vocab_size": config.size("vocab_size", default=30522),
        "embedding": {"norm": True, "dropout": dropout},
        "tie": {"output": config.take("tie_word_embeddings", default=True, kind=bool)},
        "encoder": stack,
        "heads": [head],
    }


def write(model: Model, class_name: str) -> dict[str, Any]:
    encoder = stack_of(model, "encoder")
    values = {
        "vocab_size": model.vocab_size,
        "dim": model.d_model,
        "n_layers": encoder.num_layers,
        "n_heads": encoder.num_heads,
        "hidden_dim": d_ff_of(model, encoder),
        "activation": activation_name(encoder.feedforward.activation),
        "dropout": encoder.dropout,
        "attention_dropout": encoder.attention_dropout,
        "max_position_embeddings": model.max_seq_len,
        "sinusoidal_pos_embds": False,
        "tie_word_embeddings": model.tie.output,
    }
    own = head_dropout(model)
    last = encoder.dropout if own is None else own
    return values | ({"seq_classif_dropout": last} if class_name == CLASSIFIER else {})


def links(model: Model, class_name: str) -> list[Link]:
    tables, output = "distilbert.embeddings", "vocab_projector"
    also = [f"{output}.weight"] if class_name == MASKED and model.tie.output else []
    table = [
        link("embedding.weight", f"{tables}.word_embeddings.weight", also=also),
        link("encoder.positions.weight", f"{tables}.position_embeddings.weight"),
        *both("embedding.norm", f"{tables}.LayerNorm"),
    ]
    for layer in range(stack_of(model, "encoder").num_layers):
        ours, theirs = f"encoder.blocks.{layer}", f"distilbert.transformer.layer.{layer}"
        parts = [f"{theirs}.attention.{part}_lin" for part in "qkv"]
        table += fused(f"{ours}.self_attention.qkv", parts, [model.d_model] * 3)
        table += both(f"{ours}.self_attention.out", f"{theirs}.attention.out_lin")
        table += both(f"{ours}.self_attention_norm", f"{theirs}.sa_layer_norm")
        table += both(f"{ours}.feedforward.up", f"{theirs}.ffn.lin1")
        table += both(f"{ours}.feedforward.down", f"{theirs}.ffn.lin2")
        table += both(f"{ours}.feedforward_norm", f"{theirs}.output_layer_norm")
    if class_name == CLASSIFIER:
        return [*table, *pooled_links(model, pooler="pre_classifier", project="classifier")]
    table += both("heads.masked_lm.dense", "vocab_transform")
    table += both("heads.masked_lm.norm", "vocab_layer_norm")
    table.append(link("heads.masked_lm.bias", f"{output}.bias"))
    return table if model.tie.output else [*table, link("heads.masked_lm.weight", f"{output}.weight")]


DISTILBERT = Architecture(
    model_type="distilbert",
    classes={MASKED: ("masked_lm",), CLASSIFIER: ("classifier",), "DistilBertModel": ()},
    family="bert",
    read=read,
    write=write,
    links=links,
    prefix="distilbert.",
    renamed=LEGACY_NAMES,
    skipped=(buffers("distilbert"), r"vocab_(transform|layer_norm|projector)\.(weight|bias)"),
    special_ids={"pad": 0},
    slow_tokenizer="BertTokenizer",
)
