"""Parts that several architectures share: names of activations, classification heads, links of layers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from tformer.build import resolve_sizes
from tformer.interop.architecture import Architecture
from tformer.interop.config import MAX_SIZE, Config
from tformer.interop.mapping import SAME, Link, TensorLayout, both, grouped_rows, link, rows
from tformer.interop.weight_files import WeightFiles
from tformer.recipe.model import Model, Stack, layer_sections
from tformer.support.errors import InputError

ACTIVATIONS: Mapping[str, str] = {
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}
"""Names of activations in config.json -> in a recipe; `export` writes the first name of each."""


def activation_name(ours: str) -> str:
    """The name of an activation in config.json; an unknown one (relu2) keeps its name, which reading then refuses."""
    return next((name for name, meaning in ACTIVATIONS.items() if meaning == ours), ours)


def stack_of(model: Model, side: str) -> Stack:
    """The encoder or decoder; InputError when the model has none."""
    stack: Stack | None = getattr(model, side)
    if stack is None:
        raise InputError(f"model.{side}: found none, this architecture has one")
    return stack


def size_by_any_name(config: Config, *names: str, default: int, most: int = MAX_SIZE) -> int:
    """A size that a class reads under several names; InputError when a config gives two different values."""
    found = {name: config.size(name, most=most) for name in names if config.values.get(name) is not None}
    config.ignore(*names)
    if len(set(found.values())) > 1:
        values = " and ".join(f"{name} {size}" for name, size in found.items())
        raise InputError(f"{config.name}: {values}: two names of one size")
    return next(iter(found.values()), default)


def size_or_missing(config: Config, key: str, missing: int | None) -> int | None:
    """A size for which null means none and a missing key the class's own value, `missing`."""
    value: int | None = config.take(key, default=None)
    return value if key in config.values else missing


def label_names(config: Config) -> tuple[str, ...]:
    """The labels of a classifier in the order of their ids; () where the config names none."""
    names = config.take("id2label", default={}, kind=dict)
    try:
        by_id = {int(key): str(name) for key, name in names.items()}
    except ValueError:
        raise InputError(f"{config.name}: id2label: its keys must be whole numbers") from None
    if sorted(by_id) != list(range(len(by_id))):
        raise InputError(f"{config.name}: id2label: found ids {sorted(by_id)}, expected 0 to {len(by_id) - 1}")
    return tuple(by_id[number] for number in range(len(by_id)))


def sequence_head(config: Config, *, default_labels: int = 2, **options: Any) -> dict[str, Any]:
    """The head of a ...ForSequenceClassification class: a classifier, or a regression for one output.

    default_labels: number of outputs if the config does not state it.
    options: pooling, pooler, activation, dropout of the head.
    """
    count = len(label_names(config)) or config.size("num_labels", default=default_labels)
    problem = config.take("problem_type", default=None, kind=str)
    if problem == "regression" or (problem is None and count == 1):
        if count != 1:
            raise InputError(f"{config.name}: problem_type: a regression of {count} numbers, tformer has one of 1")
        return {"kind": "regression", **options}
    config.expect("problem_type", None, "single_label_classification", "multi_label_classification", default=None)
    return {
        "kind": "classifier",
        "num_labels": count,
        "multi_label": problem == "multi_label_classification",
        **options,
    }


def head_dropout(model: Model) -> float | None:
    """The dropout of a head over labels; None: the stack's."""
    return next((head.dropout for head in model.heads if head.kind in ("classifier", "regression")), None)


HEADS = {
    **{"PreTraining": ("masked_lm", "next_sentence"), "MaskedLM": ("masked_lm",)},
    **{"SequenceClassification": ("classifier",), "TokenClassification": ("token_classifier",)},
    "QuestionAnswering": ("span",),
}


def classes_of(stem: str, *tasks: str) -> dict[str, tuple[str, ...]]:
    """Classes `<stem>For<task>` -> the kinds of their heads, and the bare body."""
    return {f"{stem}For{task}": HEADS[task] for task in tasks} | {f"{stem}Model": ()}


TASKS = {
    "ForTokenClassification": ("token_classifier", "classifier"),
    "ForQuestionAnswering": ("span", "qa_outputs"),
    "ForMultipleChoice": ("multiple_choice", "classifier"),
}
"""Endings of classes -> the kind of their head, and the name on disk of its projection."""


DropoutKey = tuple[str, float | None]
"""The key of config.json with the dropout of a head, and what a missing key means; None: as if there were no key."""


def token_head(
    config: Config, class_name: str, *, dropout: DropoutKey | None = None, **options: Any
) -> dict[str, Any] | None:
    """The head of a class in `TASKS`; None for another class.

    dropout: None: the stack's dropout, for spans 0.
    """
    kind = next((kind for task, (kind, _) in TASKS.items() if class_name.endswith(task)), None)
    if kind is None:
        return None
    head = {"kind": kind, **options}
    if kind == "token_classifier":
        head["num_labels"] = len(label_names(config)) or config.size("num_labels", default=2)
    rate = None if dropout is None else config.take(dropout[0], default=dropout[1], kind=float)
    return head if rate is None else head | {"dropout": rate}


def with_tasks(
    architecture: Architecture,
    *,
    dropouts: Mapping[str, DropoutKey] = {},
    tasks: Collection[str] = ("ForTokenClassification", "ForQuestionAnswering"),
) -> Architecture:
    """An architecture with classes of `TASKS`; a head is one projection, of multiple choice after the body's pooler.

    dropouts: by the kind of the head.
    """
    body = next(name for name, heads in architecture.classes.items() if not heads)
    own = {f"{body.removesuffix('Model')}{task}": TASKS[task] for task in tasks}

    def read(config: Config, class_name: str) -> dict[str, Any]:
        if class_name not in own:
            return architecture.read(config, class_name)
        section = architecture.read(config, body)
        return section | {"heads": [token_head(config, class_name, dropout=dropouts.get(own[class_name][0]))]}

    def write(model: Model, class_name: str) -> dict[str, Any]:
        if class_name not in own:
            return architecture.write(model, class_name)
        keys = {dropouts[head.kind][0]: getattr(head, "dropout", None) for head in model.heads if head.kind in dropouts}
        return architecture.write(model, body) | {key: rate for key, rate in keys.items() if rate is not None}

    def links(model: Model, class_name: str) -> Sequence[Link]:
        if class_name not in own:
            return architecture.links(model, class_name)
        kind, output = own[class_name]
        pooler = both(f"heads.{kind}.pooler", str(architecture.pooler)) if kind == "multiple_choice" else []
        return [*architecture.links(model, body), *pooler, *both(f"heads.{kind}.project", output)]

    classes = {**architecture.classes, **{name: (kind,) for name, (kind, _) in own.items()}}
    return replace(architecture, classes=classes, read=read, write=write, links=links)


def token_links(model: Model, table: str, output: str = "lm_head") -> list[Link]:
    """Links of a language model's token table and output, which repeats the table or is a separate matrix."""
    biased = any(getattr(head, "bias", False) for head in model.heads)
    bias = [link("heads.lm.bias", f"{output}.bias")] if biased else []
    if model.tie.output:
        return [link("embedding.weight", table, also=[f"{output}.weight"]), *bias]
    return [link("embedding.weight", table), link("heads.lm.weight", f"{output}.weight"), *bias]


def decoder_links(
    model: Model,
    table: str,
    layers: str,
    modules: Mapping[str, str],
    final_norm: str,
    *,
    layouts: Mapping[str, TensorLayout] = {},
    output: str = "lm_head",
) -> list[Link]:
    """Links of a decoder without a table of positions: tokens, final norm, layers, output."""
    kinds = _parameters_of(stack_of(model, "decoder"), "final_norm")
    return [
        *token_links(model, table, output),
        *[link(f"decoder.final_norm.{kind}", f"{final_norm}.{kind}") for kind in kinds],
        *layer_links(model, "decoder", layers, modules, layouts),
    ]


def layer_links(
    model: Model, side: str, path: str, modules: Mapping[str, str], layouts: Mapping[str, TensorLayout] = {}
) -> list[Link]:
    """Links of all layers of a stack. Which modules have biases or gains is read from the model section.

    Args:
        path: the name of the layers on disk, without their number; layers that share their weights are one there.
        modules: module in a layer -> its name on disk, or the names, separated by spaces, whose rows are stacked in it.
        layouts: of modules that are stored in another layout.
    """
    stack, sizes = stack_of(model, side), resolve_sizes(model, side)
    layers = layer_sections(stack, path=f"model.{side}")
    keys, values = sizes.num_kv_heads * sizes.head_dim, sizes.num_kv_heads * sizes.value_dim
    stacked = {
        "self_attention.qkv": rows(sizes.num_heads * sizes.head_dim, keys, values),
        "self_attention.q_norm": rows(*[sizes.head_dim] * sizes.num_heads),
        "self_attention.k_norm": rows(*[sizes.head_dim] * sizes.num_kv_heads),
        "cross_attention.kv": rows(keys, values),
        "feedforward.up": rows(*[stack.feedforward.hidden_size(sizes.d_model)] * 2),
    }
    found = []
    for number, layer in enumerate(dict.fromkeys(stack.owners)):
        for module, names in modules.items():
            parts = [f"{path}.{number}.{name}" for name in names.split()]
            layout = stacked[module] if len(parts) > 1 else layouts.get(module, SAME)
            if module.startswith("cross_attention") and not (side == "decoder" and model.is_encoder_decoder):
                continue
            if module == "feedforward_norm" and stack.residual == "parallel_one_norm":
                continue
            for kind in _parameters_of(layers[layer], module):
                theirs = [f"{part}.{kind}" for part in parts]
                found.append(link(f"{side}.blocks.{layer}.{module}.{kind}", *theirs, layout=layout))
    return found


def qkv_by_group(model: Model) -> TensorLayout:
    """The layout of a decoder's fused q, k, v that stand group by group."""
    sizes = resolve_sizes(model, "decoder")
    return grouped_rows(groups=sizes.num_kv_heads, heads=sizes.num_heads)


def _parameters_of(stack: Stack, module: str) -> Sequence[str]:
    """The parameters of a module in a layer, `weight` or `bias`."""
    name = module.rpartition(".")[2]
    if name in ("q_norm", "k_norm"):
        kind = stack.attention.qk_norm
        return ["weight", "bias"] if kind == "layernorm" else ["weight"] if isinstance(kind, str) else []
    if name.endswith("_norm"):
        biased = stack.norm.kind == "layernorm" and stack.norm.bias
        if not stack.norm.learned or (name == "self_attention_norm" and not stack.attention_norm):
            return []
    elif name in ("up", "down"):
        biased = stack.feedforward.bias
    else:
        biased = stack.attention.out_bias if name == "out" else stack.attention.qkv_bias
    return ["weight", "bias"] if biased else ["weight"]


def pooled_links(model: Model, *, pooler: str | None = None, project: str) -> list[Link]:
    """Links of the weights of `sequence_head`, classifier or regression.

    Args:
        pooler: the dense layer before the projection, on disk; None: there is none.
        project: the projection to the labels.

    [] for a model without such a head.
    """
    kinds = [head.kind for head in model.heads if head.label_kind is not None]
    if not kinds:
        return []
    head = f"heads.{kinds[0]}"
    return [*(both(f"{head}.pooler", pooler) if pooler else []), *both(f"{head}.project", project)]


OUTPUT = "lm_head.weight"


def output_is_tied(files: WeightFiles, tables: Sequence[str], *, config_says: bool) -> bool:
    """Whether output and embedding are one matrix; compares them if the config says so and the files hold both.

    tables: the names under which files hold the embedding table, the usual one first.
    """
    table = next((name for name in tables if name in files.specs), None)
    if OUTPUT not in files.specs or table is None:
        return True
    if not config_says:
        return False
    if files.specs[OUTPUT].shape != files.specs[table].shape:
        return False
    stored = files.read([OUTPUT, table])
    return torch.equal(stored[OUTPUT], stored[table])
