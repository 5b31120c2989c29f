"""DistilBERT (1910.01108): BERT without token types and pooler, with other tensor names.

Positions that are fixed sinusoids (`sinusoidal_pos_embds`) lie in the file like learned ones and are read as such.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from tformer.interop.architecture import Architecture
from tformer.interop.architectures.bert import LEGACY_NAMES, Names, buffers, encoder_links, refuse_odd_heads
from tformer.interop.architectures.parts import head_dropout, sequence_head, with_tasks
from tformer.interop.architectures.table import ConfigKey, ConfigTable
from tformer.interop.config import Config
from tformer.recipe.model import Model

MASKED, CLASSIFIER = "DistilBertForMaskedLM", "DistilBertForSequenceClassification"
CONFIG = ConfigTable(
    rows=(
        ConfigKey("vocab_size", "vocab_size", 30522),
        ConfigKey("dim", "d_model", 768),
        ConfigKey("n_layers", "encoder.num_layers", 6),
        ConfigKey("n_heads", "encoder.num_heads", 12),
        ConfigKey("hidden_dim", "encoder.feedforward.d_ff", 3072),
        ConfigKey("activation", "encoder.feedforward.activation", "gelu"),
        ConfigKey("dropout", "encoder.dropout embedding.dropout", 0.1),
        ConfigKey("attention_dropout", "encoder.attention_dropout", 0.1),
        ConfigKey("max_position_embeddings", "max_seq_len", 512),
        ConfigKey("tie_word_embeddings", "tie.output", True),
    ),
    fixed={
        "embedding.norm": True,
        "encoder.positions.kind": "learned",
        "encoder.norm": {"place": "post", "eps": 1e-12},
        "encoder.final_norm": False,
    },
    ignored=("qa_dropout", "seq_classif_dropout", "sinusoidal_pos_embds", "tie_weights_"),
    written={"sinusoidal_pos_embds": False},
)


LAYER = {
    "self_attention.qkv": "attention.q_lin attention.k_lin attention.v_lin",
    "self_attention.out": "attention.out_lin",
    "self_attention_norm": "sa_layer_norm",
    "feedforward.up": "ffn.lin1",
    "feedforward.down": "ffn.lin2",
    "feedforward_norm": "output_layer_norm",
}


def read(config: Config, class_name: str) -> dict[str, Any]:
    section = CONFIG.read(config)
    refuse_odd_heads(config, "n_heads", section["encoder"]["num_heads"], section["d_model"])
    if class_name == CLASSIFIER:
        last = config.take("seq_classif_dropout", default=0.2, kind=float)
        return section | {"heads": [sequence_head(config, activation="relu", dropout=last)]}
    activation = section["encoder"]["feedforward"]["activation"]
    return section | {"heads": [{"kind": "masked_lm", "activation": activation}]}


def write(model: Model, class_name: str) -> dict[str, Any]:
    values = CONFIG.write(model)
    if class_name != CLASSIFIER:
        return values
    own = head_dropout(model)
    return values | {"seq_classif_dropout": values["dropout"] if own is None else own}


NAMES = Names(
    "distilbert",
    layers="transformer.layer",
    layer=LAYER,
    dense="vocab_transform",
    norm="vocab_layer_norm",
    output="vocab_projector",
    bias="",
    pooler="pre_classifier",
)
PLAIN = Architecture(
    model_type="distilbert",
    classes={MASKED: ("masked_lm",), CLASSIFIER: ("classifier",), "DistilBertModel": ()},
    family="bert",
    read=read,
    write=write,
    links=partial(encoder_links, names=NAMES),
    prefix="distilbert.",
    renamed=LEGACY_NAMES,
    skipped=(buffers("distilbert"), r"vocab_(transform|layer_norm|projector)\.(weight|bias)"),
    special_ids={"pad": 0},
    slow_tokenizer="BertTokenizer",
)
DISTILBERT = with_tasks(PLAIN, dropouts={"span": ("qa_dropout", 0.1)})
