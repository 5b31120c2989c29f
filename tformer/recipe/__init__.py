"""The typed recipe: everything that defines a run, how it is loaded and overridden, and how it is written down."""

from __future__ import annotations

from tformer.recipe.load import Resolved, load_recipe, recipe_from_yaml, recipe_to_data, recipe_to_yaml
from tformer.recipe.presets import DEFAULT_PRESETS
from tformer.recipe.recipe import SCHEMA_VERSION, Recipe
from tformer.recipe.schema import json_schema
from tformer.support.shipped import list_presets, preset_summary

__all__ = [
    "DEFAULT_PRESETS",
    "SCHEMA_VERSION",
    "Recipe",
    "Resolved",
    "json_schema",
    "list_presets",
    "load_recipe",
    "preset_summary",
    "recipe_from_yaml",
    "recipe_to_data",
    "recipe_to_yaml",
]
