"""Migrations of stored recipes: one function for each step of the schema, from plain data to plain data.

A new SCHEMA_VERSION needs a row in MIGRATIONS and a frozen file `schema-<n>.yaml` of the old schema in the tests'
fixtures. Every recipe that tformer writes states its schema; a file without the key is of the newest one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tformer.recipe.recipe import SCHEMA_VERSION
from tformer.recipe.yaml_text import describe
from tformer.support.errors import InputError

Migration = Callable[[dict[str, Any]], dict[str, Any]]


def decoder_windows(data: dict[str, Any]) -> dict[str, Any]:
    """Schema 1 -> 2: a decoder's window counts all of its visible keys, not twice as many.

    `attention.window` was twice the reach in encoders and decoders; now it is the number of visible keys beside the
    query's own in both, which is the reach itself in a decoder.
    """
    model = data.get("model")
    decoder = model.get("decoder") if isinstance(model, dict) else None
    if not isinstance(model, dict) or not isinstance(decoder, dict):
        return data
    attention, layers = decoder.get("attention"), decoder.get("layers")
    slides = isinstance(attention, dict) and attention.get("kind") == "sliding_window"
    changed = dict(decoder)
    if isinstance(attention, dict):
        changed["attention"] = _halved(attention, default=slides)
    if isinstance(layers, dict):
        changed["layers"] = {
            number: {**layer, "attention": _halved(layer["attention"], default=not slides)}
            if isinstance(layer, dict) and isinstance(layer.get("attention"), dict)
            else layer
            for number, layer in layers.items()
        }
    return {**data, "model": {**model, "decoder": changed}}


OLD_WINDOW = 256  # the default of schema 1


def _halved(attention: dict[str, Any], *, default: bool) -> dict[str, Any]:
    """The options with half the window. default: sliding windows without a stated size had the default one."""
    window = attention.get("window")
    if window is None and default and attention.get("kind") == "sliding_window":
        window = OLD_WINDOW
    return {**attention, "window": window // 2} if type(window) is int and window % 2 == 0 else attention


def without_removed_keys(data: dict[str, Any]) -> dict[str, Any]:
    """Schema 2 -> 3: two keys of `training` are no more. Where they were used they stay, and are refused by name."""
    training = data.get("training")
    if not isinstance(training, dict):
        return data
    removed = ("average_last", "consistency")
    kept = {key: value for key, value in training.items() if key not in removed or value is not None}
    return {**data, "training": kept}


MIGRATIONS: Mapping[int, Migration] = {1: decoder_windows, 2: without_removed_keys}
"""Row n turns the plain data of a recipe of schema n into that of schema n + 1."""


def migrate(
    data: dict[str, Any], *, name: str, migrations: Mapping[int, Migration] = MIGRATIONS, to: int = SCHEMA_VERSION
) -> dict[str, Any]:
    """The data of a recipe in schema `to`; `name`: of the recipe in messages. InputError for a newer or invalid one."""
    found = data.get("schema", to)
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise InputError(f"{name}: schema: found {describe(found)}, expected a number from 1 to {to}")
    if found > to:
        raise InputError(
            f"{name}: schema: found {found}, expected at most {to}: a newer tformer wrote it", hint="upgrade tformer"
        )
    for version in range(found, to):
        data = {**migrations[version](data), "schema": version + 1}
    return data
