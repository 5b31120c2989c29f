"""YAML text → plain values and the line of each: the strict and harmless part of YAML that recipes are written in.

Nothing is ever constructed but mappings, lists, text, numbers, booleans and null. Refused, naming file and line:
aliases and anchors (a few lines of them can describe gigabytes), tags (`!!python/object`), duplicate keys, several
documents, nesting past `MAX_DEPTH`, and files over `MAX_BYTES`. Plain scalars follow YAML 1.2 where 1.1 surprises
people: `1e-3` is a number, and `on`, `off`, `yes` and `no` are text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tformer.errors import InputError

MAX_BYTES = 1_000_000
MAX_DEPTH = 32

KeyPath = tuple[str, ...]
"""Where a value stands: keys and list positions, all as text, for example `("objectives", "0", "weight")`."""

CONSTANTS: dict[str, bool | None] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
# Digits are bounded, so that no number takes long to read; leading zeros (octal in YAML 1.1) leave it text.
INTEGER = re.compile(r"[-+]?(0|[1-9](_?[0-9]){0,400})")
FLOAT = re.compile(r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+")
NON_FINITE = re.compile(r"([-+]?)\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


class Document(NamedTuple):
    """A mapping read from YAML, and the line (from 1) of each of its values, by path."""

    value: dict[str, Any]
    lines: dict[KeyPath, int]


def read_yaml(path: Path, *, name: str | None = None) -> Document:
    """Read and parse one file; `name` is what messages call it. Every way to fail is an `InputError`."""
    shown = name or str(path)
    if path.is_dir():
        raise InputError(f"{shown}: found a folder, expected a YAML file")
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise InputError(f"{shown}: no such file") from None
    except OSError as error:
        raise InputError(f"{shown}: cannot be read: {error.strerror}") from None
    if len(raw) > MAX_BYTES:
        raise InputError(f"{shown}: larger than 1 MB, which no recipe is")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise InputError(f"{shown}:{line}: invalid UTF-8 at byte {error.start} of the file") from None
    return parse_yaml(text, name=shown)


def parse_yaml(text: str, *, name: str) -> Document:
    """Parse a text whose top level is a mapping. Keys are always text; a value's line is that of its key."""
    value, lines = _Parser(text, name).document()
    if not isinstance(value, dict):
        found = describe(value) if text.strip() else "an empty file"
        raise InputError(f"{name}: found {found}, expected a mapping of sections (model:, training:, ...)")
    return Document(value, lines)


def parse_value(text: str, *, name: str) -> Any:
    """The value on the right of `key=value`: a plain scalar, a quoted one, or a flow list or mapping."""
    stripped = text.strip()
    if stripped[:1] in ("[", "{", '"', "'"):
        return _Parser(stripped, name).document()[0]
    return resolve_scalar(stripped)


def resolve_scalar(text: str) -> Any:
    """What a plain (unquoted) scalar means: null, a boolean, an integer, a float, or the text itself."""
    if text in CONSTANTS:
        return CONSTANTS[text]
    if INTEGER.fullmatch(text):
        return int(text)
    if FLOAT.fullmatch(text):
        return float(text)
    if NON_FINITE.fullmatch(text):
        return float(text.lower().replace(".", ""))
    return text


def describe(value: Any) -> str:
    """A value in the words of a message: short, in YAML's spelling, text told apart from numbers."""
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    if isinstance(value, str):
        shown = value if len(value) <= 60 else value[:57] + "..."
        return f"the text {shown!r}"
    return {"None": "null", "True": "true", "False": "false"}.get(str(value), str(value))


def _line(event: Any) -> int:
    return int(event.start_mark.line) + 1


class _Parser:
    """Builds values straight from PyYAML's events, so that no constructor of PyYAML ever runs."""

    def __init__(self, text: str, name: str) -> None:
        self.name = name
        self.text = text
        self.lines: dict[KeyPath, int] = {}
        self.events = self._events()

    def document(self) -> tuple[Any, dict[KeyPath, int]]:
        value: Any = None
        for event in self.events:
            if isinstance(event, yaml.DocumentStartEvent):
                if () in self.lines:
                    raise self._refuse(event, "a second document starts here, expected one document a file")
                value = self._node(next(self.events), ())
        return value, self.lines

    def _events(self) -> Iterator[Any]:
        try:
            yield from yaml.parse(self.text, Loader=yaml.SafeLoader)
        except yaml.MarkedYAMLError as error:
            marks = (error.problem_mark, error.context_mark)
            where = next((f"{self.name}:{mark.line + 1}" for mark in marks if mark is not None), self.name)
            told = " ".join(part for part in (error.context, error.problem) if part)
            raise InputError(f"{where}: not valid YAML: {told}") from None
        except yaml.reader.ReaderError as error:
            line = self.text.count("\n", 0, error.position) + 1
            raise InputError(f"{self.name}:{line}: not valid YAML: a control character") from None

    def _refuse(self, event: Any, problem: str, *, hint: str | None = None) -> InputError:
        return InputError(f"{self.name}:{_line(event)}: {problem}", hint=hint)

    def _node(self, event: Any, path: KeyPath) -> Any:
        self._check(event)
        self.lines[path] = _line(event)
        if isinstance(event, yaml.ScalarEvent):
            return resolve_scalar(event.value) if event.implicit[0] else event.value
        if len(path) >= MAX_DEPTH:
            raise self._refuse(event, f"nested more than {MAX_DEPTH} levels deep")
        return self._mapping(path) if isinstance(event, yaml.MappingStartEvent) else self._sequence(path)

    def _check(self, event: Any) -> None:
        if isinstance(event, yaml.AliasEvent):
            raise self._refuse(event, f"found the alias '*{event.anchor}', which recipes do not have", hint=WRITE_OUT)
        if event.anchor is not None:
            raise self._refuse(event, f"found the anchor '&{event.anchor}', which recipes do not have", hint=WRITE_OUT)
        if event.tag is not None:
            tag = event.tag.replace("tag:yaml.org,2002:", "!!")
            raise self._refuse(event, f"found the tag '{tag}', which recipes do not have")

    def _sequence(self, path: KeyPath) -> list[Any]:
        items: list[Any] = []
        for event in self.events:
            if isinstance(event, yaml.SequenceEndEvent):
                break
            items.append(self._node(event, (*path, str(len(items)))))
        return items

    def _mapping(self, path: KeyPath) -> dict[str, Any]:
        items: dict[str, Any] = {}
        for event in self.events:
            if isinstance(event, yaml.MappingEndEvent):
                break
            self._check(event)
            if not isinstance(event, yaml.ScalarEvent):
                raise self._refuse(event, "found a key that is a list or a mapping, expected a name")
            key = event.value
            line = _line(event)
            if key in items:
                first = self.lines[(*path, key)]
                dotted = ".".join((*path, key))
                raise self._refuse(event, f"duplicate key '{dotted}', expected once (first at line {first})")
            items[key] = self._node(next(self.events), (*path, key))
            self.lines[(*path, key)] = line  # the key's line also where the value starts below it
        return items


WRITE_OUT = "write the value out in each place"
