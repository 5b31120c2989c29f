"""tformer's own architecture: what no class of transformers computes, with the Python code that computes it.

A folder of this type holds `modeling_tformer.py`, which `from_pretrained(..., trust_remote_code=True)` runs, and in
config.json the recipe's model section with all sizes filled in. tformer reads such a folder without running its code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

from tformer.build import build_model, resolve_sizes
from tformer.interop.architecture import Architecture, Code, auto_class, kind_in_classes
from tformer.interop.config import Config
from tformer.interop.mapping import Link, link
from tformer.nn.heads import LmHeadOptions
from tformer.recipe.model import Model
from tformer.support.errors import InputError

MODULE = "modeling_tformer"
KNOWN: dict[str, tuple[object, ...]] = {
    "attention.kind": ("full",),
    "attention.qk_norm": (False, True, "learned", "unit_offset", "width"),
    "attention_norm": (True,),
    "convolution": (0,),
    "layer_groups": (None,),
    "residual": ("sequential",),
    "norm.kind": ("layernorm", "rmsnorm", "scalenorm"),
    "positions.kind": ("none", "sinusoidal", "learned", "rope", "alibi", "t5_bias"),
}
"""Dotted path in a stack -> the values that the code computes."""
CLASSES: dict[str, tuple[str, ...]] = {
    "TformerForCausalLM": ("lm",),
    "TformerForConditionalGeneration": ("lm",),
    "TformerForMaskedLM": ("masked_lm",),
    "TformerForSequenceClassification": ("classifier",),
}
# Keys that transformers adds when it saves a folder of this type again: they follow from `model`.
DERIVED = (
    *("auto_map", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "max_position_embeddings", "tie_word_embeddings", "is_encoder_decoder"),
)


def read(config: Config, class_name: str) -> dict[str, Any]:
    config.ignore(*DERIVED)
    return dict(config.take("model", kind=dict))


def write(model: Model, class_name: str) -> dict[str, Any]:
    if not _fits(model, class_name):
        raise InputError(f"{class_name} has other stacks")
    section = model.model_dump(mode="json", exclude={"init"})
    for side in model.stacks:
        sizes = resolve_sizes(model, side)._asdict()
        stack = section[side]
        stack |= {key: value for key, value in sizes.items() if key in stack}
        if stack["attention"]["scale"] == "auto":
            stack["attention"]["scale"] = stack["head_dim"] ** -0.5
        stack["feedforward"]["d_ff"] = stack["feedforward"]["d_ff"] or 4 * stack["d_model"]
    for options, head in zip(model.heads, section["heads"], strict=True):
        if isinstance(options, LmHeadOptions):
            head["scale"] = options.factor(section["decoder"]["d_model"])
    return {
        "model": section,
        "tie_word_embeddings": model.tie.output or (model.is_encoder_decoder and model.tie.source_target),
        "auto_map": {"AutoConfig": f"{MODULE}.TformerConfig", auto_class(class_name): f"{MODULE}.{class_name}"},
    }


def lacks(model: Model) -> Iterator[str]:
    """`path: value` of every part of a model that the code does not compute."""
    kinds = tuple(map(kind_in_classes, model.heads))
    if not any(kinds == heads and _fits(model, name) for name, heads in CLASSES.items()):
        named = " and ".join(head.kind for head in model.heads) or "none"
        yield f"model.heads: {named} on {' and '.join(model.stacks)}"
    if model.patches is not None:
        yield "model.patches: images"
    if model.max_target_len not in (None, model.max_seq_len):
        yield f"model.max_target_len: {model.max_target_len}"
    if model.embedding.ngram > 1:
        yield f"model.embedding.ngram: {model.embedding.ngram}"
    if model.embedding.target_norm != "sum":
        yield f"model.embedding.target_norm: {model.embedding.target_norm}"
    if model.embedding.convolution:
        yield f"model.embedding.convolution: {model.embedding.convolution}"
    for number, head in enumerate(model.heads):
        if getattr(head, "pooling", None) == "attention":
            yield f"model.heads.{number}.pooling: attention"
        for option, plain in (("pooler_bias", True), ("pooler_norm", False), ("dense_bias", True)):
            if getattr(head, option, plain) != plain:
                yield f"model.heads.{number}.{option}: {str(not plain).lower()}"
    for side, stack in model.stacks.items():
        for path, known in KNOWN.items():
            if (found := attrgetter(path)(stack)) not in known:
                yield f"model.{side}.{path}: {found}"
        if getattr(stack.positions, "scaling", None) is not None:
            yield f"model.{side}.positions.scaling"
        if (share := getattr(stack.positions, "share", 1.0)) != 1.0:
            yield f"model.{side}.positions.share: {share:g}"
        if getattr(stack.positions, "per_layer", False):
            yield f"model.{side}.positions.per_layer: true"
        if getattr(stack.positions, "rounded", False):
            yield f"model.{side}.positions.rounded: true"
        if stack.layers:
            yield f"model.{side}.layers: options of single layers"


def _fits(model: Model, class_name: str) -> bool:
    """Whether a class has the model's stacks."""
    wanted = {"TformerForCausalLM": ["decoder"], "TformerForMaskedLM": ["encoder"]}
    translates = class_name == "TformerForConditionalGeneration"
    return model.is_encoder_decoder == translates and list(model.stacks) == wanted.get(class_name, list(model.stacks))


def links(model: Model, class_name: str) -> list[Link]:
    """tformer's tensors under the names of the code: each stack owns its embedding, and there is one head."""
    built = build_model(model, device="meta")
    first = next(iter(model.stacks))
    renamed = (
        (r"embedding\.", f"{first}.embedding."),
        (r"decoder_embedding\.", "decoder.embedding."),
        (r"heads\.\w+\.", "head."),
    )

    def theirs(name: str) -> str:
        return next((there + name[found.end() :] for ours, there in renamed if (found := re.match(ours, name))), name)

    tied = built.tied_names()
    return [link(name, theirs(name)) for name in built.state_dict() if name not in tied]


OWN = Architecture(
    model_type="tformer",
    classes=CLASSES,
    family="transformer",
    read=read,
    write=write,
    links=links,
    code=Code(f"{MODULE}.py", lacks),
)
