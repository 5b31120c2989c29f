"""Refusal of a `model_type` that tformer does not read: the nearest known type, and the keys that it does not read."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from difflib import SequenceMatcher
from functools import cache
from typing import Any

from tformer.interop.architectures import ARCHITECTURES
from tformer.interop.config import Config
from tformer.support.errors import InputError
from tformer.support.formatting import listed

MAX_LISTED, MAX_NAME = 12, 100
FEWEST_KEYS = 5  # fewer keys fit too many architectures to suggest one


def unknown_type(config: Mapping[str, Any], *, name: str) -> InputError:
    """The refusal of a config.json, which messages call `name`."""
    model_type = config.get("model_type")
    found = "the key is missing" if model_type is None else f"found {model_type!r}, which tformer does not read"
    found = f"{name}: model_type: {found}"
    if len(Config(config).left()) < FEWEST_KEYS:
        return InputError(f"{found}; known: {', '.join(sorted(ARCHITECTURES))}")
    classes = str(config.get("architectures"))  # the class that the file names tells types with the same keys apart

    def distance(known: str) -> tuple[int, bool, int, float]:
        is_named = any(repr(each) in classes for each in ARCHITECTURES[known].classes)
        likeness = SequenceMatcher(None, str(model_type)[:MAX_NAME], known).ratio()
        return len(_left(config, known)), not is_named, len(_read_by(known) - config.keys()), -likeness

    nearest = min((known for known, each in ARCHITECTURES.items() if each.code is None), key=distance)
    if left := _left(config, nearest):
        hint = f"the nearest of the types that tformer reads is {nearest!r}: look for a model of that type"
        return InputError(f"{found}; keys that {nearest!r} does not have: {listed(left, MAX_LISTED)}", hint=hint)
    return InputError(
        f"{found}; its keys are those of {nearest!r}",
        hint=f"if it computes the same, write model_type {nearest!r} into config.json and leave out architectures; "
        "the import checks the names and shapes of its tensors",
    )


def _left(config: Mapping[str, Any], known: str) -> list[str]:
    """The keys with values that a known type does not read."""
    reader = Config(config)
    reader.ignore(*_read_by(known))
    return reader.left()


@cache
def _read_by(known: str) -> frozenset[str]:
    """The keys that a known type reads from a config without any."""
    reader, architecture = Config({}), ARCHITECTURES[known]
    for class_name in architecture.classes:
        with suppress(InputError):
            architecture.section(reader, class_name, pooler=architecture.pooler is not None)
    return frozenset(reader.taken)
