"""Longformer (2004.05150): RoBERTa with sliding windows, and separate projections of tokens that see all.

The class for labels makes the first token global; the others none, unless `global_attention_mask` names some (in
`transformers` the class that answers questions names those of the question by itself).
`attention_window` counts the keys of both sides, as a recipe's `window` does.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tformer.interop.architectures import bert, roberta
from tformer.interop.architectures.bert import CONFIG, is_classifier
from tformer.interop.architectures.parts import classes_of, stack_of, with_tasks
from tformer.interop.config import Config
from tformer.interop.mapping import Link, both
from tformer.nn.attention.sliding_window import SlidingWindowOptions
from tformer.recipe.model import Model, layer_sections
from tformer.support.errors import InputError

WINDOW = 512  # where the key is missing


def read(config: Config, class_name: str) -> dict[str, Any]:
    config.ignore("attention_mode", "ignore_attention_mask", "onnx_export")
    values = roberta.read(config, class_name, table=CONFIG)
    return values | {"encoder": with_windows(config, values["encoder"], global_tokens=int(is_classifier(class_name)))}


def with_windows(config: Config, stack: dict[str, Any], *, global_tokens: int) -> dict[str, Any]:
    """A stack's section with the windows of `attention_window`."""
    found = config.take("attention_window", default=WINDOW, kind=(int, list))
    windows = found if isinstance(found, list) else [found] * stack["num_layers"]
    if len(windows) != stack["num_layers"] or not all(
        isinstance(one, int) and one > 0 and one % 2 == 0 for one in windows
    ):
        raise InputError(
            f"{config.name}: attention_window: found {found!r}, expected an even number for each of "
            f"{stack['num_layers']} layers, or one for all"
        )
    stack["attention"] = {
        "kind": "sliding_window",
        "window": windows[0],
        "global_tokens": global_tokens,
        "global_projections": True,
    }
    others = {layer: {"attention": {"window": one}} for layer, one in enumerate(windows) if one != windows[0]}
    return {**stack, "layers": others}


def window_per_layer(model: Model) -> list[int]:
    layers = [layer.attention for layer in layer_sections(stack_of(model, "encoder"), path="model.encoder")]
    return [one.window if isinstance(one, SlidingWindowOptions) else WINDOW for one in layers]


def write(model: Model, class_name: str) -> dict[str, Any]:
    return roberta.write(model, class_name) | {"attention_window": window_per_layer(model)}


def links(model: Model, class_name: str) -> list[Link]:
    table = bert.encoder_links(model, class_name, names=replace(roberta.NAMES, body="longformer"))
    return table + global_links(model, "longformer.encoder.layer.{}.attention.self")


def global_links(model: Model, path: str) -> list[Link]:
    """Links of the projections of global tokens. path: of a layer's attention on disk, `{}` for its number."""
    return [
        one
        for layer in range(stack_of(model, "encoder").num_layers)
        for ending, name in (("q", "query"), ("k", "key"), ("v", "value"))
        for one in both(
            f"encoder.blocks.{layer}.self_attention.mechanism.global_{ending}", f"{path.format(layer)}.{name}_global"
        )
    ]


PLAIN = replace(
    roberta.PLAIN,
    model_type="longformer",
    classes=classes_of("Longformer", "MaskedLM", "SequenceClassification"),
    family="longformer",
    read=read,
    write=write,
    links=links,
    prefix="longformer.",
    pooler="longformer.pooler.dense",
    skipped=roberta.skipped("longformer"),
    special_ids={**roberta.PLAIN.special_ids, "sep": 2},
    slow_tokenizer="LongformerTokenizer",
)
LONGFORMER = with_tasks(PLAIN)
