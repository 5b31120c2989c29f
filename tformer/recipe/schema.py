"""The recipe's schema: keys, types and defaults by path, and the JSON schema for editors.

Both pydantic sections and the option dataclasses of `nn` and `objectives` are supported.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import io
import textwrap
import tokenize
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from pydantic import BaseModel
from pydantic_core import PydanticUndefined, to_jsonable_python

from tformer.recipe.recipe import Recipe
from tformer.recipe.yaml_text import KeyPath
from tformer.support.options import Option, facts_of


class SchemaField(NamedTuple):
    """One key of a section: its type, and its default as plain YAML data (`MISSING` if it must be given)."""

    annotation: Any
    default: Any


MISSING = dataclasses.MISSING


@cache
def fields_of(section: Any) -> dict[str, SchemaField]:
    """The fields of a section or options class by their keys in YAML."""
    if issubclass(section, BaseModel):
        return {
            field.alias or name: SchemaField(field.annotation, _plain(field.get_default(call_default_factory=True)))
            for name, field in section.model_fields.items()
        }
    hints = get_type_hints(section, include_extras=True)
    return {field.name: SchemaField(hints[field.name], _plain(field.default)) for field in dataclasses.fields(section)}


def sections_in(annotation: Any) -> tuple[type, ...]:
    """The section and options classes that a value of this type may be; not those inside its lists."""
    if isinstance(annotation, type) and (issubclass(annotation, BaseModel) or dataclasses.is_dataclass(annotation)):
        return (annotation,)
    if get_origin(annotation) is Annotated:
        return sections_in(get_args(annotation)[0])
    if get_origin(annotation) in (tuple, dict, Literal):
        return ()
    return tuple(section for part in get_args(annotation) for section in sections_in(part))


def field_at(path: KeyPath, data: Any) -> SchemaField | None:
    """The schema of the value at `path`; `data`, the recipe so far, determines the kinds on the way."""
    field: SchemaField | None = SchemaField(Recipe, MISSING)
    node = data
    for name in path:
        if field is None:
            return None
        sections = _of_kind(sections_in(field.annotation), node)
        if sections:
            field = next((fields_of(section)[name] for section in sections if name in fields_of(section)), None)
        else:
            field = item_field(field.annotation)
        node = _step(node, name)
    return field


def sections_at(path: KeyPath, data: Any) -> tuple[type, ...]:
    """The classes allowed at `path`: one, or all of a tagged union while its `kind` is not known."""
    field = field_at(path, data)
    return () if field is None else _of_kind(sections_in(field.annotation), value_at(path, data))


def keys_at(path: KeyPath, data: Any) -> tuple[str, ...]:
    """Every key allowed in the mapping at `path`."""
    return tuple(dict.fromkeys(key for section in sections_at(path, data) for key in fields_of(section)))


def section_of_kind(path: KeyPath, kind: Any, data: Any) -> type | None:
    """The class of the mapping at `path` when it has this kind; None for an unknown kind."""
    field = field_at(path, data)
    sections = () if field is None else sections_in(field.annotation)
    return next((section for section in sections if kind in kinds_of(section)), None)


def inherited_keys(one: type, other: type) -> tuple[str, ...]:
    """The keys of the nearest class from which both inherit, or which both are: they mean the same in both."""
    common = next(parent for parent in one.__mro__ if issubclass(other, parent))
    return tuple(fields_of(common)) if dataclasses.is_dataclass(common) or issubclass(common, BaseModel) else ()


def kinds_of(section: type) -> tuple[Any, ...]:
    """The values that a class allows for `kind`."""
    field = fields_of(section).get("kind")
    return () if field is None else get_args(field.annotation)


def shorthand_at(path: KeyPath, data: Any) -> str | None:
    """The key that a plain value at `path` is short for (`layerdrop: 0.2` is its `rate`), if any."""
    found = (getattr(section, "SHORTHAND", None) for section in sections_at(path, data))
    return next((key for key in found if key is not None), None)


def default_kind(path: KeyPath, data: Any) -> Any:
    """The default `kind` of a mapping at `path`; None where the schema has none."""
    field = field_at(path, data)
    if field is None:
        return None
    if isinstance(field.default, dict) and "kind" in field.default:
        return field.default["kind"]
    sections = sections_in(field.annotation)
    kind = fields_of(sections[0]).get("kind") if len(sections) == 1 else None
    return None if kind is None else kind.default


def known_paths() -> Iterator[KeyPath]:
    """Every key outside lists, for suggestions across sections: `optimizer.lr`, `model.decoder.dropout`, ..."""
    return _walk(Recipe, ())


def _walk(section: type, path: KeyPath) -> Iterator[KeyPath]:
    for name, field in fields_of(section).items():
        yield (*path, name)
        for inner in sections_in(field.annotation):
            yield from _walk(inner, (*path, name))


def all_sections() -> tuple[type, ...]:
    """Every section and options class of the schema, the recipe first."""
    found: dict[type, None] = {Recipe: None}
    waiting: list[type] = [Recipe]
    for section in waiting:
        for field in fields_of(section).values():
            item = item_field(field.annotation)
            for inner in (*sections_in(field.annotation), *(sections_in(item.annotation) if item else ())):
                if inner not in found:
                    found[inner] = None
                    waiting.append(inner)
    return tuple(found)


def _of_kind(sections: tuple[type, ...], node: Any) -> tuple[type, ...]:
    kind = node.get("kind") if isinstance(node, Mapping) else None
    chosen = tuple(section for section in sections if kind in kinds_of(section))
    return chosen if len(sections) > 1 and chosen else sections


def item_field(annotation: Any) -> SchemaField | None:
    """The schema of the items of a list or mapping of that type."""
    if get_origin(annotation) is Annotated:
        return item_field(get_args(annotation)[0])
    if get_origin(annotation) is tuple:
        return SchemaField(get_args(annotation)[0], MISSING)
    if get_origin(annotation) is dict:
        return SchemaField(get_args(annotation)[1], MISSING)
    return next((found for part in get_args(annotation) if (found := item_field(part)) is not None), None)


def _step(node: Any, name: str) -> Any:
    if isinstance(node, Mapping):
        return node.get(name)
    if isinstance(node, list) and name.isdecimal() and int(name) < len(node):
        return node[int(name)]
    return None


def value_at(path: KeyPath, data: Any) -> Any:
    """The value of plain data at `path`; None where there is none."""
    for name in path:
        data = _step(data, name)
    return data


def _plain(default: Any) -> Any:
    return MISSING if default is PydanticUndefined or default is MISSING else to_jsonable_python(default, by_alias=True)


DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schema() -> dict[str, Any]:
    """A JSON schema (draft 2020-12) of recipe files. Nothing is required at the top: a preset may supply it."""
    schema = Recipe.model_json_schema(by_alias=True, mode="validation")
    schema.pop("required")
    definitions = schema["$defs"]
    for section in all_sections():
        definition = schema if section is Recipe else definitions[section.__name__]
        for name, description in field_descriptions(section):
            field = definition["properties"].get(name)
            if field is not None:
                field.setdefault("description", description)
    described = {"title": "tformer recipe", "description": "Everything that defines a run of tformer."}
    return {"$schema": DIALECT, **schema, **described}


def field_descriptions(section: type) -> Iterator[tuple[str, str]]:
    """(name, description) of the fields that have one: the help text of an option, or the comment beside or above the
    field, in the class or in one that it inherits from."""
    written = {name: field.alias or name for name, field in getattr(section, "model_fields", {}).items()}
    for name, hint in get_type_hints(section, include_extras=True).items():
        if name not in written:  # keys of pydantic sections are described by comments
            yield from ((name, fact.help) for fact in facts_of(hint) if isinstance(fact, Option))
    for parent in reversed(section.__mro__):
        if parent.__module__.startswith("tformer."):
            yield from ((written.get(name, name), comment) for name, comment in _commented_fields(parent).items())


@cache
def _commented_fields(section: type) -> dict[str, str]:
    """The comments beside or above the fields that this very class declares."""
    source = textwrap.dedent(inspect.getsource(section))
    beside: dict[int, str] = {}
    alone: dict[int, str] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments = alone if token.line.lstrip().startswith("#") else beside
            comments[token.start[0]] = token.string.lstrip("# ")
    definition = ast.parse(source).body[0]
    assert isinstance(definition, ast.ClassDef)
    found = {
        node.target.id: beside.get(node.end_lineno or 0) or _comment_above(node.lineno, alone)
        for node in definition.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    return {name: comment for name, comment in found.items() if comment}


def _comment_above(line: int, comments: Mapping[int, str]) -> str:
    above: list[str] = []
    while (line := line - 1) in comments:
        above.insert(0, comments[line])
    return " ".join(above)
