"""Migrations of stored recipes: keys that are gone, and one function for each step of the schema.

A new SCHEMA_VERSION needs a row in MIGRATIONS, and a file `schema-<n>.yaml` of the old schema in the tests' fixtures,
as the last release wrote it. Every recipe that tformer writes states its schema; a file without the key is of the
newest.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from tformer.recipe.recipe import SCHEMA_VERSION
from tformer.recipe.schema import value_at
from tformer.recipe.yaml_text import KeyPath
from tformer.support.errors import InputError
from tformer.support.formatting import describe

GONE: Mapping[KeyPath, tuple[Any, str]] = {
    ("generation", "typical_p"): (1.0, "use generation.top_p or generation.min_p"),
    ("generation", "coverage_penalty"): (0.0, "generation.length_penalty remains"),
    ("generation", "beam_groups"): (1, "draw samples with generation.temperature for different texts"),
    ("generation", "diversity_penalty"): (0.0, "draw samples with generation.temperature for different texts"),
    ("training", "parallel", "shard_size"): (
        None,
        "training.parallel.kind fsdp divides over all processes",
    ),
}
"""Keys that runs of earlier versions state -> the value that changed nothing, and what remains for another one."""

RENAMED: Mapping[KeyPath, Mapping[Any, Any]] = {("training", "parallel", "kind"): {"auto": "ddp"}}
"""Values that runs of earlier versions state -> those of the same meaning."""

Migration = Callable[[dict[str, Any]], dict[str, Any]]

MIGRATIONS: Mapping[int, Migration] = {}
"""Row n turns the plain data of a recipe of schema n into that of schema n + 1; schema 1 is the only one so far."""


def migrate(
    data: dict[str, Any], *, name: str, migrations: Mapping[int, Migration] = MIGRATIONS, to: int = SCHEMA_VERSION
) -> dict[str, Any]:
    """The data of a recipe in schema `to`; `name`: of the recipe in messages.

    Raises InputError for a newer or invalid schema, and for a key that is gone: in a recipe that tformer wrote, which
    states its schema, only if the key would change something.
    """
    data = _without_gone(data, name, is_stored="schema" in data)
    found = data.get("schema", to)
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        expected = " or ".join(map(str, range(1, to + 1)))
        raise InputError(f"{name}: schema: found {describe(found)}, expected {expected}")
    if found > to:
        raise InputError(
            f"{name}: schema: found {found}, expected at most {to}: a newer tformer wrote it", hint="upgrade tformer"
        )
    for version in range(found, to):
        data = {**migrations[version](data), "schema": version + 1}
    return data


def _without_gone(data: dict[str, Any], name: str, *, is_stored: bool) -> dict[str, Any]:
    data = copy.deepcopy(data)
    for path, (neutral, remains) in GONE.items():
        section = value_at(path[:-1], data)
        if not isinstance(section, dict) or path[-1] not in section:
            continue
        if (value := section.pop(path[-1])) != neutral or not is_stored:
            found = f"{name}: {'.'.join(path)}: found {describe(value)}, a key that tformer no longer has"
            raise InputError(found, hint=remains)
    for path, names in RENAMED.items() if is_stored else ():
        section = value_at(path[:-1], data)
        if isinstance(section, dict) and isinstance(value := section.get(path[-1]), str):
            section[path[-1]] = names.get(value, value)
    return data
