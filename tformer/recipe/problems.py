"""Validation errors in plain words: the place, the dotted path, what was found, what was expected.

pydantic's errors become `Problem`s, one for each path; up to MAX_SHOWN of them become one `InputError`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from pydantic import ValidationError

from tformer.recipe.schema import (
    field_at,
    fields_of,
    keys_at,
    kinds_of,
    known_paths,
    sections_at,
    sections_in,
    value_at,
)
from tformer.recipe.yaml_text import KeyPath
from tformer.support.bounds import EXPECTED, MISSING_KEY, SEED, UNKNOWN_KEY, expected_by, expected_of, mistake_of
from tformer.support.decoding import SETTINGS
from tformer.support.errors import InputErrors
from tformer.support.formatting import as_one_line, describe

MAX_SHOWN = 5
MODEL_HINT = "start from a preset (--preset NAME, or `preset: NAME` in the file), or describe model.decoder"


class Problem(NamedTuple):
    """One error at one path of a recipe; `hint` says how to correct it."""

    path: KeyPath
    text: str
    hint: str | None = None


NO_KIND = ("union_tag_invalid", "union_tag_not_found")


def raise_problems(problems: Sequence[Problem], where: Callable[[KeyPath], str]) -> None:
    """Raise one InputError with a line for each problem that begins with `where(path)`; return if there are none."""
    if not problems:
        return
    lines = []
    for problem in problems[:MAX_SHOWN]:
        place = where(problem.path)
        lines.append(as_one_line(": ".join(part for part in (place, ".".join(problem.path), problem.text) if part)))
    if len(problems) > MAX_SHOWN:
        lines.append(f"and {len(problems) - MAX_SHOWN} more")
    raise InputErrors("\n".join(lines), hint=problems[0].hint)


def unusable_values(data: Any, path: KeyPath = ()) -> Iterator[Problem]:
    """Values that no key accepts: numbers outside `tformer.support.bounds`, text that is no Unicode."""
    name = path[-1] if path else ""
    if isinstance(data, dict | list):
        for key, item in data.items() if isinstance(data, dict) else enumerate(data):
            yield from unusable_values(item, (*path, str(key)))
    elif expected := expected_of(data, (SEED,) if name == "seed" else SETTINGS.get(name, ())):
        huge = isinstance(data, int) and abs(data) >= 10**20
        found = f"a number of {len(str(abs(data)))} digits" if huge else data
        yield Problem(path, f"found {found}, expected {expected}")
    elif isinstance(data, str) and any("\ud800" <= character <= "\udfff" for character in data):
        yield Problem(path, f"found {describe(data)}, expected Unicode text")


def problems_of(error: ValidationError, data: dict[str, Any]) -> list[Problem]:
    """pydantic's errors about `data` as one problem for each path; errors of a union's members are combined."""
    expected: dict[KeyPath, list[str]] = {}
    problems: dict[KeyPath, Problem] = {}
    for entry in error.errors(include_url=False):
        kind, ctx = entry["type"], entry.get("ctx", {})
        path = _path(entry["loc"], data, ends_missing=kind in MISSING_KEY)
        if len(problems) >= MAX_SHOWN and path not in problems:
            problems[path] = Problem(path, "")  # counted, not shown
        elif kind in UNKNOWN_KEY:
            problems[path] = _unknown_key(path, data)
        elif kind in NO_KIND or (kind == "literal_error" and path[-1] == "kind"):
            path = path if path[-1] == "kind" else (*path, "kind")
            problems[path] = _unknown_kind(path, ctx.get("tag", entry["input"]), data)
        elif kind in MISSING_KEY:
            problems[path] = Problem(path, "missing", MODEL_HINT if path == ("model",) else None)
        elif kind == "value_error":
            problem = _value_error(path, str(ctx["error"]), data)
            problems[problem.path] = problem
        elif kind in EXPECTED:
            expected.setdefault(path, []).append(expected_by(entry))
            words = " or ".join(expected[path])
            suggestion = _suggestion(entry["input"], re.findall(r"'([^']*)'", words))
            text = f"found {describe(entry['input'])}, expected {words}{suggestion}"
            problems[path] = Problem(path, text, MODEL_HINT if path == ("model",) else None)
        else:
            problems[path] = Problem(path, mistake_of(entry))
    # For a key that is a number or a mapping, an error inside the mapping is the relevant one.
    holders = {path[:depth] for path in problems for depth in range(len(path))}
    return [problem for path, problem in problems.items() if path not in holders]


def _path(location: tuple[int | str, ...], data: Any, *, ends_missing: bool) -> KeyPath:
    """pydantic's location without the names of union members between the keys."""
    path: list[str] = []
    node = data
    for place, name in enumerate(map(str, location)):
        is_key = isinstance(node, dict) and name in node
        is_position = isinstance(node, list) and name.isdecimal() and int(name) < len(node)
        if is_key or is_position:
            node = node[name] if is_key else node[int(name)]
            path.append(name)
        elif ends_missing and place == len(location) - 1:
            path.append(name)
    return tuple(path)


def _unknown_key(path: KeyPath, data: Any) -> Problem:
    key, holder = path[-1], path[:-1]
    known = keys_at(holder, data)
    field = field_at(holder, data)
    kinds = [] if field is None else [s for s in sections_in(field.annotation) if key in fields_of(s)]
    hint = f"known here: {', '.join(known)}" if known else None
    if kinds:
        owners = ", ".join(str(kind) for section in kinds for kind in kinds_of(section))
        return Problem(path, f"unknown key for this kind, expected with kind {owners}", hint)
    near = _elsewhere(key, data) or difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    return Problem(path, f"unknown key{f', did you mean {near[0]!r}?' if near else ''}", hint)


def _elsewhere(key: str, data: Any) -> list[str]:
    """Other paths of a key of that name: first in sections that the recipe has, then by depth."""
    places = [path for path in known_paths() if path[-1] == key or ".".join(path) == key]
    places.sort(key=lambda path: (value_at(path[:-1], data) is None and len(path) > 2, len(path)))
    return [".".join(path) for path in places]


def _unknown_kind(path: KeyPath, found: Any, data: Any) -> Problem:
    kinds = [str(kind) for section in sections_at(path[:-1], data) for kind in kinds_of(section)]
    choices = ", ".join(kinds)
    if isinstance(found, dict):
        return Problem(path, f"missing, expected one of {choices}")
    return Problem(path, f"found {describe(found)}, expected one of {choices}{_suggestion(found, kinds)}")


def _value_error(path: KeyPath, message: str, data: Any) -> Problem:
    """An error of a section; a message that begins with the name of one of its keys belongs to that key."""
    opening = re.match(r"(\w+) (must .*)", message)
    if opening and opening[1] in keys_at(path, data):
        return Problem((*path, opening[1]), opening[2])
    return Problem(path, message, MODEL_HINT if path == ("model",) else None)


def _suggestion(found: Any, choices: Sequence[str]) -> str:
    near = difflib.get_close_matches(str(found).lower(), choices, n=1, cutoff=0.5)
    return f", did you mean '{near[0]}'?" if near else ""
