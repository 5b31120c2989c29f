"""Explanations of recipe keys: type, default, meaning and papers, and the presets that set the key.

Everything comes from the schema: the comments beside the fields, the docstrings of their classes, and the arXiv ids
that these name.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from tformer.recipe.recipe import Recipe
from tformer.recipe.schema import (
    MISSING,
    SchemaField,
    field_descriptions,
    fields_of,
    item_field,
    json_schema,
    kinds_of,
    known_paths,
    sections_in,
)
from tformer.recipe.yaml_text import KeyPath, read_yaml
from tformer.support.errors import InputError, did_you_mean
from tformer.support.shipped import list_presets, preset_path

ARXIV = re.compile(r"\b\d{4}\.\d{4,5}\b")


@dataclass(frozen=True)
class Explanation:
    """Explanation of one key. A path has several if kinds differ in its type, default or meaning.

    Attributes:
        kinds: the kinds that have the key; empty: it belongs to no kind.
        default: as YAML data; MISSING: it must be given.
        choices: the meaning of each kind, for a section that has kinds.
        keys: the keys of a section.
    """

    path: str
    kinds: tuple[str, ...]
    type: str
    default: Any
    meaning: str
    papers: tuple[str, ...]
    choices: Mapping[str, str]
    keys: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        default = {} if self.default is MISSING else {"default": self.default}
        return {**{key: value for key, value in dataclasses.asdict(self).items() if key != "default"}, **default}


def explain(path: str) -> list[Explanation]:
    """The explanations of a dotted path; positions in lists may be left out. Raises InputError for an unknown key."""
    places = _places(path)
    if places[0].name == "kind" and places[0].is_of_kind:
        [section] = explain(path.removesuffix(".kind"))
        default = section.default.get("kind", MISSING) if isinstance(section.default, dict) else MISSING
        return [dataclasses.replace(section, path=path, type=" | ".join(section.choices), default=default, keys=())]
    found: dict[tuple[Any, ...], Explanation] = {}
    for holder, name, field, is_of_kind in places:
        kinds = tuple(map(str, kinds_of(holder))) if is_of_kind else ()
        one = _explain(path, holder, name, field, kinds)
        same = (one.type, json.dumps(one.default, default=str), one.meaning, one.keys)
        earlier = found.get(same)
        found[same] = one if earlier is None else dataclasses.replace(earlier, kinds=(*earlier.kinds, *kinds))
    return list(found.values())


def explained_keys() -> Iterator[tuple[str, str]]:
    """Every key outside lists, once, with its meaning."""
    for path in dict.fromkeys(".".join(path) for path in known_paths()):
        yield path, "; ".join(dict.fromkeys(one.meaning for one in explain(path)))


def preset_values(path: str) -> dict[str, list[str]]:
    """The presets that set a key, `ARCH/NAME`, by its value as JSON."""
    found: dict[str, list[str]] = {}
    for arch, presets in list_presets().items():
        for preset in presets:
            for value in dict.fromkeys(json.dumps(value) for value in _values(_preset(arch, preset), path.split("."))):
                found.setdefault(value, []).append(f"{arch}/{preset}")
    return found


@cache
def _preset(arch: str, preset: str) -> Any:
    return read_yaml(preset_path(arch, preset)).value


def _values(node: Any, names: Sequence[str]) -> Iterator[Any]:
    """The values at a path; a list without a position in the path means each of its items."""
    if not names:
        yield node
    elif isinstance(node, Mapping):
        yield from _values(node[names[0]], names[1:]) if names[0] in node else ()
    elif isinstance(node, list):
        position = names[0].isdecimal()
        chosen = node[int(names[0]) : int(names[0]) + 1] if position else node
        for item in chosen:
            yield from _values(item, names[1:] if position else names)


class _Place(NamedTuple):
    """A key in the class that holds it; `is_of_kind`: other classes may stand there."""

    section: type
    name: str
    field: SchemaField
    is_of_kind: bool


def _places(path: str) -> list[_Place]:
    """The places that a path means: one for each kind that has the key."""
    names = [name for name in path.split(".") if not name.isdecimal()]
    sections: tuple[type, ...] = (Recipe,)
    places: list[_Place] = []
    for number, name in enumerate(names):
        keys = {section: fields_of(section) for section in sections}
        places = [
            _Place(section, name, found[name], len(sections) > 1) for section, found in keys.items() if name in found
        ]
        if not places:
            raise _unknown(names[:number], name, sections)
        sections = tuple(dict.fromkeys(inner for place in places for inner in _sections_of(place.field)))
    if not places:
        raise InputError(f"'{path}' is no key of a recipe", hint="a dotted path: model.encoder.norm.place")
    return places


def _unknown(holder: KeyPath | Sequence[str], name: str, sections: Sequence[type]) -> InputError:
    place = f"{'.'.join(holder)} has no key '{name}'" if holder else f"a recipe has no section '{name}'"
    keys = [key for section in sections for key in fields_of(section)]
    if not keys:
        return InputError(place, hint=f"it is a value and has no keys: tformer config explain {'.'.join(holder)}")
    elsewhere = [".".join(path) for path in known_paths() if path[-1] == name]
    return InputError(place, hint=f"did you mean '{elsewhere[0]}'?" if elsewhere else did_you_mean(name, set(keys)))


def _sections_of(field: SchemaField) -> tuple[type, ...]:
    """The classes of a value, or of the items of a list."""
    item = item_field(field.annotation)
    return sections_in(field.annotation) or (() if item is None else sections_in(item.annotation))


def _explain(path: str, section: type, name: str, field: SchemaField, kinds: tuple[str, ...]) -> Explanation:
    inner = _sections_of(field)
    described = dict(field_descriptions(section)).get(name)
    about = _summary(inner[0] if inner else section) if len(inner) < 2 else ""
    parts = (about.removesuffix("."), described) if inner and described else (described or about,)
    meaning = "; ".join(filter(None, parts))
    sources = (described, about) if inner or described is None else (described, inspect.getdoc(section))
    papers = next((ids for text in sources if (ids := tuple(dict.fromkeys(ARXIV.findall(text or ""))))), ())
    definition = _schema() if section is Recipe else _schema()["$defs"][section.__name__]
    return Explanation(
        path=path,
        kinds=kinds,
        type=_type_text(definition["properties"][name]),
        default=field.default,
        meaning=meaning,
        papers=papers,
        choices={str(kind): _summary(one) for one in inner for kind in kinds_of(one)} if len(inner) > 1 else {},
        keys=tuple(dict.fromkeys(key for one in inner for key in fields_of(one))),
    )


@cache
def _summary(section: type) -> str:
    """The first paragraph of the class's docstring."""
    return " ".join((inspect.getdoc(section) or "").partition("\n\n")[0].split())


# --- types in words ---------------------------------------------------------------------------------------------------

WORDS = {
    "integer": "integer",
    "number": "number",
    "boolean": "true or false",
    "string": "text",
    "null": "null",
    "object": "mapping",
}
BOUNDS = {"exclusiveMinimum": "above", "minimum": "at least", "exclusiveMaximum": "below", "maximum": "at most"}


@cache
def _schema() -> dict[str, Any]:
    return json_schema()


def _type_text(schema: Mapping[str, Any]) -> str:
    """The type of a JSON schema in words: `integer above 0 or null`, `pre | post`."""
    options = schema.get("anyOf") or schema.get("oneOf")
    if options:
        return " or ".join(dict.fromkeys(_type_text(option) for option in options))
    if "enum" in schema or "const" in schema:
        return " | ".join(json.dumps(value).strip('"') for value in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        items = schema.get("items", {})
        inner = [items] if isinstance(items, dict) and items else schema.get("prefixItems", [])
        return f"list of {' and '.join(dict.fromkeys(_type_text(item) for item in inner)) or 'values'}"
    limits = " and ".join(f"{word} {schema[bound]:g}" for bound, word in BOUNDS.items() if bound in schema)
    return f"{WORDS.get(schema.get('type', 'object'), 'mapping')} {limits}".rstrip()
