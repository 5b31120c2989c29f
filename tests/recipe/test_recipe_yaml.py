"""Recipes as YAML text, and the JSON schema."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tformer.nn.attention.sliding_window import SlidingWindowOptions
from tformer.recipe import SCHEMA_VERSION, Recipe, json_schema, recipe_from_yaml, recipe_to_yaml
from tformer.recipe.migrations import GONE, MIGRATIONS, migrate
from tformer.recipe.schema import all_sections, fields_of
from tformer.recipe.yaml_text import MAX_BYTES, parse_value, parse_yaml, read_yaml, resolve_scalar, to_yaml
from tformer.support.errors import InputError

SCALARS: dict[str, Any] = {
    "1e-3": 1e-3,
    "1E5": 1e5,
    "1.0e-5": 1e-5,
    ".5": 0.5,
    "3.": 3.0,
    "-2": -2,
    "25_000": 25000,
    "0": 0,
    "true": True,
    "False": False,
    "on": "on",
    "off": "off",
    "yes": "yes",
    "no": "no",
    "y": "y",
    "null": None,
    "~": None,
    "": None,
    "007": "007",
    "0x1F": "0x1F",
    "1:30": "1:30",
    "2024-01-31": "2024-01-31",
    "=": "=",
    "bf16": "bf16",
    "nan": "nan",
    ".inf": float("inf"),
}


@pytest.mark.parametrize(("text", "value"), SCALARS.items())
def test_plain_scalars_mean_what_a_person_expects(text: str, value: Any) -> None:
    assert resolve_scalar(text) == value
    assert type(resolve_scalar(text)) is type(value)
    assert parse_yaml(f"key: {text}", name="x").value == {"key": value}


def test_quoted_scalars_are_text() -> None:
    assert parse_yaml("a: '7'\nb: \"true\"\nc: |\n  1\n", name="x").value == {"a": "7", "b": "true", "c": "1\n"}


def test_huge_numbers_are_read_without_work() -> None:
    assert isinstance(resolve_scalar("9" * 100_000), str)


def test_keys_are_text_as_written() -> None:
    assert parse_yaml("layers: {0: {dropout: 0.1}, on: 1}", name="x").value == {
        "layers": {"0": {"dropout": 0.1}, "on": 1}
    }


def test_lines_are_those_of_the_keys() -> None:
    lines = parse_yaml(
        "# header\nmodel:\n  heads:\n    - {kind: lm}\n    - kind: classifier\n\nseed: 3\n", name="x"
    ).lines
    assert lines[("model",)] == 2
    assert lines[("model", "heads")] == 3
    assert lines[("model", "heads", "0", "kind")] == 4
    assert lines[("model", "heads", "1", "kind")] == 5
    assert lines[("seed",)] == 7


REFUSED = {
    "alias": ("a: 1\nb: *x\n", 2, "alias '*x'"),
    "anchor": ("a: &x [1]\nb: *x\n", 1, "anchor '&x'"),
    "anchored key": ("&x a: 1\n", 1, "anchor '&x'"),
    "duplicate": ("a: 1\nb: 2\na: 3\n", 3, "duplicate key 'a', expected once (first at line 1)"),
    "nested duplicate": ("m:\n  a: 1\n  a: 1\n", 3, "duplicate key 'm.a'"),
    "flow duplicate": ("m: {a: 1, a: 2}\n", 1, "duplicate key 'm.a'"),
    "python object": ("a: !!python/object/apply:os.system [echo]\n", 1, "tag '!!python/object/apply:os.system'"),
    "python name": ("a: 1\nb: !!python/name:os.system\n", 2, "tag '!!python/name:os.system'"),
    "own tag": ("a: !thing 3\n", 1, "tag '!thing'"),
    "standard tag": ("a: !!str 3\n", 1, "tag '!!str'"),
    "two documents": ("a: 1\n---\nb: 2\n", 2, "second document"),
    "deep": ("a: " + "[" * 40 + "]" * 40, 1, "nested more than 32 levels"),
    "never closed": ("a: " + "[" * 200_000, 1, "nested more than 32 levels"),
    "complex key": ("? [a, b]\n: 1\n", 1, "key that is a list or a mapping"),
    "unclosed": ("a: [1,\n", 2, "not valid YAML"),
    "tab": ("a:\n\t- 1\n", 2, "not valid YAML"),
    "control character": ("a: 1\nb: \x01\n", 2, "control character"),
}


@pytest.mark.parametrize(("text", "line", "message"), REFUSED.values(), ids=REFUSED)
def test_unsafe_or_ambiguous_yaml_is_refused_by_line(text: str, line: int, message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_yaml(text, name="my.yaml")
    assert caught.value.message.startswith(f"my.yaml:{line}: ")
    assert message in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("text", ["[1, 2]", "just text", "3", "", "# only a comment\n", "---\n"])
def test_top_level_must_be_a_mapping(text: str) -> None:
    with pytest.raises(InputError, match="expected a mapping of sections"):
        parse_yaml(text, name="my.yaml")


def test_billion_laughs_is_refused_at_once() -> None:
    levels = [f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]" for n in range(1, 10)]
    with pytest.raises(InputError, match="anchor"):
        parse_yaml("\n".join(["l0: &l0 lol", *levels]), name="bomb.yaml")


def test_python_tags_never_run(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    with pytest.raises(InputError):
        parse_yaml(
            f"a: !!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path ['{canary}']]", name="x"
        )
    assert not canary.exists()


def test_files_over_one_megabyte_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "big.yaml"
    path.write_text("# " + "x" * MAX_BYTES)
    with pytest.raises(InputError, match="more than 1 MB"):
        read_yaml(path)


def test_unreadable_files_are_input_errors(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.yaml: no such file"):
        read_yaml(tmp_path / "none.yaml")
    with pytest.raises(InputError, match="found a folder"):
        read_yaml(tmp_path)
    bad = tmp_path / "bad.yaml"
    bad.write_bytes(b"a: 1\nb: \xff\n")
    with pytest.raises(InputError, match=r"bad\.yaml:2: invalid UTF-8 at byte 8"):
        read_yaml(bad)


def test_byte_order_mark_and_windows_lines_are_read(tmp_path: Path) -> None:
    path = tmp_path / "windows.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: 1\r\nb:\r\n  c: on\r\n")
    assert read_yaml(path).value == {"a": 1, "b": {"c": "on"}}


def test_values_of_set_are_scalars_or_flow() -> None:
    values = {
        "1e-3": 1e-3,
        " 7 ": 7,
        "null": None,
        "": None,
        "'7'": "7",
        "[1, 2]": [1, 2],
        "{kind: rope, base: 5e5}": {"kind": "rope", "base": 5e5},
        "KING: hello # there": "KING: hello # there",
        "*x": "*x",
    }
    assert {text: parse_value(text, name="--set x") for text in values} == values
    with pytest.raises(InputError, match="--set x:1: not valid YAML"):
        parse_value("[1", name="--set x")


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=30) | st.sampled_from(sorted(SCALARS))
LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS
VALUES = st.recursive(LEAVES, lambda v: st.lists(v, max_size=4) | st.dictionaries(TEXTS, v, max_size=4), max_leaves=20)


@given(st.dictionaries(TEXTS, VALUES, min_size=1, max_size=4))
def test_what_is_written_is_read_back_exactly(value: dict[str, Any]) -> None:
    text = to_yaml(value)
    assert parse_yaml(text, name="x").value == value
    assert parse_yaml(to_yaml(value, comment=lambda path: "a note"), name="x").value == value


@given(st.dictionaries(st.from_regex(r"[a-z_]{1,9}", fullmatch=True), LEAVES, min_size=1, max_size=5))
def test_what_is_written_means_the_same_to_other_yaml_readers(value: dict[str, Any]) -> None:
    expected = {f"key_{name}": item for name, item in value.items()}  # keys such as `on` are booleans in YAML 1.1
    assert yaml.safe_load(to_yaml(expected)) == expected


@pytest.mark.parametrize("version", range(1, SCHEMA_VERSION + 1))
def test_a_recipe_of_every_schema_loads(version: int) -> None:
    """A fixture is what a release wrote: from then on it never changes."""
    text = (Path(__file__).parent / "fixtures" / f"schema-{version}.yaml").read_text()
    recipe = recipe_from_yaml(text, name=f"schema-{version}.yaml")
    assert recipe.schema_version == SCHEMA_VERSION
    assert recipe_from_yaml(recipe_to_yaml(recipe), name="again") == recipe


@pytest.mark.parametrize("path", GONE, ids=".".join)
def test_a_key_that_is_gone_is_read_where_it_changed_nothing(path: tuple[str, ...]) -> None:
    def stated(value: Any) -> str:
        for key in reversed(path):
            value = {key: value}
        return yaml.safe_dump({"schema": 1, "model": {"decoder": {}}} | value)

    neutral, remains = GONE[path]
    assert recipe_from_yaml(stated(neutral), name="old.yaml") == recipe_from_yaml("model: {decoder: {}}", name="x")
    with pytest.raises(
        InputError, match=rf"^old\.yaml: {'.'.join(path)}: found 7, a key that tformer no longer"
    ) as caught:
        recipe_from_yaml(stated(7), name="old.yaml")
    assert caught.value.hint == remains


@pytest.mark.parametrize("path", GONE, ids=".".join)
def test_a_file_of_the_newest_schema_may_not_state_a_key_that_is_gone(path: tuple[str, ...]) -> None:
    """A recipe that tformer wrote states its schema; one that a user writes states none."""
    neutral, remains = GONE[path]
    value = neutral
    for key in reversed(path):
        value = {key: value}
    with pytest.raises(InputError, match=rf"^my\.yaml: {'.'.join(path)}: .* a key that tformer no longer") as caught:
        recipe_from_yaml(yaml.safe_dump({"model": {"decoder": {}}} | value), name="my.yaml")
    assert caught.value.hint == remains


def test_a_value_that_is_renamed_is_read_in_stored_recipes() -> None:
    text = "model: {decoder: {}}\ntraining: {parallel: {kind: auto}}\n"
    assert recipe_from_yaml(f"schema: 1\n{text}", name="old.yaml").training.parallel.kind == "ddp"
    with pytest.raises(InputError, match=r"^my\.yaml:2: training\.parallel\.kind"):
        recipe_from_yaml(text, name="my.yaml")


def test_a_recipe_without_a_schema_is_of_the_newest() -> None:
    text = "model: {decoder: {attention: {kind: sliding_window, window: 7}}}\n"
    stack = recipe_from_yaml(text, name="my.yaml").model.decoder
    assert stack is not None and stack.attention == SlidingWindowOptions(window=7)


def test_every_step_has_a_migration() -> None:
    assert set(MIGRATIONS) == set(range(1, SCHEMA_VERSION))


def test_migrations_run_one_after_another() -> None:
    steps: dict[int, Any] = {
        1: lambda data: {"b" if key == "a" else key: value for key, value in data.items()},
        2: lambda data: {**data, "c": data["b"] + 1},
    }
    assert migrate({"a": 1, "schema": 1}, name="x", migrations=steps, to=3) == {"b": 1, "c": 2, "schema": 3}
    assert migrate({"b": 5, "schema": 2}, name="x", migrations=steps, to=3) == {"b": 5, "c": 6, "schema": 3}
    assert migrate({"b": 5, "c": 0, "schema": 3}, name="x", migrations=steps, to=3) == {"b": 5, "c": 0, "schema": 3}


def test_a_newer_schema_says_upgrade() -> None:
    with pytest.raises(InputError, match=r"^my\.yaml: schema: found 2, expected at most 1") as caught:
        recipe_from_yaml("schema: 2\nmodel: {}\n", name="my.yaml")
    assert caught.value.hint == "upgrade tformer"


@pytest.mark.parametrize("odd", ["0", "-1", "one", "true", "1.0", "null"])
def test_an_odd_schema_is_refused(odd: str) -> None:
    with pytest.raises(InputError, match=r"my\.yaml: schema: found .*, expected 1$"):
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
    assert definitions["Stack"]["properties"]["num_kv_heads"]["description"].endswith("; null: num_heads")
    assert definitions["Stack"]["description"].startswith("An encoder or a decoder")


def test_section_names_are_unique() -> None:
    names = [section.__name__ for section in all_sections()]
    assert len(names) == len(set(names))
    assert all(
        issubclass(section, Recipe.__mro__[1]) or dataclasses.is_dataclass(section) for section in all_sections()
    )
