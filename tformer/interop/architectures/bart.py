"""BART, mBART and Pegasus (Marian builds on them): encoder-decoders with biases, LayerNorm and one token table.

    BART     post-norm, learned positions, norm of the embeddings
    mBART    pre-norm, learned positions, norm of the embeddings
    Pegasus  pre-norm, sinusoids
    Marian   post-norm, sinusoids, separate vocabularies for source and target where the config says so

Older config files name these traits (`normalize_before` ...). The classes fix them, so another value is refused; the
eps of every norm is fixed as well. The first two rows of learned positions are unused.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from tformer.interop.architecture import Architecture
from tformer.interop.architectures.parts import (
    ACTIVATIONS,
    OUTPUT,
    activation_name,
    d_ff_of,
    head_dropout,
    output_is_tied,
    pooled_links,
    sequence_head,
    size_by_any_name,
    stack_of,
)
from tformer.interop.config import Config
from tformer.interop.mapping import Fixed, Link, both, fused, link, reshaped
from tformer.interop.weight_files import WeightFiles
from tformer.recipe.model import Model

SIDES = {"encoder": "embedding", "decoder": "decoder_embedding"}
TABLE = "model.shared.weight"
COPIES = ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight")
LOGITS_BIAS = "final_logits_bias"
EPS, OFFSET, BASE = 1e-5, 2, 10000.0

# Keys about training and generation in older files, and about how distilled models were made.
UNREAD = (
    "classif_dropout",
    "force_bos_token_to_be_generated",
    "replacing_rate",
    "save_step",
    "student_decoder_layers",
    "student_encoder_layers",
)
SKIPPED = (
    r"(model\.)?(encoder|decoder)\.version",  # a buffer in old files
    r"classification_head\..*",
    r"final_logits_bias",
    r"lm_head\.weight",
)


@dataclass(frozen=True)
class Traits:
    """Properties of a class of the family that its config does not state."""

    place: Literal["pre", "post"]
    learned_positions: bool
    embedding_norm: bool
    vocab_size: int = 50265


def read_body(config: Config, traits: Traits) -> dict[str, Any]:
    """The model section without `heads`, with tied matrices."""
    config.expect("is_encoder_decoder", True)
    config.expect("is_decoder", False)
    config.expect("normalize_before", traits.place == "pre")
    config.expect("add_final_layer_norm", traits.place == "pre")
    config.expect("normalize_embedding", traits.embedding_norm)
    config.expect("static_position_embeddings", not traits.learned_positions)
    config.expect("add_bias_logits", False)
    config.expect("do_blenderbot_90_layernorm", False)
    if traits.learned_positions:
        config.expect("extra_pos_embeddings", OFFSET)
    else:
        config.ignore("extra_pos_embeddings")
    config.ignore(*UNREAD)
    rate = config.take("dropout", default=0.1, kind=float)
    return {
        "d_model": size_by_any_name(config, "d_model", "hidden_size", default=1024),
        "max_seq_len": config.size("max_position_embeddings", default=1024),
        "vocab_size": config.size("vocab_size", default=traits.vocab_size),
        "embedding": {
            "norm": traits.embedding_norm,
            "scale": config.take("scale_embedding", default=False, kind=bool),
            "dropout": rate,
        },
        "tie": {"source_target": True, "output": True},
        **{side: _read_stack(config, traits, side, rate) for side in SIDES},
    }


def _read_stack(config: Config, traits: Traits, side: str, rate: float) -> dict[str, Any]:
    learned = {"kind": "learned", "offset": OFFSET}
    layers, heads = f"{side}_layers", f"{side}_attention_heads"
    encodes = side == "encoder"  # whose sizes have a second name
    return {
        "num_layers": size_by_any_name(config, layers, *(["num_hidden_layers"] if encodes else []), default=12),
        "num_heads": size_by_any_name(config, heads, *(["num_attention_heads"] if encodes else []), default=16),
        "positions": learned if traits.learned_positions else {"kind": "sinusoidal", "layout": "halves", "base": BASE},
        "feedforward": {
            "d_ff": config.size(f"{side}_ffn_dim", default=4096),
            "activation": config.choose("activation_function", ACTIVATIONS, default="gelu"),
        },
        "norm": {"place": traits.place, "eps": EPS},
        "final_norm": traits.place == "pre",
        "dropout": rate,
        "attention_dropout": config.take("attention_dropout", default=0.0, kind=float),
        "activation_dropout": config.take("activation_dropout", default=0.0, kind=float),
        "layerdrop": config.take(f"{side}_layerdrop", default=0.0, kind=float),
    }


def read_generator(config: Config, class_name: str, *, traits: Traits) -> dict[str, Any]:
    """The model section of a ...ForConditionalGeneration class with one vocabulary."""
    config.expect("tie_word_embeddings", True)
    return read_body(config, traits) | {"heads": [{"kind": "lm", "bias": True}]}


def write_body(model: Model, class_name: str) -> dict[str, Any]:
    encoder = stack_of(model, "encoder")
    sizes: dict[str, Any] = {}
    for side in SIDES:
        stack = stack_of(model, side)
        sizes |= {
            f"{side}_layers": stack.num_layers,
            f"{side}_attention_heads": stack.num_heads,
            f"{side}_ffn_dim": d_ff_of(model, stack),
            f"{side}_layerdrop": stack.layerdrop_rate,
        }
    return {
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_seq_len,
        "d_model": model.d_model,
        **sizes,
        "activation_function": activation_name(encoder.feedforward.activation),
        "dropout": encoder.dropout,
        "attention_dropout": encoder.attention_dropout,
        "activation_dropout": encoder.activation_dropout,
        "scale_embedding": model.embedding.scale,
        "tie_word_embeddings": True,
        "is_encoder_decoder": True,
    }


def body_links(model: Model) -> list[Link]:
    """Links of both stacks, their positions and norms, without the token tables."""
    found: list[Link] = []
    for side, embedding in SIDES.items():
        stack, body = stack_of(model, side), f"model.{side}"
        if stack.positions.kind == "learned":
            found.append(link(f"{side}.positions.weight", f"{body}.embed_positions.weight"))
        if model.embedding.norm:
            found += both(f"{embedding}.norm", f"{body}.layernorm_embedding")
        if stack.final_norm:
            found += both(f"{side}.final_norm", f"{body}.layer_norm")
        for layer in range(stack.num_layers):
            found += _layer_links(f"{side}.blocks.{layer}", f"{body}.layers.{layer}", side, model.d_model)
    return found


def _layer_links(ours: str, theirs: str, side: str, width: int) -> list[Link]:
    def projections(attention: str, *parts: str) -> list[str]:
        return [f"{theirs}.{attention}.{part}_proj" for part in parts]

    found = [
        *fused(f"{ours}.self_attention.qkv", projections("self_attn", "q", "k", "v"), (width,) * 3),
        *both(f"{ours}.self_attention.out", f"{theirs}.self_attn.out_proj"),
        *both(f"{ours}.self_attention_norm", f"{theirs}.self_attn_layer_norm"),
        *both(f"{ours}.feedforward.up", f"{theirs}.fc1"),
        *both(f"{ours}.feedforward.down", f"{theirs}.fc2"),
        *both(f"{ours}.feedforward_norm", f"{theirs}.final_layer_norm"),
    ]
    if side == "decoder":
        found += both(f"{ours}.cross_attention.q", f"{theirs}.encoder_attn.q_proj")
        found += fused(f"{ours}.cross_attention.kv", projections("encoder_attn", "k", "v"), (width, width))
        found += both(f"{ours}.cross_attention.out", f"{theirs}.encoder_attn.out_proj")
        found += both(f"{ours}.cross_attention_norm", f"{theirs}.encoder_attn_layer_norm")
    return found


def output_links(model: Model) -> list[Link]:
    """Links of an untied output projection and the bias of the logits, [1, V] on disk."""
    found = [] if model.tie.output else [link("heads.lm.weight", OUTPUT)]
    if any(head.kind == "lm" and head.bias for head in model.heads):
        found.append(link("heads.lm.bias", LOGITS_BIAS, layout=reshaped(ours=(-1,), theirs=(1, -1))))
    return found


def generator_links(model: Model, class_name: str) -> list[Link]:
    also = [*COPIES, OUTPUT] if model.tie.output else COPIES
    return [link("embedding.weight", TABLE, also=also), *output_links(model), *body_links(model)]


def of_files(section: dict[str, Any], files: WeightFiles) -> dict[str, Any]:
    """Untied outputs and missing biases of the logits, which are zeros."""
    if all(head["kind"] != "lm" for head in section["heads"]):
        return section
    places = (TABLE, COPIES[1]) if section["tie"]["source_target"] else (COPIES[1],)
    tables = [stored for name in places for stored in (name, name.removeprefix("model."))]
    tied = output_is_tied(files, tables, config_says=section["tie"]["output"])
    return section | {
        "tie": section["tie"] | {"output": tied},
        "heads": [{"kind": "lm", "bias": LOGITS_BIAS in files.specs}],
    }


def stored_sinusoids(model: Model, class_name: str, *, written: bool) -> list[Fixed]:
    """The position tables that files store although a formula gives them."""
    table = partial(_sinusoids, model.max_seq_len, model.d_model)
    return [Fixed(f"model.{side}.embed_positions.weight", table, written) for side in SIDES]


def _sinusoids(length: int, width: int) -> Tensor:
    """[sin | cos], fp32. A quotient, where `nn.positions` has a product: so its last bits are those on disk."""
    exponents = torch.arange(0, width, 2, dtype=torch.float64) / width
    angles = torch.arange(length, dtype=torch.float64).unsqueeze(1) / BASE**exponents
    return torch.cat((angles.sin(), angles.cos()), dim=1).float()


TRAITS = Traits("post", learned_positions=True, embedding_norm=True)
CLASSIFIER = "BartForSequenceClassification"
NUM_LABELS = 3  # default of BartConfig


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
    classes={"BartForConditionalGeneration": ("lm",), CLASSIFIER: ("classifier",), "BartModel": ()},
    family="bart",
    read=read,
    write=write,
    links=links,
    prefix="model.",
    skipped=SKIPPED,
    of_files=of_files,
    undecided=("model.tie.output",),
    special_ids={"pad": 1, "bos": 0, "eos": 2, "decoder_start": 2, "forced_eos": 2},
    slow_tokenizer="RobertaTokenizer",
    ctranslate2=("BartLoader", {"normalize_before": False, "normalize_embedding": True}),
)


MBART = Architecture(
    model_type="mbart",
    classes={"MBartForConditionalGeneration": ("lm",), "MBartModel": ()},
    family="bart",
    read=partial(read_generator, traits=Traits("pre", learned_positions=True, embedding_norm=True)),
    write=write_body,
    links=generator_links,
    prefix="model.",
    skipped=SKIPPED,
    of_files=of_files,
    undecided=("model.tie.output",),
    special_ids={"pad": 1, "bos": 0, "eos": 2, "forced_eos": 2},
    ctranslate2=("BartLoader", {"normalize_before": True, "normalize_embedding": True}),
)


PEGASUS = Architecture(
    model_type="pegasus",
    classes={"PegasusForConditionalGeneration": ("lm",), "PegasusModel": ()},
    family="transformer",
    read=partial(read_generator, traits=Traits("pre", learned_positions=False, embedding_norm=False)),
    write=write_body,
    links=generator_links,
    prefix="model.",
    skipped=SKIPPED,
    of_files=of_files,
    undecided=("model.tie.output",),
    fixed=partial(stored_sinusoids, written=True),
    special_ids={"pad": 0, "eos": 1, "decoder_start": 0, "forced_eos": 1},
    ctranslate2=("BartLoader", {"normalize_before": True, "normalize_embedding": False}),
)
