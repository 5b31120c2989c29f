"""BART and its family: encoder-decoders with biases and LayerNorm, most of them with one token table.

    BART          post-norm, learned positions, norm of the embeddings
    mBART         pre-norm, learned positions, norm of the embeddings
    Blenderbot    pre-norm, learned positions; Small: as BART, but the decoder normalizes before it adds positions
    Pegasus       pre-norm, sinusoids
    M2M100, NLLB  pre-norm, fairseq's sinusoids, no bias of the logits
    FSMT          post-norm, fairseq's sinusoids, two vocabularies, no bias of the logits
    Marian        post-norm, sinusoids, separate vocabularies for source and target where the config says so

Older config files name these traits (`normalize_before` ...). The classes fix them, so another value is refused; the
eps of every norm is fixed as well. The first two rows of learned positions of BART and mBART are unused; fairseq's
sinusoids begin after the id of padding. Files of Pegasus and FSMT, and older ones of Marian, repeat the sinusoids.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from tformer.interop.architecture import Architecture
from tformer.interop.architectures.parts import (
    OUTPUT,
    head_dropout,
    layer_links,
    output_is_tied,
    pooled_links,
    sequence_head,
    stack_of,
    with_tasks,
)
from tformer.interop.architectures.table import ConfigKey, ConfigTable, both_stacks
from tformer.interop.config import Config
from tformer.interop.mapping import Fixed, Link, both, link, reshaped
from tformer.interop.weight_files import WeightFiles
from tformer.recipe.model import Model

SIDES = {"encoder": "embedding", "decoder": "decoder_embedding"}
TABLE = "model.shared.weight"
COPIES = ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight")
LOGITS_BIAS = "final_logits_bias"
EPS, OFFSET, BASE = 1e-5, 2, 10000.0

SKIPPED = (
    r"(model\.)?(encoder|decoder)\.version",  # a buffer in old files
    r"classification_head\..*",
    r"final_logits_bias",
    r"lm_head\.weight",
)


LEARNED = {"kind": "learned", "offset": OFFSET}
SINUSOIDS = {"kind": "sinusoidal", "layout": "halves", "base": BASE}
FAIRSEQ = {"kind": "sinusoidal", "layout": "fairseq", "base": BASE}


READ_BY_CTRANSLATE2 = ("normalize_before", "normalize_embedding")
"""Traits of the class that CTranslate2's converter reads from config.json, where published models have them."""


def body(
    place: Literal["pre", "post"], positions: Mapping[str, Any], *, embedding_norm: bool, ignored: Sequence[str] = ()
) -> ConfigTable:
    """The table of a class: the model section without `heads`, with tied matrices. No key states these traits.

    ignored: further keys that change nothing.
    """
    pre, learned = place == "pre", positions["kind"] == "learned"
    fixed: dict[str, Any] = {
        "embedding.norm": embedding_norm,
        "tie": {"source_target": True, "output": True},
    }
    for side in SIDES:
        fixed |= {
            f"{side}.positions": positions,
            f"{side}.norm": {"place": place, "eps": EPS},
            f"{side}.final_norm": pre,
        }
    expected = {
        "is_encoder_decoder": True,
        "is_decoder": False,
        "normalize_before": pre,
        "add_final_layer_norm": pre,
        "normalize_embedding": embedding_norm,
        "static_position_embeddings": not learned,
        "add_bias_logits": False,
        "do_blenderbot_90_layernorm": False,
        **({"extra_pos_embeddings": positions.get("offset", 0)} if learned else {}),
    }
    expected = {key: value for key, value in expected.items() if key not in ignored}
    written = {"tie_word_embeddings": True, "is_encoder_decoder": True}
    written |= {key: expected[key] for key in READ_BY_CTRANSLATE2 if key in expected}
    return ConfigTable(ROWS, fixed, expected, (*IGNORED, *ignored), written)


ROWS = (
    ConfigKey("vocab_size", "vocab_size", 50265),
    ConfigKey("max_position_embeddings", "max_seq_len", 1024),
    ConfigKey("d_model hidden_size", "d_model", 1024),
    ConfigKey("encoder_layers num_hidden_layers", "encoder.num_layers", 12),
    ConfigKey("encoder_attention_heads num_attention_heads", "encoder.num_heads", 16),
    ConfigKey("encoder_ffn_dim", "encoder.feedforward.d_ff", 4096),
    ConfigKey("encoder_layerdrop", "encoder.layerdrop", 0.0),
    ConfigKey("decoder_layers", "decoder.num_layers", 12),
    ConfigKey("decoder_attention_heads", "decoder.num_heads", 16),
    ConfigKey("decoder_ffn_dim", "decoder.feedforward.d_ff", 4096),
    ConfigKey("decoder_layerdrop", "decoder.layerdrop", 0.0),
    ConfigKey("activation_function", both_stacks("feedforward.activation"), "gelu"),
    ConfigKey("dropout", f"{both_stacks('dropout')} embedding.dropout", 0.1),
    ConfigKey("attention_dropout", both_stacks("attention_dropout"), 0.0),
    ConfigKey("activation_dropout", both_stacks("activation_dropout"), 0.0),
    ConfigKey("scale_embedding", "embedding.scale", False),
)
# Keys about training and generation in older files, and about how distilled models were made.
IGNORED = (
    *("classif_dropout", "extra_pos_embeddings", "force_bos_token_to_be_generated", "replacing_rate", "save_step"),
    *("student_decoder_layers", "student_encoder_layers"),
)


def read_generator(config: Config, class_name: str, *, table: ConfigTable) -> dict[str, Any]:
    """The model section of a ...ForConditionalGeneration class with one vocabulary."""
    config.expect("tie_word_embeddings", True)
    return table.read(config) | {"heads": [{"kind": "lm", "bias": True}]}


def read_fairseq(config: Config, table: ConfigTable) -> dict[str, Any]:
    """The model section without heads of a class whose positions begin after the id of padding."""
    section = table.read(config)
    for side in SIDES:
        section[side]["positions"]["offset"] = config.take("pad_token_id", default=OFFSET - 1) + 1
    return section


def read_m2m100(config: Config, class_name: str) -> dict[str, Any]:
    config.expect("tie_word_embeddings", True)
    return read_fairseq(config, OF_M2M100) | {"heads": [{"kind": "lm"}]}


def padding_of(model: Model) -> dict[str, Any]:
    """The key of padding that `read_fairseq` reads."""
    return {"pad_token_id": getattr(stack_of(model, "encoder").positions, "offset", OFFSET) - 1}


LAYER = {
    "self_attention.qkv": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
    "self_attention.out": "self_attn.out_proj",
    "self_attention_norm": "self_attn_layer_norm",
    "feedforward.up": "fc1",
    "feedforward.down": "fc2",
    "feedforward_norm": "final_layer_norm",
    "cross_attention.q": "encoder_attn.q_proj",
    "cross_attention.kv": "encoder_attn.k_proj encoder_attn.v_proj",
    "cross_attention.out": "encoder_attn.out_proj",
    "cross_attention_norm": "encoder_attn_layer_norm",
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
        found += layer_links(model, side, f"{body}.layers", LAYER)
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
    """The section with the output untied, and without a bias of the logits, where the files have it so."""
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
    first = padding_of(model)["pad_token_id"] + 1

    def table() -> Tensor:
        """[sin | cos], fp32. A quotient, where `nn.positions` has a product: so its last bits are those on disk."""
        exponents = torch.arange(0, model.d_model, 2, dtype=torch.float64) / model.d_model
        angles = torch.arange(model.max_seq_len, dtype=torch.float64).unsqueeze(1) / BASE**exponents
        return torch.cat((angles.sin(), angles.cos()), dim=1).float()

    def of_fairseq() -> Tensor:
        """[sin | cos] in fairseq's fp32 arithmetic; the row of padding is zeros."""
        half = model.d_model // 2
        frequencies = torch.exp(torch.arange(half).float() * -(math.log(BASE) / (half - 1)))
        angles = torch.arange(model.max_seq_len + first).float().unsqueeze(1) * frequencies
        found = torch.cat((angles.sin(), angles.cos()), dim=1)
        found[first - 1] = 0
        return found

    make = of_fairseq if class_name.startswith("FSMT") else table
    return [Fixed(f"model.{side}.embed_positions.weight", make, written) for side in SIDES]


BLENDERBOT_KEYS = ("do_blenderbot_90_layernorm", "layernorm_variant")
OF_BART = body("post", LEARNED, embedding_norm=True)
OF_MBART = body("pre", LEARNED, embedding_norm=True)
OF_BLENDERBOT = body("pre", {"kind": "learned"}, embedding_norm=False, ignored=BLENDERBOT_KEYS).defaulting(
    **{"vocab_size": 8008, "max_position_embeddings": 128, "d_model": 2560},
    **{"encoder_layers": 2, "encoder_attention_heads": 32, "encoder_ffn_dim": 10240},
    **{"decoder_layers": 24, "decoder_attention_heads": 32, "decoder_ffn_dim": 10240},
)
OF_BLENDERBOT_SMALL = body("post", {"kind": "learned"}, embedding_norm=True, ignored=BLENDERBOT_KEYS).defaulting(
    **{"max_position_embeddings": 512, "d_model": 512},
    **{"encoder_layers": 8, "encoder_ffn_dim": 2048, "decoder_layers": 8, "decoder_ffn_dim": 2048},
)
OF_BLENDERBOT_SMALL = replace(
    OF_BLENDERBOT_SMALL, fixed={**OF_BLENDERBOT_SMALL.fixed, "embedding.target_norm": "tokens"}
)
OF_PEGASUS = body("pre", SINUSOIDS, embedding_norm=False)
OF_M2M100 = body("pre", FAIRSEQ, embedding_norm=False).defaulting(
    **{"vocab_size": 128112, "activation_function": "relu", "attention_dropout": 0.1, "scale_embedding": True},
    **{"encoder_layerdrop": 0.05, "decoder_layerdrop": 0.05},
)
OF_MARIAN = body("post", SINUSOIDS, embedding_norm=False).defaulting(vocab_size=58101)
OF_FSMT = body("post", FAIRSEQ, embedding_norm=False, ignored=("langs", "decoder")).defaulting(
    vocab_size=42024, activation_function="relu", scale_embedding=True
)
CLASSIFIER = "BartForSequenceClassification"
NUM_LABELS = 3  # default of BartConfig


def read(config: Config, class_name: str) -> dict[str, Any]:
    if class_name != CLASSIFIER:
        return read_generator(config, class_name, table=OF_BART)
    config.expect("tie_word_embeddings", True)
    head = sequence_head(
        config,
        default_labels=NUM_LABELS,
        pooling="eos",
        pooler=True,
        activation="tanh",
        dropout=config.take("classifier_dropout", default=0.0, kind=float),
    )
    return OF_BART.read(config) | {"heads": [head]}


def write(model: Model, class_name: str) -> dict[str, Any]:
    return OF_BART.write(model) | {"classifier_dropout": head_dropout(model) or 0.0}


def links(model: Model, class_name: str) -> list[Link]:
    if class_name != CLASSIFIER:
        return generator_links(model, class_name)
    head = pooled_links(model, pooler="classification_head.dense", project="classification_head.out_proj")
    return [link("embedding.weight", TABLE, also=COPIES), *body_links(model), *head]


def ignored_by_ctranslate2(config: Mapping[str, Any]) -> dict[str, Any]:
    """See `Architecture.ctranslate2`."""
    return {"decoder_attention_heads": config["encoder_attention_heads"]}


PLAIN = Architecture(
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
    ctranslate2=ignored_by_ctranslate2,
)
SPANS = ("ForQuestionAnswering",)  # read from the decoder, whose input is the text itself, shifted right
BART = with_tasks(PLAIN, tasks=SPANS)
OWN_MBART = replace(
    PLAIN,
    model_type="mbart",
    classes={"MBartForConditionalGeneration": ("lm",), "MBartModel": ()},
    read=partial(read_generator, table=OF_MBART),
    write=OF_MBART.write,
    links=generator_links,
    special_ids={"pad": 1, "bos": 0, "eos": 2, "forced_eos": 2},
    slow_tokenizer="MBartTokenizer",
    ctranslate2=ignored_by_ctranslate2,
)
MBART = with_tasks(OWN_MBART, tasks=SPANS)
PEGASUS = replace(
    OWN_MBART,
    model_type="pegasus",
    classes={"PegasusForConditionalGeneration": ("lm",), "PegasusModel": ()},
    family="transformer",
    read=partial(read_generator, table=OF_PEGASUS),
    write=OF_PEGASUS.write,
    fixed=partial(stored_sinusoids, written=True),
    special_ids={"pad": 0, "eos": 1, "decoder_start": 0, "forced_eos": 1},
    slow_tokenizer="PegasusTokenizer",
    ctranslate2=ignored_by_ctranslate2,
)
BLENDERBOT = replace(
    OWN_MBART,
    model_type="blenderbot",
    classes={"BlenderbotForConditionalGeneration": ("lm",), "BlenderbotModel": ()},
    read=partial(read_generator, table=OF_BLENDERBOT),
    write=OF_BLENDERBOT.write,
    special_ids={"pad": 0, "bos": 1, "eos": 2, "decoder_start": 1, "forced_eos": 2},
    slow_tokenizer="BlenderbotTokenizer",
    ctranslate2=None,
)
BLENDERBOT_SMALL = replace(
    BLENDERBOT,
    model_type="blenderbot-small",
    classes={"BlenderbotSmallForConditionalGeneration": ("lm",), "BlenderbotSmallModel": ()},
    read=partial(read_generator, table=OF_BLENDERBOT_SMALL),
    write=OF_BLENDERBOT_SMALL.write,
    slow_tokenizer="BlenderbotSmallTokenizer",
)
M2M100 = replace(
    PEGASUS,
    model_type="m2m_100",
    classes={"M2M100ForConditionalGeneration": ("lm",), "M2M100Model": ()},
    read=read_m2m100,
    write=lambda model, class_name: OF_M2M100.write(model) | padding_of(model),
    fixed=lambda model, class_name: (),
    skipped=(*SKIPPED, r"model\.(encoder|decoder)\.embed_positions\.weights"),
    special_ids={"pad": 1, "bos": 0, "eos": 2, "decoder_start": 2},
    slow_tokenizer="M2M100Tokenizer",
    ctranslate2=None,
)


# --- Marian: one or two vocabularies ----------------------------------------------------------------------------------


def read_marian(config: Config, class_name: str) -> dict[str, Any]:
    section = OF_MARIAN.read(config) | {"heads": [{"kind": "lm", "bias": True}]}
    if config.take("share_encoder_decoder_embeddings", default=True, kind=bool):
        # Untied, this class would read two further tables beside the shared one, and never that.
        config.expect("tie_word_embeddings", True)
        config.expect("decoder_vocab_size", section["vocab_size"])
        return section
    tied = config.take("tie_word_embeddings", default=True, kind=bool)
    return section | {
        "target_vocab_size": config.size("decoder_vocab_size", default=section["vocab_size"]),
        "tie": {"source_target": False, "output": tied},
    }


def write_marian(model: Model, class_name: str) -> dict[str, Any]:
    shared = model.tie.source_target
    return OF_MARIAN.write(model) | {
        "decoder_vocab_size": model.target_vocab_size or model.vocab_size,
        "share_encoder_decoder_embeddings": shared,
        "tie_word_embeddings": shared or model.tie.output,
    }


def marian_links(model: Model, class_name: str) -> list[Link]:
    if model.tie.source_target:
        return generator_links(model, class_name)
    source, target = COPIES
    return [
        link("embedding.weight", source),
        link("decoder_embedding.weight", target, also=[OUTPUT] if model.tie.output else []),
        *output_links(model),
        *body_links(model),
    ]


MARIAN = replace(
    PEGASUS,
    model_type="marian",
    classes={"MarianMTModel": ("lm",), "MarianModel": ()},
    read=read_marian,
    write=write_marian,
    links=marian_links,
    fixed=partial(stored_sinusoids, written=False),
    special_ids={"pad": 58100, "eos": 0, "decoder_start": 58100, "forced_eos": 0},
    slow_tokenizer="MarianTokenizer",
    ctranslate2=ignored_by_ctranslate2,
)


# --- FSMT: two vocabularies -------------------------------------------------------------------------------------------

FSMT_OUTPUT = "model.decoder.output_projection.weight"


def read_fsmt(config: Config, class_name: str) -> dict[str, Any]:
    tied = config.take("tie_word_embeddings", default=False, kind=bool)
    source = config.size("src_vocab_size", default=42024)
    target = config.expect("tgt_vocab_size", source) if tied else config.size("tgt_vocab_size", default=42024)
    config.ignore("vocab_size")  # another name of the target's
    section = read_fairseq(config, OF_FSMT)
    return section | {
        "vocab_size": source,
        **({} if tied else {"target_vocab_size": target}),
        "tie": {"source_target": tied, "output": tied},
        "heads": [{"kind": "lm"}],
    }


def write_fsmt(model: Model, class_name: str) -> dict[str, Any]:
    found = OF_FSMT.write(model) | padding_of(model)
    source = found.pop("vocab_size")
    target = model.target_vocab_size or source
    return found | {"src_vocab_size": source, "tgt_vocab_size": target, "tie_word_embeddings": model.tie.output}


def fsmt_links(model: Model, class_name: str) -> list[Link]:
    source, target = COPIES
    if model.tie.source_target:
        return [link("embedding.weight", target, also=[source, FSMT_OUTPUT]), *body_links(model)]
    tables = [link("embedding.weight", source), link("decoder_embedding.weight", target)]
    return [*tables, link("heads.lm.weight", FSMT_OUTPUT), *body_links(model)]


FSMT = replace(
    PEGASUS,
    model_type="fsmt",
    classes={"FSMTForConditionalGeneration": ("lm",)},
    read=read_fsmt,
    write=write_fsmt,
    links=fsmt_links,
    of_files=None,
    undecided=(),
    special_ids={"pad": 1, "bos": 0, "eos": 2, "decoder_start": 2, "forced_eos": 2},
    slow_tokenizer=None,
    ctranslate2=None,
)
