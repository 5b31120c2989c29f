"""tformer's own architecture: what no class of transformers computes, with the Python code that computes it.

A folder of this type holds `modeling_tformer.py`, which `from_pretrained(..., trust_remote_code=True)` runs, and in
config.json the recipe's model section with all sizes filled in. tformer reads such a folder without running its code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from tformer.build import build_model, resolve_sizes
from tformer.interop.architecture import Architecture, Code, auto_class, kind_in_classes
from tformer.interop.config import Config
from tformer.interop.mapping import Link, link
from tformer.nn.heads import LmHeadOptions
from tformer.recipe.model import Model
from tformer.support.errors import InputError

MODULE = "modeling_tformer"
OF_MODEL: dict[str, tuple[object, ...]] = {
    "patches": (None,),
    "embedding.ngram": (1,),
    "embedding.target_norm": ("sum",),
    "embedding.convolution": (0,),
}
OF_HEADS = {
    **{"pooling": ("cls", "mean", "max", "eos"), "pooler_bias": (True,), "pooler_norm": (False,)},
    "dense_bias": (True,),
}
OF_STACKS: dict[str, tuple[object, ...]] = {
    "attention.kind": ("full",),
    "attention.qk_norm": (False, True, "learned", "unit_offset", "width"),
    "attention_norm": (True,),
    "convolution": (0,),
    "layer_groups": (None,),
    "residual": ("sequential",),
    "norm.kind": ("layernorm", "rmsnorm", "scalenorm"),
    "positions.kind": ("none", "sinusoidal", "learned", "rope", "alibi", "t5_bias"),
    **{"positions.scaling": (None,), "positions.share": (1.0,), "positions.per_layer": (False,)},
    **{"positions.rounded": (False,), "layers": ({},)},
}
"""Dotted paths -> the values that the code computes, the first of which stands for a missing option."""
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
    head_kinds = tuple(map(kind_in_classes, model.heads))
    if not any(head_kinds == heads and _fits(model, name) for name, heads in CLASSES.items()):
        named = " and ".join(head.kind for head in model.heads) or "none"
        yield f"model.heads: {named} on {' and '.join(model.stacks)}"
    sections: list[tuple[str, object, Mapping[str, tuple[object, ...]]]] = [("", model, OF_MODEL)]
    sections.append(("", model, {"max_target_len": (None, model.max_seq_len)}))
    sections += [(f".heads.{number}", head, OF_HEADS) for number, head in enumerate(model.heads)]
    sections += [(f".{side}", stack, OF_STACKS) for side, stack in model.stacks.items()]
    for place, section, known in sections:
        for path, values in known.items():
            value: Any = section
            for name in path.split("."):
                value = getattr(value, name, values[0])
            if value not in values:
                shown = str(value).lower() if isinstance(value, bool) else value
                yield f"model{place}.{path}" + (f": {shown}" if isinstance(value, str | int | float) else "")


def _fits(model: Model, class_name: str) -> bool:
    """Whether a class has the same stacks as the model."""
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
