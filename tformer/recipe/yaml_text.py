"""Recipes as YAML: a strict reader with the line of each value, and a writer that keeps every digit.

Reading constructs nothing but mappings, lists, text, numbers, booleans and null. Refused, naming file and line:
aliases and anchors (a few lines of them can describe gigabytes), tags (`!!python/object`), duplicate keys, several
documents, nesting past `MAX_DEPTH`, more than `MAX_VALUES` values, and files over `MAX_BYTES`. Plain scalars follow
YAML 1.2 where 1.1 is surprising: `1e-3` is a number, and `on`, `off`, `yes` and `no` are text.

Writing quotes text wherever this reader or PyYAML would take it for something else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tformer.support.errors import InputError
from tformer.support.formatting import describe

MAX_BYTES = 1_000_000
MAX_DEPTH = 32
MAX_VALUES = 100_000  # mappings, lists and scalars of one file

KeyPath = tuple[str, ...]
"""The path of a value: keys and list positions, all as text, for example `("objectives", "0", "weight")`."""

CONSTANTS: dict[str, bool | None] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
# The number of digits is bounded, so that no number takes long to read; leading zeros (octal in YAML 1.1) make it text.
INTEGER = re.compile(r"[-+]?(0|[1-9](_?[0-9]){0,400})")
FLOAT = re.compile(r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+")
NON_FINITE = re.compile(r"([-+]?)\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


class Document(NamedTuple):
    """A mapping read from YAML, and the line (from 1) of each of its values, by path."""

    value: dict[str, Any]
    lines: dict[KeyPath, int]


def read_yaml(path: Path) -> Document:
    """Read and parse one file. All failures are InputErrors."""
    if path.is_dir():
        raise InputError(f"{path}: found a folder, expected a YAML file")
    try:
        with open(path, "rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    if len(raw) > MAX_BYTES:
        raise InputError(f"{path}: found more than 1 MB, expected at most 1 MB")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise InputError(f"{path}:{line}: invalid UTF-8 at byte {error.start} of the file") from None
    return parse_yaml(text, name=str(path))


def parse_yaml(text: str, *, name: str) -> Document:
    """Parse a text with a mapping at the top. Keys are always text; a value has the line number of its key."""
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
    """The value of a plain (unquoted) scalar: null, a boolean, an integer, a float, or the text itself."""
    if text in CONSTANTS:
        return CONSTANTS[text]
    if INTEGER.fullmatch(text):
        return int(text)
    if FLOAT.fullmatch(text):
        return float(text)
    if NON_FINITE.fullmatch(text):
        return float(text.lower().replace(".", ""))
    return text


def _line(event: Any) -> int:
    return int(event.start_mark.line) + 1


class _Parser:
    """Builds values directly from PyYAML's events, so that no constructor of PyYAML runs."""

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
            reason = " ".join(part for part in (error.context, error.problem) if part)
            raise InputError(f"{where}: not valid YAML: {reason}") from None
        except yaml.reader.ReaderError as error:
            line = self.text.count("\n", 0, error.position) + 1
            raise InputError(f"{self.name}:{line}: not valid YAML: a control character") from None
        except (ValueError, OverflowError):  # of PyYAML's conversion of an escape sequence or a version
            raise InputError(
                f"{self.name}: not valid YAML: an escape sequence or a version has a number too large"
            ) from None

    def _refuse(self, event: Any, problem: str, *, hint: str | None = None) -> InputError:
        return InputError(f"{self.name}:{_line(event)}: {problem}", hint=hint)

    def _node(self, event: Any, path: KeyPath) -> Any:
        self._check(event)
        if len(self.lines) >= MAX_VALUES:
            raise self._refuse(event, f"found more than {MAX_VALUES:,} values, expected at most {MAX_VALUES:,}")
        self.lines[path] = _line(event)
        if isinstance(event, yaml.ScalarEvent):
            return resolve_scalar(event.value) if event.implicit[0] else event.value
        if len(path) >= MAX_DEPTH:
            raise self._refuse(event, f"nested more than {MAX_DEPTH} levels deep")
        if isinstance(event, yaml.MappingStartEvent):
            return self._mapping(path)
        items: list[Any] = []
        for event in self.events:
            if isinstance(event, yaml.SequenceEndEvent):
                break
            items.append(self._node(event, (*path, str(len(items)))))
        return items

    def _check(self, event: Any) -> None:
        if isinstance(event, yaml.AliasEvent):
            raise self._refuse(event, f"found the alias '*{event.anchor}', which recipes do not have", hint=WRITE_OUT)
        if event.anchor is not None:
            raise self._refuse(event, f"found the anchor '&{event.anchor}', which recipes do not have", hint=WRITE_OUT)
        if event.tag is not None:
            tag = event.tag.replace("tag:yaml.org,2002:", "!!")
            raise self._refuse(event, f"found the tag '{tag}', which recipes do not have")

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


LINE_WIDTH = 110
PLAIN = re.compile(r"[A-Za-z0-9_./][A-Za-z0-9_./+-]*( [A-Za-z0-9_./+-]+)*")
# Characters that YAML does not accept in a quoted scalar, or folds as a line break (U+0085, U+2028, U+2029).
UNPRINTABLE = re.compile("[^\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]")
YAML_1_1 = yaml.resolver.Resolver()

Comment = Callable[[KeyPath], str]


class YamlLine(NamedTuple):
    text: str
    comment: str = ""


def to_yaml(value: dict[str, Any], *, comment: Comment | None = None) -> str:
    """Block YAML of nested mappings, lists and scalars.

    Without `comment`, short mappings and lists go on one line; with it, every leaf has its own line and comment.
    """
    lines = _mapping_lines(value, (), comment)
    width = min(max((len(line.text) for line in lines if line.comment), default=0), LINE_WIDTH // 2)
    return "".join(f"{line.text:<{width}}  # {line.comment}\n" if line.comment else f"{line.text}\n" for line in lines)


def _mapping_lines(value: dict[str, Any], path: KeyPath, comment: Comment | None) -> list[YamlLine]:
    return [line for key, item in value.items() for line in _entry_lines(str(key), item, (*path, str(key)), comment)]


def _entry_lines(key: str, item: Any, path: KeyPath, comment: Comment | None) -> list[YamlLine]:
    start = "  " * (len(path) - 1) + f"{_key(key)}:"
    if _on_one_line(start, item, path, comment):
        return [YamlLine(f"{start} {flow(item)}", comment(path) if comment else "")]
    if isinstance(item, dict):
        return [YamlLine(start), *_mapping_lines(item, path, comment)]
    items = [_item_lines(element, (*path, str(index)), comment) for index, element in enumerate(item)]
    return [YamlLine(start), *(line for lines in items for line in lines)]


def _item_lines(element: Any, path: KeyPath, comment: Comment | None) -> list[YamlLine]:
    dash = "  " * (len(path) - 1) + "- "
    if _on_one_line(dash, element, path, comment) or not isinstance(element, dict):
        return [YamlLine(dash + flow(element), comment(path) if comment else "")]
    first, *rest = _mapping_lines(element, path, comment)
    return [YamlLine(dash + first.text[len(dash) :], first.comment), *rest]


def _on_one_line(start: str, item: Any, path: KeyPath, comment: Comment | None) -> bool:
    """Whether to write a value on its key's line: with comments leaves and lists of scalars, else whatever fits."""
    if not item or not isinstance(item, dict | list):
        return True
    if comment is not None:
        return isinstance(item, list) and not any(isinstance(element, dict | list) for element in item)
    is_section = isinstance(item, dict) and len(path) == 1
    return not is_section and len(start) + len(flow(item)) < LINE_WIDTH


def flow(value: Any) -> str:
    """YAML on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(str(key))}: {flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(flow(item) for item in value) + "]"
    if isinstance(value, str):
        in_yaml_1_1 = YAML_1_1.resolve(yaml.ScalarNode, value, (True, False)) == "tag:yaml.org,2002:str"
        is_plain = in_yaml_1_1 and isinstance(resolve_scalar(value), str) and PLAIN.fullmatch(value)
        return value if is_plain else _quoted(value)
    if isinstance(value, float):
        return _float(value)
    return json.dumps(value)  # null, true, false and integers are spelled as in JSON


def _key(key: str) -> str:
    """A key with quotes if its characters need them; any key is read as text."""
    return key if PLAIN.fullmatch(key) else _quoted(key)


def _quoted(value: str) -> str:
    return UNPRINTABLE.sub(lambda match: f"\\U{ord(match[0]):08x}", json.dumps(value, ensure_ascii=False))


def _float(value: float) -> str:
    """The shortest digits that read back exactly, with the point and the sign that YAML 1.1 requires in an exponent."""
    mantissa, mark, exponent = repr(value).partition("e")
    return f"{mantissa}{'' if '.' in mantissa else '.0'}e{int(exponent):+d}" if mark else mantissa
