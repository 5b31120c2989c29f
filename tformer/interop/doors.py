"""The formats in which a model can leave, and what bars the others: the exporters' own checks."""

from __future__ import annotations

from collections.abc import Callable

from tformer.checkpoint.read import Checkpoint
from tformer.interop import exporting, to_ctranslate2, to_gguf, to_onnx
from tformer.interop.choose import Choice
from tformer.interop.peft import as_in_peft
from tformer.support.errors import InputError

PLANS: dict[str, Callable[[Checkpoint], Choice | str]] = {
    "huggingface": lambda one: exporting.planned(one.recipe, exporting.tokenizers_of(one))[0],
    "ctranslate2": to_ctranslate2.plan,
    "gguf": lambda one: to_gguf.plan(one)[1],
    "onnx": to_onnx.plan,
    "peft": lambda one: f"adapters of {as_in_peft(one)[0]}",
}


def doors(checkpoint: Checkpoint) -> list[dict[str, str | None]]:
    """Of each format of `tformer export --to`: what the model is there ("as"), or what bars it ("barred")."""
    found: list[dict[str, str | None]] = []
    for to, plan in PLANS.items():
        try:
            choice = plan(checkpoint)
            named = choice if isinstance(choice, str) else f"{choice.class_name} ({choice.architecture.model_type})"
            found.append({"to": to, "as": named, "barred": None})
        except InputError as error:
            found.append({"to": to, "as": None, "barred": error.message})
    return found
