"""Which of Hugging Face's classes computes what a recipe's model computes.

Every class with the model's heads is asked to write its config; what that config says is read back and compared. A
class without a difference is the one. Otherwise the export is refused, naming what came out different in the class
that comes nearest: nothing is ever exported approximately.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from tformer.errors import InputError, did_you_mean
from tformer.interop.architecture import Architecture
from tformer.interop.architectures import ARCHITECTURES
from tformer.interop.canonical import differences
from tformer.interop.config import Config
from tformer.recipe.model import Model

MAX_LISTED = 6


@dataclass(frozen=True)
class Choice:
    """A class and the keys of its config.json that describe the model."""

    architecture: Architecture
    class_name: str
    config: dict[str, Any]


def choose_class(model: Model, *, family: str, model_type: str | None = None) -> Choice:
    """The class to export to.

    Args:
        model: resolved (vocabulary sizes and numbers of labels filled in).
        family: the recipe's `arch`, whose architectures are tried first.
        model_type: the only one to try; None: all.

    Raises:
        InputError: no class computes this; names the fields, or an unknown `model_type`.
    """
    if model_type is not None and model_type not in ARCHITECTURES:
        raise InputError(
            f"model type {model_type!r} is not one of {', '.join(sorted(ARCHITECTURES))}",
            hint=did_you_mean(model_type, list(ARCHITECTURES)),
        )
    kinds = tuple(head.kind for head in model.heads)
    candidates = [
        (architecture, class_name)
        for architecture in sorted(ARCHITECTURES.values(), key=lambda one: one.family != family)
        for class_name, heads in architecture.classes.items()
        if sorted(heads) == sorted(kinds) and model_type in (None, architecture.model_type)
    ]
    refusals: list[tuple[int, str, str]] = []
    for architecture, class_name in candidates:
        config, problems = _attempt(model, architecture, class_name)
        if not problems:
            return Choice(architecture, class_name, config)
        refusals.append((len(problems), class_name, "; ".join(problems[:MAX_LISTED])))
    if not refusals:
        where = f" of {model_type}" if model_type else ""
        raise InputError(f"model.heads: no class{where} of Hugging Face has the heads {', '.join(kinds) or 'none'}")
    _, class_name, problem = min(refusals, key=lambda refusal: refusal[0])
    raise InputError(f"no class of Hugging Face computes this model; {class_name} comes nearest: {problem}")


def label_keys(model: Model) -> dict[str, Any]:
    """The keys of config.json that a head over labels is read from; their names are the caller's to give."""
    for head in model.heads:
        if head.kind == "classifier":
            count = head.num_labels or 0
            problem = "multi_label_classification" if head.multi_label else "single_label_classification"
            names = [f"LABEL_{number}" for number in range(count)]
        elif head.kind == "regression":
            problem, names = "regression", ["LABEL_0"]
        else:
            continue
        return {"problem_type": problem, "id2label": {str(number): name for number, name in enumerate(names)}}
    return {}


def _attempt(model: Model, architecture: Architecture, class_name: str) -> tuple[dict[str, Any], list[str]]:
    """The config of a class, and what keeps it from being this model."""
    try:
        config = architecture.write(model, class_name)
        reader = Config(label_keys(model) | config, name="export")
        found = Model.model_validate(architecture.read(reader, class_name))
        reader.finish()
    except InputError as error:
        return {}, [error.message]
    except ValidationError as error:
        return {}, [str(error.errors()[0]["msg"])]
    return config, [f"{path} is {ours!r}, there {theirs!r}" for path, ours, theirs in differences(model, found)]
