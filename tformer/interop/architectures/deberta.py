"""DeBERTa v2 and v3 (2006.03654, 2111.09543): BERT with disentangled attention and, as a rule, no absolute positions.

The first layer of v2-xlarge adds a convolution. Not read: narrow embeddings. The head of a masked language model has
two sets of names in files (`legacy`); the usual one is written.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tformer.interop.architecture import Architecture
from tformer.interop.architectures import bert
from tformer.interop.architectures.parts import (
    ACTIVATIONS,
    activation_name,
    classes_of,
    head_dropout,
    sequence_head,
    stack_of,
    with_tasks,
)
from tformer.interop.config import Config
from tformer.interop.mapping import Link, TensorLayout, both, link
from tformer.nn.attention.disentangled import DisentangledOptions
from tformer.nn.classification_heads import ClassifierHeadOptions, RegressionHeadOptions
from tformer.nn.positions.base import LearnedOptions
from tformer.recipe.model import Model, layer_sections
from tformer.support.errors import InputError

CONFIG = replace(
    bert.CONFIG.defaulting(
        **{"vocab_size": 128100, "hidden_size": 1536, "num_hidden_layers": 24},
        **{"num_attention_heads": 24, "intermediate_size": 6144},
        layer_norm_eps=1e-7,
    ),
    ignored=("pooler_dropout", "conv_act", "conv_groups"),
)
CONFIG = replace(CONFIG, rows=[row for row in CONFIG.rows if row.keys != "type_vocab_size"])
TERMS = {"both": ["p2c", "c2p"], "c2p": ["c2p"], "p2c": ["p2c"]}
LAYER = bert.LAYER | {
    "self_attention.qkv": "attention.self.query_proj attention.self.key_proj attention.self.value_proj"
}


def read(config: Config, class_name: str) -> dict[str, Any]:
    values = bert.read_body(config, CONFIG)
    stack = values["encoder"]
    for key in ("embedding_size", "attention_head_size", "pooler_hidden_size"):
        size = values["d_model"] // (stack["num_heads"] if key == "attention_head_size" else 1)
        config.expect(key, size)
    values["embedding"]["token_types"] = config.take("type_vocab_size", default=0)
    if not config.take("position_biased_input", default=True, kind=bool):
        stack["positions"] = {"kind": "none"}
    terms = config.take("pos_att_type", default=[], kind=(list, str))
    terms = {one.strip() for one in terms.lower().split("|")} if isinstance(terms, str) else set(map(str, terms))
    named = next((name for name, found in TERMS.items() if set(found) == terms), None)
    buckets, norm = config.take("position_buckets", default=-1), config.take("norm_rel_ebd", default="none", kind=str)
    longest, shared = (
        config.take("max_relative_positions", default=-1),
        config.take("share_att_key", default=False, kind=bool),
    )
    if config.take("relative_attention", default=False, kind=bool) != bool(terms) or (terms and named is None):
        raise InputError(
            f"{config.name}: pos_att_type: found {sorted(terms)}, expected c2p, p2c or both with relative_attention, "
            "and none without it"
        )
    if terms:
        stack["attention"] = {
            "kind": "disentangled",
            "buckets": max(buckets, 0),
            "max_distance": longest if longest >= 1 else values["max_seq_len"],
            "terms": named,
            "share_projections": shared,
            "table_norm": "layer_norm" in [one.strip() for one in norm.lower().split("|")],
            "table_norm_eps": stack["norm"]["eps"],
        }
    if kernel := config.take("conv_kernel_size", default=0):
        config.expect("conv_act", "gelu", default="tanh")
        config.expect("conv_groups", 1)
        stack["layers"] = {0: {"convolution": kernel}}
    activation = config.choose("pooler_hidden_act", ACTIVATIONS, default="gelu")
    dropout = config.take("cls_dropout", default=None, kind=float)
    untied_only_by_name = not config.take("legacy", default=True, kind=bool)  # the newer head multiplies with the table
    values["tie"]["output"] |= untied_only_by_name
    if bert.is_classifier(class_name):
        return {**values, "heads": [sequence_head(config, activation=activation, dropout=dropout)]}
    return {**values, "heads": [{"kind": "masked_lm", "activation": stack["feedforward"]["activation"]}]}


def write(model: Model, class_name: str) -> dict[str, Any]:
    stack = stack_of(model, "encoder")
    options, own = stack.attention, isinstance(stack.positions, LearnedOptions)
    found: dict[str, Any] = {"type_vocab_size": model.embedding.token_types, "position_biased_input": own}
    if isinstance(options, DisentangledOptions):
        found |= {
            "relative_attention": True,
            "position_buckets": options.buckets or -1,
            "max_relative_positions": -1 if options.max_distance == model.max_seq_len else options.max_distance,
            "pos_att_type": "|".join(TERMS[options.terms]),
            "share_att_key": options.share_projections,
            "norm_rel_ebd": "layer_norm" if options.table_norm else "none",
        }
    if kernel := _kernel(model):
        found |= {"conv_kernel_size": kernel, "conv_act": "gelu"}
    head = next((head for head in model.heads if isinstance(head, ClassifierHeadOptions | RegressionHeadOptions)), None)
    if head is not None:
        found |= {"pooler_hidden_act": activation_name(head.activation), "cls_dropout": head_dropout(model)}
    return CONFIG.write(model) | found


def _kernel(model: Model) -> int:
    """Positions that the convolution of the first layer reads; 0: there is none."""
    return layer_sections(stack_of(model, "encoder"), path="model.encoder")[0].convolution


def links(model: Model, class_name: str) -> list[Link]:
    table = bert.encoder_links(model, class_name, names=bert.Names("deberta", layer=LAYER))
    stack = stack_of(model, "encoder")
    if kernel := _kernel(model):
        rows = TensorLayout(  # [out, in, kernel] on disk
            join=lambda parts: parts[0].transpose(1, 2).flatten(1),
            split=lambda ours: (ours.unflatten(1, (kernel, -1)).transpose(1, 2),),
        )
        table += both("encoder.blocks.0.convolution.project", "deberta.encoder.conv.conv", layout=rows)
        table += both("encoder.blocks.0.convolution_norm", "deberta.encoder.conv.LayerNorm")
    options, first = stack.attention, "encoder.blocks.0.self_attention.mechanism"
    if isinstance(options, DisentangledOptions):
        table.append(link(f"{first}.table", "deberta.encoder.rel_embeddings.weight"))
        table += both(f"{first}.norm", "deberta.encoder.LayerNorm") if options.table_norm else []
        for layer in range(0 if options.share_projections else stack.num_layers):
            ours = f"encoder.blocks.{layer}.self_attention.mechanism.position"
            theirs = f"deberta.encoder.layer.{layer}.attention.self.pos"
            table += both(f"{ours}_k", f"{theirs}_key_proj") if options.terms != "p2c" else []
            table += both(f"{ours}_q", f"{theirs}_query_proj") if options.terms != "c2p" else []
    return table


PLAIN = Architecture(
    model_type="deberta-v2",
    classes=classes_of("DebertaV2", "MaskedLM", "SequenceClassification"),
    family="bert",
    read=read,
    write=write,
    links=links,
    prefix="deberta.",
    renamed=(
        (r"^lm_predictions\.lm_head\.(dense|LayerNorm)\.", r"cls.predictions.transform.\1."),
        (r"^lm_predictions\.lm_head\.bias$", "cls.predictions.bias"),
    ),
    skipped=(
        bert.buffers("deberta"),
        r"deberta\.(embeddings\.position_embeddings|encoder\.rel_embeddings)\.weight|deberta\.encoder\.LayerNorm\.\w+",
        r"(pooler\.dense|classifier)\.(weight|bias)",
        r"mask_predictions\..*",
        r"cls\.predictions\.(bias|(decoder|transform\.(dense|LayerNorm))\.(weight|bias))",
    ),
    special_ids={"pad": 0},
    slow_tokenizer="DebertaV2Tokenizer",
)
DEBERTA_V2 = with_tasks(PLAIN)
