"""Old recipes keep loading: one pure function for each step of the schema.

`MIGRATIONS[n]` takes the plain data of a recipe of schema n and gives that of schema n + 1. A recipe without `schema`
is of schema 1. Whoever raises `SCHEMA_VERSION` adds a row here and a frozen file `schema-<n>.yaml` of the old schema
to the tests' fixtures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tformer.errors import InputError
from tformer.recipe.recipe import SCHEMA_VERSION
from tformer.recipe.yaml_text import describe

Migration = Callable[[dict[str, Any]], dict[str, Any]]

MIGRATIONS: Mapping[int, Migration] = {}


def migrate(
    data: dict[str, Any], *, name: str, migrations: Mapping[int, Migration] = MIGRATIONS, to: int = SCHEMA_VERSION
) -> dict[str, Any]:
    """Bring the data of a recipe up to schema `to`; `name` is what messages call it. Newer or odd: `InputError`."""
    found = data.get("schema", 1)
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise InputError(f"{name}: schema: found {describe(found)}, expected a number from 1 to {to}")
    if found > to:
        raise InputError(
            f"{name}: schema: found {found}, expected at most {to}: a newer tformer wrote it", hint="upgrade tformer"
        )
    for version in range(found, to):
        data = {**migrations[version](data), "schema": version + 1}
    return data
