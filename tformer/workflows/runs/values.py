"""A recipe as flat keys and values, for saying where two differ."""

from __future__ import annotations

from typing import Any

from tformer.recipe import recipe_to_data
from tformer.recipe.load import leaves
from tformer.recipe.recipe import Recipe

OWN = ("schema", "arch", "preset")  # what names a recipe, and does not make it


def flat_recipe(recipe: Recipe) -> dict[str, Any]:
    """{dotted key: value} in the schema's order; positions in lists are keys too (`objectives.0.kind`)."""
    data = recipe_to_data(recipe)
    return {".".join(path): _at(data, path) for path in leaves(data)}


def _at(data: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        data = data[int(key)] if isinstance(data, list) else data[key]
    return data
