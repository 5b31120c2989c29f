"""ModernBERT (2412.13663): a pre-norm encoder without biases; two of three layers have windows and another RoPE base.

The embedding ends in a norm, so the first layer has none before its attention. `local_attention` counts the keys of
both sides, as a recipe's `window` does.
"""

from __future__ import annotations

from typing import Any

from tformer.interop.architecture import Architecture
from tformer.interop.architectures.bert import is_classifier, refuse_odd_heads
from tformer.interop.architectures.llama import FULL, SLIDING, read_rope, sliding_layers, write_rope
from tformer.interop.architectures.parts import (
    ACTIVATIONS,
    activation_name,
    classes_of,
    head_dropout,
    layer_links,
    sequence_head,
    stack_of,
    token_head,
)
from tformer.interop.architectures.table import ConfigKey, ConfigTable
from tformer.interop.config import Config
from tformer.interop.mapping import Link, link
from tformer.nn.attention.sliding_window import SlidingWindowOptions
from tformer.nn.classification_heads import (
    ClassifierHeadOptions,
    RegressionHeadOptions,
    SpanHeadOptions,
    TokenClassifierHeadOptions,
)
from tformer.nn.heads import MaskedLmHeadOptions
from tformer.recipe.model import Model, layer_sections
from tformer.support.errors import InputError

BASES = {FULL: ("global_rope_theta", 160000.0), SLIDING: ("local_rope_theta", 10000.0)}
EVERY = 3  # layers from one with full attention to the next, where neither key says which they are
CONFIG = ConfigTable(
    rows=(
        ConfigKey("vocab_size", "vocab_size", 50368),
        ConfigKey("hidden_size", "d_model", 768),
        ConfigKey("num_hidden_layers", "encoder.num_layers", 22),
        ConfigKey("num_attention_heads", "encoder.num_heads", 12),
        ConfigKey("intermediate_size", "encoder.feedforward.d_ff", 1152),
        ConfigKey("max_position_embeddings", "max_seq_len", 8192),
        ConfigKey("hidden_activation", "encoder.feedforward.activation", "gelu"),
        ConfigKey("norm_eps", "encoder.norm.eps", 1e-5),
        ConfigKey("norm_bias", "encoder.norm.bias", False),
        ConfigKey("attention_bias", "encoder.attention.qkv_bias encoder.attention.out_bias", False),
        ConfigKey("mlp_bias", "encoder.feedforward.bias", False),
        ConfigKey("attention_dropout", "encoder.attention_dropout", 0.0),
        ConfigKey("mlp_dropout", "encoder.activation_dropout", 0.0),
        ConfigKey("embedding_dropout", "embedding.dropout", 0.0),
        ConfigKey("tie_word_embeddings", "tie.output", True),
    ),
    fixed={"embedding.norm": True, "encoder.feedforward.gated": True, "encoder.final_norm": True},
    ignored=(
        *("deterministic_flash_attn", "initializer_cutoff_factor", "layer_norm_eps", "position_embedding_type"),
        *("reference_compile", "repad_logits_with_grad", "sparse_pred_ignore_index", "sparse_prediction"),
    ),
)
LAYER = {
    "self_attention_norm": "attn_norm",
    "self_attention.qkv": "attn.Wqkv",
    "self_attention.out": "attn.Wo",
    "feedforward_norm": "mlp_norm",
    "feedforward.up": "mlp.Wi",
    "feedforward.down": "mlp.Wo",
}


def read(config: Config, class_name: str) -> dict[str, Any]:
    values = CONFIG.read(config)
    stack, length = values["encoder"], values["max_seq_len"]
    refuse_odd_heads(config, "num_attention_heads", stack["num_heads"], values["d_model"])
    window = config.size("local_attention", default=128) // 2 * 2
    every = config.size("global_attn_every_n_layers", default=EVERY)
    slides = sliding_layers(config, [layer % every != 0 for layer in range(stack["num_layers"])])
    ropes = config.take("rope_parameters", default={}, kind=dict)
    positions = {}
    for kind, (key, base) in BASES.items():
        rope = {"rope_theta": config.take(key, default=base, kind=float), "rope_parameters": ropes.get(kind)}
        positions[kind] = read_rope(Config(rope, name=config.name), max_seq_len=length)
    if other := ropes.keys() - BASES.keys():
        raise InputError(
            f"{config.name}: rope_parameters: found the key {min(other)!r}, expected {' and '.join(BASES)}"
        )
    stack["positions"] = positions[FULL]
    local = {
        "attention": {"kind": "sliding_window", "window": window},
        "positions": {"scaling": None} | positions[SLIDING],
    }
    stack["layers"] = {layer: dict(local) for layer, slide in enumerate(slides) if slide}
    stack["layers"].setdefault(0, {})["attention_norm"] = False
    activation = config.choose("classifier_activation", ACTIVATIONS, default="gelu")
    bias = config.take("classifier_bias", default=False, kind=bool)
    pooling = config.expect("classifier_pooling", "cls", "mean")
    bias_of_output = config.take("decoder_bias", default=True, kind=bool)
    if is_classifier(class_name):
        dropout = config.take("classifier_dropout", default=0.0, kind=float)
        pooled = {"pooling": pooling, "pooler_bias": bias, "pooler_norm": True}
        return values | {"heads": [sequence_head(config, activation=activation, dropout=dropout, **pooled)]}
    transform = {"activation": activation, "dense_bias": bias}
    of_tokens = token_head(config, class_name, dropout=("classifier_dropout", 0.0), transform=True, **transform)
    return values | {"heads": [of_tokens or {"kind": "masked_lm", "bias": bias_of_output, **transform}]}


def write(model: Model, class_name: str) -> dict[str, Any]:
    layers = layer_sections(stack_of(model, "encoder"), path="model.encoder")
    windows = [one.attention.window if isinstance(one.attention, SlidingWindowOptions) else None for one in layers]
    layer_types = [SLIDING if window else FULL for window in windows]
    config: dict[str, Any] = {"layer_types": layer_types, "local_attention": next(filter(None, windows), 128)}
    ropes = {}
    for layer_type, (key, base) in BASES.items():
        own = (
            write_rope(layers[layer_types.index(layer_type)])
            if layer_type in layer_types
            else {"rope_parameters": {"rope_theta": base}}
        )
        ropes[layer_type] = own["rope_parameters"] | {"rope_type": own["rope_parameters"].get("rope_type", "default")}
        config[key] = ropes[layer_type]["rope_theta"]
    config["rope_parameters"] = ropes
    for head in model.heads:
        if isinstance(head, MaskedLmHeadOptions):
            config |= {"classifier_bias": head.dense_bias, "decoder_bias": head.bias}
        elif isinstance(head, TokenClassifierHeadOptions | SpanHeadOptions):
            config |= {"classifier_bias": head.dense_bias, "classifier_dropout": head.dropout or 0.0}
        elif isinstance(head, ClassifierHeadOptions | RegressionHeadOptions):
            config |= {"classifier_bias": head.pooler_bias, "classifier_pooling": head.pooling}
            config["classifier_dropout"] = head_dropout(model) or 0.0
        else:
            continue
        config["classifier_activation"] = activation_name(head.activation)
    return CONFIG.write(model) | config


def links(model: Model, class_name: str) -> list[Link]:
    biased = stack_of(model, "encoder").norm.bias
    classifies = is_classifier(class_name)
    table = [
        link(
            "embedding.weight",
            "model.embeddings.tok_embeddings.weight",
            also=[] if classifies or not model.tie.output else ["decoder.weight"],
        ),
        *_parameters("embedding.norm", "model.embeddings.norm", biased=biased),
        *layer_links(model, "encoder", "model.layers", LAYER),
        *_parameters("encoder.final_norm", "model.final_norm", biased=biased),
    ]
    for head in model.heads:
        name = f"heads.{head.kind}"
        if isinstance(head, MaskedLmHeadOptions):
            table += _parameters(f"{name}.dense", "head.dense", biased=head.dense_bias)
            table += [] if model.tie.output else [link(f"{name}.weight", "decoder.weight")]
            table += [link(f"{name}.bias", "decoder.bias")] if head.bias else []
        elif isinstance(head, TokenClassifierHeadOptions | SpanHeadOptions):
            table += _parameters(f"{name}.dense", "head.dense", biased=head.dense_bias)
            table += _parameters(f"{name}.project", "classifier", biased=True)
        elif isinstance(head, ClassifierHeadOptions | RegressionHeadOptions):
            table += _parameters(f"{name}.pooler", "head.dense", biased=head.pooler_bias)
            table += _parameters(f"{name}.project", "classifier", biased=True)
        else:
            continue
        table += _parameters(f"{name}.norm", "head.norm", biased=biased)
    return table


def _parameters(ours: str, theirs: str, *, biased: bool) -> list[Link]:
    """Links of a module's weight and, if it has one, its bias."""
    return [link(f"{ours}.{kind}", f"{theirs}.{kind}") for kind in (["weight", "bias"] if biased else ["weight"])]


MODERNBERT = Architecture(
    model_type="modernbert",
    classes=classes_of("ModernBert", "MaskedLM", "SequenceClassification", "TokenClassification", "QuestionAnswering"),
    family="bert",
    read=read,
    write=write,
    links=links,
    prefix="model.",
    skipped=(r"(head\.(dense|norm)|decoder)\.(weight|bias)",),
    special_ids={"pad": 50283, "bos": 50281, "eos": 50282, "cls": 50281, "sep": 50282},
)
