"""Whether checkpoints are the same model with other weights, so that their tensors may be averaged one by one.

Told from manifests, recipes and the headers of tensor files alone, before any tensor is read.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tformer.checkpoint.read import Checkpoint
from tformer.checkpoint.vocabularies import file_names
from tformer.errors import InputError
from tformer.recipe.load import recipe_from_yaml, recipe_to_data

AVERAGED_ROLES = ("weights", "generator")
# What a tensor's numbers mean depends on these parts of the recipe; all others may differ (another seed, more steps).
RECIPE_PARTS = ("model", "generator", "tokenizer.special_ids", "data.labels", "data.image_mean", "data.image_std")


def require_distinct(checkpoints: Sequence[Checkpoint]) -> None:
    """Raises InputError when two of them are one folder, by whatever name."""
    seen: dict[str, Path] = {}
    for checkpoint in checkpoints:
        place = os.path.realpath(checkpoint.path)
        if place in seen:
            also = "" if seen[place] == checkpoint.path else f" (also as {seen[place]})"
            raise InputError(f"{checkpoint.path} is named twice{also}", hint="name each checkpoint once")
        seen[place] = checkpoint.path


def require_alike(checkpoints: Sequence[Checkpoint]) -> None:
    """Raises InputError, naming the file of the first that differs and in what, unless all have the same tokenizers,
    model, labels, tensors, shapes and types as the first."""
    first, *others = checkpoints
    recipe = _recipe(first) if others else {}
    for other in others:
        _compare_tokenizers(first, other)
        _compare_recipes(first, recipe, other)
        for role in AVERAGED_ROLES:
            _compare_tensors(first, other, role)


def _compare_tokenizers(first: Checkpoint, other: Checkpoint) -> None:
    if (first.target_tokenizer_sha256 is None) != (other.target_tokenizer_sha256 is None):
        one, two = (f"{1 + (c.target_tokenizer_sha256 is not None)}" for c in (first, other))
        raise InputError(f"{other.path} has {two} vocabularies, expected as in {first.path}: {one}")
    names = file_names(separate=first.target_tokenizer_sha256 is not None)
    sides = {
        "tokenizer": (first.tokenizer_sha256, other.tokenizer_sha256),
        "target_tokenizer": (first.target_tokenizer_sha256, other.target_tokenizer_sha256),
    }
    for role, (expected, found) in sides.items():
        if expected != found:
            raise InputError(
                f"{other.path / names[role]} is not the tokenizer of {first.path}: its sha256 is {_short(found)}, "
                f"expected {_short(expected)}",
                hint="only checkpoints with the same vocabulary can be averaged",
            )


def _short(sha256: str | None) -> str:
    return "missing" if sha256 is None else f"{sha256[:16]}..."


def _recipe(checkpoint: Checkpoint) -> dict[str, Any]:
    return recipe_to_data(recipe_from_yaml(checkpoint.recipe_text, name=str(checkpoint.path / "recipe.yaml")))


def _compare_recipes(first: Checkpoint, expected: Mapping[str, Any], other: Checkpoint) -> None:
    found = _recipe(other)
    for part in RECIPE_PARTS:
        for key, ours, theirs in _differences(_at(expected, part), _at(found, part), part):
            raise InputError(
                f"{other.path / 'recipe.yaml'}: {key} is {_word(theirs)}, in {first.path} it is {_word(ours)}",
                hint="only checkpoints of the same model can be averaged",
            )


def _at(data: Any, key: str) -> Any:
    for word in key.split("."):
        data = data[word]
    return data


def _differences(expected: Any, found: Any, key: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(expected, dict) and isinstance(found, dict):
        for name in itertools.chain(expected, (name for name in found if name not in expected)):
            yield from _differences(expected.get(name), found.get(name), f"{key}.{name}")
    elif expected != found:
        yield key, expected, found


def _word(value: Any) -> str:
    """A value in a message: sections and long lists only by their sort."""
    text = "null" if value is None else str(value)
    return text if len(text) <= 60 and not isinstance(value, dict) else f"{text[:57]}..."


def _compare_tensors(first: Checkpoint, other: Checkpoint, role: str) -> None:
    expected, found = first.specs(role), other.specs(role)
    odd = sorted(expected.keys() ^ found.keys())
    if odd:
        has, lacks = (first, other) if odd[0] in expected else (other, first)
        raise InputError(f"{lacks.path} has no tensor {odd[0]} among its {role}, {has.path} has")
    for name, spec in expected.items():
        ours, theirs = (f"{s.dtype} {list(s.shape)}".removeprefix("torch.") for s in (spec, found[name]))
        if ours != theirs:
            raise InputError(f"{other.path}: {role} tensor {name} is {theirs}, in {first.path} it is {ours}")
    if role == "weights" and first.tied != other.tied:
        alias = min(dict(first.tied).items() ^ dict(other.tied).items())[0]
        raise InputError(f"{other.path}: tensor {alias} is not tied as it is in {first.path}")
