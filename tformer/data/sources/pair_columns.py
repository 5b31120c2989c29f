"""Columns of tables of pairs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from tformer.data.sources.labelled_columns import NUMBERS
from tformer.data.sources.tables import Column
from tformer.errors import InputError, did_you_mean

SOURCES = (
    *("source", "src", "source_text", "src_text", "input", "inputs", "input_text", "question", "prompt", "instruction"),
    *("query", "document", "article", "dialogue", "text", "sentence", "context", "command"),
)
TARGETS = (
    *("target", "tgt", "trg", "target_text", "tgt_text", "output", "outputs", "targets", "output_text", "answer"),
    *("translation", "completion", "response", "reply", "summary", "highlights", "headline", "title", "label"),
)
_CODES = """
ar bg bn ca cs cy da de el en es et eu fa fi fr ga gl gu he hi hr hu hy id is it ja ka kk km kn ko lt lv mk ml mn
mr ms mt my nb ne nl nn no pa pl ps pt ro ru si sk sl so sq sr sv sw ta te th tl tr uk ur uz vi xh zh zu
"""
LANGUAGES = frozenset(_CODES.split())
SURE_NAMES = frozenset(("source", "target", "src", "tgt", "trg", "source_text", "target_text"))  # one is enough
SHOWN_CHARACTERS = 60  # of a first row, in a hint

FLAGS = {"source": "--source-column", "target": "--target-column"}


class Columns(Protocol):
    """What is needed of the recipe's `data.columns`."""

    @property
    def source(self) -> Column: ...
    @property
    def target(self) -> Column: ...


@dataclass(frozen=True)
class PairRoles:
    """Numbers of the columns on each side, and whether a side was guessed."""

    source: tuple[int, ...]
    target: tuple[int, ...]
    guessed: bool


def column_hint(role: str) -> str:
    return f"name the column with {FLAGS[role]} (data.columns.{role})"


def asked_columns(columns: Columns | None) -> dict[str, str | int]:
    """The columns that were asked for, by role."""
    return {role: column for role in FLAGS if (column := getattr(columns, role, None)) is not None}


def has_names(rows: Sequence[Sequence[str]], asked: Mapping[str, str | int]) -> bool:
    """Whether the first of these rows names the columns."""
    if any(isinstance(column, str) and not _are_numbers(column) for column in asked.values()):
        return True  # which of them is missing, if one is, is said later
    first = [
        _plain(cell) if cell not in (row[column] for row in rows[1:] if column < len(row)) else ""
        for column, cell in enumerate(rows[0])
    ]
    found: dict[str, tuple[int, ...]] = {}
    _choose_by_name(first, found)
    return len(found) == len(FLAGS) or not SURE_NAMES.isdisjoint(first)


def choose_columns(
    names: Sequence[str] | None, first: Sequence[str], asked: dict[str, str | int], *, name: str
) -> PairRoles:
    """The roles of the columns.

    Args:
        names: of the columns; None when there is no row of names.
        first: the first row, names or not.
        asked: column by role, see `asked_columns`.
        name: of the file, for messages.

    Raises InputError for a column that is missing, cannot be told, or is on both sides.
    """
    width = len(first)
    chosen = {role: _find(column, names, width, role=role, name=name) for role, column in asked.items()}
    if names is not None:
        _choose_by_name([_plain(each) for each in names], chosen)
    used = {column for columns in chosen.values() for column in columns}
    free = [column for column in range(width) if column not in used]
    free = [column for column in free if names is None or _plain(names[column]) not in NUMBERS]
    missing = [role for role in FLAGS if role not in chosen]
    if len(free) == len(missing):
        chosen.update((role, (column,)) for role, column in zip(missing, free, strict=True))
    for role in FLAGS:
        if role not in chosen:
            raise InputError(
                f"{name}: cannot tell which column holds the {role}; {_listing(names, width)}",
                hint=f"{column_hint(role)}{'' if names is not None else _shown(first)}",
            )
    if both := set(chosen["source"]) & set(chosen["target"]):
        called = min(both) if names is None else f"'{names[min(both)]}'"
        raise InputError(f"{name}: source and target are the same column {called}", hint=column_hint("target"))
    return PairRoles(chosen["source"], chosen["target"], guessed=len(asked) < len(FLAGS))


def column_name(columns: Sequence[int], names: Sequence[str] | None) -> str | int:
    """How these columns can be asked for: their names, joined by commas, or numbers where names do not tell."""
    if names is None or any(names.count(names[column]) > 1 for column in columns):
        return columns[0] if len(columns) == 1 else ",".join(map(str, columns))
    return ",".join(names[column] for column in columns)


def is_present(column: str | int, first: Sequence[str], *, named: bool) -> bool:
    """Whether a table whose first row this is has a column; a number says nothing where columns have names."""
    if column in first:
        return True
    parts = [part.strip() for part in str(column).split(",")]
    if all(part.isdecimal() for part in parts):
        return not named and all(int(part) < len(first) for part in parts)
    return all(part in first for part in parts)


def _are_numbers(column: str) -> bool:
    return all(part.strip().isdecimal() for part in column.split(","))


def _find(column: str | int, names: Sequence[str] | None, width: int, *, role: str, name: str) -> tuple[int, ...]:
    known = list(names or ())
    if isinstance(column, str) and column not in known:
        parts = [part.strip() for part in column.split(",")] if "," in column else [column]
        return tuple(_find_one(part, known, width, role=role, name=name) for part in parts)
    return (_find_one(column, known, width, role=role, name=name),)


def _find_one(column: str | int, names: list[str], width: int, *, role: str, name: str) -> int:
    if column in names:
        if names.count(str(column)) > 1:
            raise InputError(
                f"{name}: {names.count(str(column))} columns are called '{column}'",
                hint="rename the others, or (in csv and tsv) give its number from 0",
            )
        return names.index(str(column))
    number = int(column) if isinstance(column, int) or column.isdecimal() else None
    if number is None:
        raise InputError(f"{name}: no column '{column}'; {did_you_mean(str(column), names)}", hint=column_hint(role))
    if number >= width:
        raise InputError(f"{name}: no column {number}; {_listing(None, width)}", hint=column_hint(role))
    return number


def _choose_by_name(plain: list[str], chosen: dict[str, tuple[int, ...]]) -> None:
    """Fills the roles that known names tell; two columns named after languages are the two sides, in their order."""
    used = {column for columns in chosen.values() for column in columns}
    for role, known in (("source", SOURCES), ("target", TARGETS)):
        found = [plain.index(name) for name in known if name in plain and plain.index(name) not in used]
        if role not in chosen and found:
            chosen[role] = (found[0],)
            used.add(found[0])
    languages = [column for column, name in enumerate(plain) if re.split("[_@]", name)[0] in LANGUAGES]
    languages = [column for column in languages if column not in used]
    missing = [role for role in FLAGS if role not in chosen]
    if missing and len(languages) == len(missing):
        chosen.update((role, (column,)) for role, column in zip(missing, languages, strict=True))


def _listing(names: Sequence[str] | None, width: int) -> str:
    if names is not None:
        return f"columns: {', '.join(names)}"
    return f"there are {width} columns, numbered from 0" if width > 1 else "there is one column, number 0"


def _shown(first: Sequence[str]) -> str:
    text = ", ".join(first)
    return f"; the first row: {text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + '...'}"


def _plain(name: str) -> str:
    return re.sub(r"[\s-]+", "_", name.strip().lower())
