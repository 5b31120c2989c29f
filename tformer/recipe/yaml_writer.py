"""A recipe → YAML text: sections in the schema's order, short mappings and lists on one line, exact to the last bit.

`yaml_text` and PyYAML both read back what is written here: text is quoted wherever either would take it for something
else, and floats keep all their digits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import yaml

from tformer.recipe.yaml_text import KeyPath, resolve_scalar

LINE_WIDTH = 110
PLAIN = re.compile(r"[A-Za-z0-9_./][A-Za-z0-9_./+-]*( [A-Za-z0-9_./+-]+)*")
# What YAML does not accept raw in a quoted scalar, or would fold as a line break (U+0085, U+2028, U+2029).
UNPRINTABLE = re.compile("[^\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]")
YAML_1_1 = yaml.resolver.Resolver()

Comment = Callable[[KeyPath], str]


class Line(NamedTuple):
    text: str
    comment: str = ""


def to_yaml(value: dict[str, Any], *, comment: Comment | None = None) -> str:
    """Block YAML of nested mappings, lists and scalars.

    Without `comment`, what fits goes on one line; with it, every leaf has a line of its own ending in its comment.
    """
    lines = _mapping_lines(value, (), comment)
    width = min(max((len(line.text) for line in lines if line.comment), default=0), LINE_WIDTH // 2)
    return "".join(f"{line.text:<{width}}  # {line.comment}\n" if line.comment else f"{line.text}\n" for line in lines)


def _mapping_lines(value: dict[str, Any], path: KeyPath, comment: Comment | None) -> list[Line]:
    return [line for key, item in value.items() for line in _entry_lines(str(key), item, (*path, str(key)), comment)]


def _entry_lines(key: str, item: Any, path: KeyPath, comment: Comment | None) -> list[Line]:
    start = "  " * (len(path) - 1) + f"{_key(key)}:"
    if _on_one_line(start, item, path, comment):
        return [Line(f"{start} {_flow(item)}", comment(path) if comment else "")]
    if isinstance(item, dict):
        return [Line(start), *_mapping_lines(item, path, comment)]
    items = [_item_lines(element, (*path, str(index)), comment) for index, element in enumerate(item)]
    return [Line(start), *(line for lines in items for line in lines)]


def _item_lines(element: Any, path: KeyPath, comment: Comment | None) -> list[Line]:
    dash = "  " * (len(path) - 1) + "- "
    if _on_one_line(dash, element, path, comment) or not isinstance(element, dict):
        return [Line(dash + _flow(element), comment(path) if comment else "")]
    first, *rest = _mapping_lines(element, path, comment)
    return [Line(dash + first.text[len(dash) :], first.comment), *rest]


def _on_one_line(start: str, item: Any, path: KeyPath, comment: Comment | None) -> bool:
    """Leaves and lists of scalars where every leaf has its line; else whatever fits but the sections themselves."""
    if not item or not isinstance(item, dict | list):
        return True
    if comment is not None:
        return isinstance(item, list) and not any(isinstance(element, dict | list) for element in item)
    is_section = isinstance(item, dict) and len(path) == 1
    return not is_section and len(start) + len(_flow(item)) < LINE_WIDTH


def _flow(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(str(key))}: {_flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_flow(item) for item in value) + "]"
    if isinstance(value, str):
        return value if _is_plain_text(value) else _quoted(value)
    if isinstance(value, float):
        return _float(value)
    return json.dumps(value)  # null, true, false and integers are spelled as in JSON


def _key(key: str) -> str:
    """A key is always read back as text, so only its characters decide about quotes."""
    return key if PLAIN.fullmatch(key) else _quoted(key)


def _is_plain_text(value: str) -> bool:
    in_yaml_1_1 = YAML_1_1.resolve(yaml.ScalarNode, value, (True, False)) == "tag:yaml.org,2002:str"
    return in_yaml_1_1 and isinstance(resolve_scalar(value), str) and PLAIN.fullmatch(value) is not None


def _quoted(value: str) -> str:
    return UNPRINTABLE.sub(lambda match: f"\\U{ord(match[0]):08x}", json.dumps(value, ensure_ascii=False))


def _float(value: float) -> str:
    """The shortest digits that read back exactly, with the point and the sign that YAML 1.1 wants in an exponent."""
    mantissa, mark, exponent = repr(value).partition("e")
    return f"{mantissa}{'' if '.' in mantissa else '.0'}e{int(exponent):+d}" if mark else mantissa
