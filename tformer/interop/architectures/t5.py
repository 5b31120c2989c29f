"""T5 v1.0 and v1.1, mT5 and UMT5: relative buckets, RMS norms, no biases, unscaled attention.

v1.0 scales the decoder's output by d^-1/2 before the tied projection; v1.1 has a gated network and a separate,
unscaled projection. Newer config files say `scale_decoder_outputs`; in older ones `tie_word_embeddings` means both.
mT5 is v1.1, never scaled; its projection is tied, whatever the config says, unless a file holds a separate one. UMT5 is
mT5 with biases of their own in every layer, scaled as v1.0 is (in transformers before 5.24 always).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from tformer.interop.architecture import Architecture
from tformer.interop.architectures.parts import (
    ACTIVATIONS,
    OUTPUT,
    activation_name,
    layer_links,
    output_is_tied,
    stack_of,
    token_head,
)
from tformer.interop.architectures.table import ConfigKey, ConfigTable, both_stacks
from tformer.interop.config import Config
from tformer.interop.mapping import Link, both, link
from tformer.interop.weight_files import WeightFiles
from tformer.nn.positions.biases import T5BiasOptions
from tformer.recipe.model import Model
from tformer.support.errors import InputError

TABLE = "shared.weight"
COPIES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
TOKENS = "ForTokenClassification"  # of the encoder alone
SIDES = {"encoder": 1, "decoder": 2}  # index of the feed-forward network in a layer's list of parts


OF_T5 = (
    ConfigKey("vocab_size", "vocab_size", 32128),
    ConfigKey("n_positions", "max_seq_len", 512),
    ConfigKey("d_model hidden_size", "d_model", 512),
    ConfigKey("d_kv head_dim", both_stacks("head_dim"), 64),
    ConfigKey("d_ff", both_stacks("feedforward.d_ff"), 2048),
    ConfigKey("num_layers num_hidden_layers", both_stacks("num_layers"), 6),
    ConfigKey("num_heads num_attention_heads", both_stacks("num_heads"), 8),
    ConfigKey("layer_norm_epsilon", both_stacks("norm.eps"), 1e-6),
    ConfigKey(
        "dropout_rate",
        " ".join(map(both_stacks, ("dropout", "attention_dropout", "activation_dropout"))) + " embedding.dropout",
        0.1,
    ),
    ConfigKey("tie_word_embeddings", "tie.output", True),
)
BUCKETS = (
    ConfigKey("relative_attention_num_buckets", both_stacks("positions.buckets"), 32),
    ConfigKey("relative_attention_max_distance", both_stacks("positions.max_distance"), 128),
)
FIXED = {
    f"{side}.{path}": value
    for side in SIDES
    for path, value in {
        "positions.kind": "t5_bias",
        "attention": {"kind": "full", "qkv_bias": False, "out_bias": False, "scale": 1.0},
        "feedforward.bias": False,
        "norm": {"kind": "rmsnorm", "place": "pre"},
        "final_norm": True,
    }.items()
}
CONFIG = ConfigTable((*OF_T5, *BUCKETS), {"tie.source_target": True, **FIXED}, expected={"is_decoder": False})
WITHOUT_BUCKETS = replace(CONFIG, rows=OF_T5)
OF_MT5 = CONFIG.defaulting(d_ff=1024, num_layers=8, num_heads=6, vocab_size=250112)
OF_UMT5 = replace(
    OF_MT5,
    fixed={**OF_MT5.fixed, **{f"{side}.positions.per_layer": True for side in SIDES}},
    ignored=("scalable_attention",),  # no code reads it
)


def encodes_only(class_name: str) -> bool:
    return class_name.endswith(("EncoderModel", TOKENS))


def read(
    config: Config,
    class_name: str,
    *,
    table: ConfigTable = CONFIG,
    projection: str = "relu",
    may_scale: bool = True,
) -> dict[str, Any]:
    """The model section.

    projection: the default of `feed_forward_proj`; may_scale: whether the class can scale the decoder's output.
    """
    if encodes_only(class_name):
        config.ignore("is_encoder_decoder", "num_decoder_layers")
    else:
        config.expect("is_encoder_decoder", True)
    section = table.read(config)
    scaled = config.take("scale_decoder_outputs", default=section["tie"]["output"], kind=bool) and may_scale
    for side in SIDES:
        section[side]["feedforward"] |= _activation(config, projection)
    of_tokens = token_head(config, class_name, dropout=("classifier_dropout", 0.0))
    section["heads"] = [of_tokens or {"kind": "lm", "scale": "inverse_sqrt_d" if scaled else "none"}]
    decoder = section.pop("decoder")
    if encodes_only(class_name):
        return section
    layers = config.size("num_decoder_layers", default=decoder["num_layers"])
    return section | {"decoder": decoder | {"num_layers": layers}}


def _activation(config: Config, default: str) -> dict[str, Any]:
    """`feed_forward_proj`: an activation, or gated-ACTIVATION; gated-gelu has always meant the tanh form."""
    proj = config.take("feed_forward_proj", default=default, kind=str)
    gate, _, name = proj.rpartition("-")
    if gate not in ("", "gated") or name not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise InputError(f"{config.name}: feed_forward_proj: found {proj!r}, tformer supports [gated-] {known}")
    name = "gelu_new" if proj == "gated-gelu" else name
    config.expect("dense_act_fn", name)  # new files repeat the first key in these two
    config.expect("is_gated_act", gate == "gated")
    return {"activation": ACTIVATIONS[name], "gated": gate == "gated"}


def write(model: Model, class_name: str) -> dict[str, Any]:
    encoder = stack_of(model, "encoder")
    table = CONFIG if isinstance(encoder.positions, T5BiasOptions) else WITHOUT_BUCKETS
    activation = encoder.feedforward.activation
    projection = activation_name(activation)
    if encoder.feedforward.gated:
        projection = "gated-gelu" if activation == "gelu_tanh" else f"gated-{projection}"
    found = table.write(model) | {
        "feed_forward_proj": projection,
        "scale_decoder_outputs": any(getattr(head, "scale", "none") not in ("none", 1.0) for head in model.heads),
        "is_encoder_decoder": not encodes_only(class_name),
    }
    if not encodes_only(class_name):
        found["num_decoder_layers"] = stack_of(model, "decoder").num_layers
    return found


def links(model: Model, class_name: str) -> list[Link]:
    tied = model.tie.output
    table = [link("embedding.weight", TABLE, also=[*COPIES, OUTPUT] if tied else COPIES)]
    if not tied:
        table.append(link("heads.lm.weight", OUTPUT))
    for side, stack in model.stacks.items():
        attention, network = "layer.0.SelfAttention", f"layer.{SIDES[side]}.DenseReluDense"
        each = isinstance(stack.positions, T5BiasOptions) and stack.positions.per_layer
        for layer in range(stack.num_layers if each else 1):
            biases = f"{side}.block.{layer}.{attention}.relative_attention_bias.weight"
            table.append(link(f"{side}.layer_positions.{layer}.weight" if each else f"{side}.positions.weight", biases))
        table.append(link(f"{side}.final_norm.weight", f"{side}.final_layer_norm.weight"))
        modules = {
            "self_attention.qkv": f"{attention}.q {attention}.k {attention}.v",
            "feedforward.up": f"{network}.wi_0 {network}.wi_1" if stack.feedforward.gated else f"{network}.wi",
            "self_attention_norm": "layer.0.layer_norm",
            "self_attention.out": f"{attention}.o",
            "feedforward_norm": f"layer.{SIDES[side]}.layer_norm",
            "feedforward.down": f"{network}.wo",
            "cross_attention_norm": "layer.1.layer_norm",
            "cross_attention.q": "layer.1.EncDecAttention.q",
            "cross_attention.kv": "layer.1.EncDecAttention.k layer.1.EncDecAttention.v",
            "cross_attention.out": "layer.1.EncDecAttention.o",
        }
        table += layer_links(model, side, f"{side}.block", modules)
    if not class_name.endswith(TOKENS):
        return table

    def inside(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(f"transformer.{name}" for name in names)

    table = [replace(one, theirs=inside(one.theirs), also=inside(one.also)) for one in table]
    return [*table, *both("heads.token_classifier.project", "classifier")]


def of_files(section: dict[str, Any], files: WeightFiles) -> dict[str, Any]:
    tied = output_is_tied(files, (TABLE, *COPIES), config_says=section["tie"]["output"])
    return section | {"tie": section["tie"] | {"output": tied}}


T5 = Architecture(
    model_type="t5",
    # The second is the name of the first before version 3 of the library: t5-3b and t5-11b still have it.
    classes={
        "T5ForConditionalGeneration": ("lm",),
        "T5WithLMHeadModel": ("lm",),
        "T5Model": (),
        "T5EncoderModel": (),
        "T5ForTokenClassification": ("token_classifier",),
    },
    family="t5",
    read=read,
    write=write,
    links=links,
    skipped=(r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",),  # never used
    of_files=of_files,
    special_ids={"pad": 0, "eos": 1},
    slow_tokenizer="T5Tokenizer",
    ctranslate2=lambda config: {"layer_norm_epsilon": 1e-6, "scale_decoder_outputs": True},
)
MT5 = replace(
    T5,
    model_type="mt5",
    classes={
        "MT5ForConditionalGeneration": ("lm",),
        "MT5Model": (),
        "MT5EncoderModel": (),
        "MT5ForTokenClassification": ("token_classifier",),
    },
    read=partial(read, table=OF_MT5, projection="gated-gelu", may_scale=False),
    special_ids={**T5.special_ids, "decoder_start": 0},
    ctranslate2=None,
)
UMT5 = replace(
    MT5,
    model_type="umt5",
    classes={"UMT5ForConditionalGeneration": ("lm",), "UMT5Model": (), "UMT5EncoderModel": ()},
    read=partial(read, table=OF_UMT5, projection="gated-gelu"),
)
