"""Schema versions, the frozen fixtures, and the JSON schema for editors."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from tformer.errors import InputError
from tformer.recipe import SCHEMA_VERSION, Recipe, json_schema, recipe_from_yaml, recipe_to_yaml
from tformer.recipe.load import recipe_to_data
from tformer.recipe.migrations import MIGRATIONS, migrate
from tformer.recipe.schema_tree import all_sections, fields_of

FIXTURES = Path(__file__).parent / "fixtures"
# A fixture is what a released version wrote: it never changes. A new schema adds a file and a row.
FROZEN = {1: "af21ccc60fc8a112fe8bf097f63a480392c85ee92d7b4e392d94237ce1768025"}


@pytest.mark.parametrize("version", range(1, SCHEMA_VERSION + 1))
def test_a_recipe_of_every_schema_still_loads(version: int) -> None:
    raw = (FIXTURES / f"schema-{version}.yaml").read_bytes()
    assert hashlib.sha256(raw).hexdigest() == FROZEN[version], "frozen fixtures are never edited"
    recipe = recipe_from_yaml(raw.decode(), name=f"schema-{version}.yaml")
    assert recipe.schema_version == SCHEMA_VERSION
    assert recipe_from_yaml(recipe_to_yaml(recipe), name="again") == recipe


def test_the_values_of_schema_1_keep_their_meaning() -> None:
    recipe = recipe_from_yaml((FIXTURES / "schema-1.yaml").read_text(), name="schema-1.yaml")
    data = recipe_to_data(recipe)
    assert data["model"]["decoder"]["positions"] == {
        "kind": "rope",
        "layout": "interleaved",
        "base": 500000.0,
        "scaling": None,
    }
    assert data["model"]["decoder"]["layers"] == {"0": {"dropout": 0.3}}
    assert (recipe.optimizer.kind, recipe.optimizer.lr, recipe.optimizer.adam_lr) == ("muon", 0.02, 0.003)
    assert (recipe.training.batch_size, recipe.training.batch_tokens) == (None, 4096)
    assert (recipe.training.compile, recipe.seed) == ("off", 7)
    assert recipe.tokenizer.train.model == "unigram"


def test_every_step_has_a_migration() -> None:
    assert set(MIGRATIONS) == set(range(1, SCHEMA_VERSION))
    assert set(FROZEN) == set(range(1, SCHEMA_VERSION + 1))


def test_migrations_run_one_after_another() -> None:
    steps: dict[int, Any] = {
        1: lambda data: {"b" if key == "a" else key: value for key, value in data.items()},
        2: lambda data: {**data, "c": data["b"] + 1},
    }
    assert migrate({"a": 1}, name="x", migrations=steps, to=3) == {"b": 1, "c": 2, "schema": 3}
    assert migrate({"b": 5, "schema": 2}, name="x", migrations=steps, to=3) == {"b": 5, "c": 6, "schema": 3}
    assert migrate({"b": 5, "c": 0, "schema": 3}, name="x", migrations=steps, to=3) == {"b": 5, "c": 0, "schema": 3}


def test_a_newer_schema_says_upgrade() -> None:
    with pytest.raises(InputError, match=r"^my\.yaml: schema: found 2, expected at most 1") as caught:
        recipe_from_yaml("schema: 2\nmodel: {}\n", name="my.yaml")
    assert caught.value.hint == "upgrade tformer"


@pytest.mark.parametrize("odd", ["0", "-1", "one", "true", "1.0", "null"])
def test_an_odd_schema_is_refused(odd: str) -> None:
    with pytest.raises(InputError, match=r"my\.yaml: schema: found .*, expected a number from 1 to 1"):
        recipe_from_yaml(f"schema: {odd}\nmodel: {{decoder: {{}}}}\n", name="my.yaml")


def test_the_json_schema_describes_every_key() -> None:
    schema = json_schema()
    json.dumps(schema, allow_nan=False)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["title"] == "tformer recipe" and schema["description"]
    assert "schema" in schema["properties"] and "schema_version" not in schema["properties"]
    assert "required" not in schema and schema["additionalProperties"] is False
    for section in all_sections():
        definition = schema if section is Recipe else schema["$defs"][section.__name__]
        assert set(definition["properties"]) == set(fields_of(section))


def test_comments_in_the_source_become_descriptions() -> None:
    definitions = json_schema()["$defs"]
    assert definitions["Stack"]["properties"]["num_kv_heads"]["description"] == "null: num_heads"
    assert definitions["Stack"]["description"].startswith("An encoder or a decoder")


def test_section_names_are_unique() -> None:
    names = [section.__name__ for section in all_sections()]
    assert len(names) == len(set(names))
    assert all(
        issubclass(section, Recipe.__mro__[1]) or dataclasses.is_dataclass(section) for section in all_sections()
    )
