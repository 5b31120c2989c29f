"""Migrations of stored recipes: one function for each step of the schema, from plain data to plain data.

A new SCHEMA_VERSION needs a row in MIGRATIONS, and a file `schema-<n>.yaml` of the old schema in the tests' fixtures,
as the last release wrote it. Every recipe that tformer writes states its schema; a file without the key is of the
newest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tformer.recipe.recipe import SCHEMA_VERSION
from tformer.support.errors import InputError
from tformer.support.formatting import describe

Migration = Callable[[dict[str, Any]], dict[str, Any]]

MIGRATIONS: Mapping[int, Migration] = {}
"""Row n turns the plain data of a recipe of schema n into that of schema n + 1; schema 1 is the only one so far."""


def migrate(
    data: dict[str, Any], *, name: str, migrations: Mapping[int, Migration] = MIGRATIONS, to: int = SCHEMA_VERSION
) -> dict[str, Any]:
    """The data of a recipe in schema `to`; `name`: of the recipe in messages. InputError for a newer or invalid one."""
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
