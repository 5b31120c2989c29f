"""The formats in which a model can leave, and what bars the others: the exporters' own checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from tformer.checkpoint.read import Checkpoint
from tformer.interop import exporting, to_gguf, to_onnx
from tformer.interop.choose import ExportTarget
from tformer.interop.peft import as_in_peft, class_of_adapted
from tformer.recipe.recipe import Recipe
from tformer.support.errors import InputError

Plans = Mapping[str, Callable[[Checkpoint], ExportTarget | str]]
PLANS: Plans = {
    "huggingface": lambda one: exporting.planned(one.recipe, exporting.tokenizers_of(one))[0],
    "gguf": lambda one: to_gguf.plan(one)[1],
    "onnx": to_onnx.plan,
    "peft": lambda one: f"adapters of {as_in_peft(one)[0]}",
}


BY_RECIPE: Plans = {**PLANS, "peft": lambda one: f"adapters of {class_of_adapted(one)[2]}"}


def doors(checkpoint: Checkpoint, plans: Plans = PLANS) -> list[dict[str, str | None]]:
    """For each format of `tformer export --to` the class of the model ("as"), or the obstacle ("barred")."""
    found: list[dict[str, str | None]] = []
    for to, plan in plans.items():
        try:
            choice = plan(checkpoint)
            named = choice if isinstance(choice, str) else f"{choice.class_name} ({choice.architecture.model_type})"
            found.append({"to": to, "as": named, "barred": None})
        except InputError as error:
            found.append({"to": to, "as": None, "barred": error.message})
    return found


def formats_by_recipe(checkpoint: Checkpoint, recipe: Recipe) -> list[str]:
    """The formats that the recipe allows, without a look at tokenizers and weights.

    recipe: the checkpoint's, with the vocabulary's size.
    """
    bare = replace(checkpoint, tokenizer_json=None, target_tokenizer_json=None)
    bare.recipe = recipe
    return [str(one["to"]) for one in doors(bare, BY_RECIPE) if one["as"]]
