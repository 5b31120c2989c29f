"""Parts that several architectures share: names of activations, classification heads, sizes of a stack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tformer.interop.config import Config
from tformer.interop.mapping import Link, both, link
from tformer.interop.weight_files import WeightFiles
from tformer.recipe.model import Model, Stack
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


def head_dim(model: Model, stack: Stack) -> int:
    width = model.d_model if stack.d_model is None else stack.d_model
    return width // stack.num_heads if stack.head_dim is None else stack.head_dim


def d_ff_of(model: Model, stack: Stack) -> int:
    width = model.d_model if stack.d_model is None else stack.d_model
    return 4 * width if stack.feedforward.d_ff is None else stack.feedforward.d_ff


def size_by_any_name(config: Config, *names: str, default: int) -> int:
    """A size that a class reads under several names; InputError when a config gives two different values."""
    found = {name: config.size(name) for name in names if config.values.get(name) is not None}
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


def num_labels(config: Config, *, default: int = 2) -> int:
    """Number of outputs of a classifier; `default` when the config does not state it."""
    return len(label_names(config)) or config.size("num_labels", default=default)


def sequence_head(config: Config, *, default_labels: int = 2, **options: Any) -> dict[str, Any]:
    """The head of a ...ForSequenceClassification class: a classifier, or a regression for one output.

    options: pooling, pooler, activation, dropout of the head.
    """
    count = num_labels(config, default=default_labels)
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


def token_links(model: Model, table: str) -> list[Link]:
    """Links of a language model's token table and output: lm_head repeats the table or is a separate matrix."""
    if model.tie.output:
        return [link("embedding.weight", table, also=["lm_head.weight"])]
    return [link("embedding.weight", table), link("heads.lm.weight", "lm_head.weight")]


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
    """Whether output and embedding are one matrix; compares them when the config says so and the files hold both.

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
