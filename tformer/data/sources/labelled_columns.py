"""Columns of labelled tables."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tformer.data.sources.tables import (
    Column,
    require_single,
)
from tformer.errors import InputError, did_you_mean

PAIRS = (
    ("text_a", "text_b"),
    ("text", "text2"),
    ("text1", "text2"),
    ("text_1", "text_2"),
    ("sentence_a", "sentence_b"),
    ("sentence1", "sentence2"),
    ("sentence_1", "sentence_2"),
    ("question1", "question2"),
    ("premise", "hypothesis"),
    ("question", "sentence"),
    ("question", "passage"),
    ("query", "passage"),
    ("query", "document"),
    ("#1_string", "#2_string"),
)
TEXTS = (
    *("text", "sentence", "text_a", "text1", "sentence1", "question", "premise", "content", "review", "document"),
    *("comment", "comment_text", "tweet", "message", "query", "utterance", "passage", "article", "body", "abstract"),
    *("description", "headline", "title", "input"),
)
CLASSES = (
    *("label", "labels", "class", "classes", "category", "categories", "target", "sentiment", "gold_label", "intent"),
    *("topic", "emotion", "tag", "tags", "is_duplicate", "quality", "entailment_judgment", "output"),
)
SCORES = ("score", "relatedness", "relatedness_score", "similarity", "rating", "stars")
NUMBERS = ("", "id", "idx", "index", "uid", "guid", "pair_id", "pairid", "#1_id", "#2_id", "unnamed:_0")  # of rows
TEXT_NAMES = frozenset(TEXTS) | {name for pair in PAIRS for name in pair}
MIN_ROWS_OF_NUMBERS = 3  # below a word that is then taken for a name

FLAGS = {"text": "--text-column", "text2": "--text2-column", "label": "--label-column"}
ROLES = {"text": "text", "text2": "second text", "label": "label"}


class Columns(Protocol):
    """What is needed of the recipe's `data.columns`: names, or numbers from 0."""

    @property
    def text(self) -> Column: ...
    @property
    def text2(self) -> Column: ...
    @property
    def label(self) -> Column: ...


@dataclass(frozen=True)
class Roles:
    """Numbers of the columns, and whether any was guessed."""

    text: int
    text2: int | None
    label: int | None
    guessed: bool


def column_hint(role: str) -> str:
    return f"name the column with {FLAGS[role]} (data.columns.{role})"


def asked_columns(columns: Columns | None) -> dict[str, str | int]:
    """The columns that were asked for, by role."""
    return {role: column for role in FLAGS if (column := getattr(columns, role, None)) is not None}


def has_names(rows: Sequence[Sequence[str]], asked: dict[str, str | int]) -> bool:
    """Whether the first of these rows names the columns."""
    first, below = rows[0], rows[1:]
    if any(isinstance(column, str) for column in asked.values()):
        return True  # which of them is missing, if one is, is said later
    for column, cell in enumerate(first):
        under = [row[column] for row in below if column < len(row)]
        if _plain(cell) in TEXT_NAMES and cell not in under:
            return True
        numbers = len(under) >= MIN_ROWS_OF_NUMBERS and all(map(is_number, under))
        if numbers and cell.strip() and not is_number(cell):
            return True
    return False


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def choose_columns(
    names: Sequence[str] | None,
    rows: Sequence[Sequence[str]],
    asked: dict[str, str | int],
    *,
    name: str,
    needs_label: bool = True,
    numeric_label: bool = False,
) -> Roles:
    """The roles of the columns.

    Args:
        names: of the columns; None when there is no row of names.
        rows: the first rows of data, all of the same width.
        asked: column by role, see `asked_columns`.
        name: of the file, for messages.
        needs_label: False: a label that is not there is no error, even when it was asked for.
        numeric_label: the label is a score: columns with the name of a score, or with numbers, are preferred.

    Raises InputError for a column that is missing, cannot be told, has another's name, or has two roles.
    """
    width = len(names) if names is not None else len(rows[0])
    chosen: dict[str, int] = {}
    for role, column in asked.items():
        if role == "label" and not needs_label and not _exists(column, names, width):
            continue
        chosen[role] = _find(column, names, width, role=role, name=name)
    _require_different(chosen, names, name=name)
    if names is not None:
        _choose_by_name([_plain(each) for each in names], chosen, numeric_label=numeric_label)
    left = [column for column in range(width) if names is None or _plain(names[column]) not in NUMBERS]
    _choose_by_content(rows, left, chosen, needs_label=needs_label, numeric_label=numeric_label)
    for role in ("text", "label") if needs_label else ("text",):
        if role not in chosen:
            raise InputError(
                f"{name}: cannot tell which column holds the {ROLES[role]}; {_listing(names, width)}",
                hint=column_hint(role),
            )
    for role, column in chosen.items():
        if names is not None and not isinstance(asked.get(role), int):
            require_single(names, names[column], name=name)
    return Roles(
        text=chosen["text"],
        text2=chosen.get("text2"),
        label=chosen.get("label"),
        guessed=bool(chosen.keys() - asked.keys()),
    )


def _exists(column: str | int, names: Sequence[str] | None, width: int) -> bool:
    return column < width if isinstance(column, int) else column in (names or ())


def _find(column: str | int, names: Sequence[str] | None, width: int, *, role: str, name: str) -> int:
    if isinstance(column, int):
        if column < width:
            return column
        raise InputError(f"{name}: no column {column}; {_listing(None, width)}", hint=column_hint(role))
    assert names is not None, "a column was named, so the first row is one of names"
    if column in names:
        return list(names).index(column)
    raise InputError(f"{name}: no column '{column}'; {did_you_mean(column, names)}", hint=column_hint(role))


def _require_different(chosen: dict[str, int], names: Sequence[str] | None, *, name: str) -> None:
    by_column: dict[int, str] = {}
    for role, column in chosen.items():
        other = by_column.setdefault(column, role)
        if other != role:
            called = column if names is None else f"'{names[column]}'"
            raise InputError(
                f"{name}: {ROLES[other]} and {ROLES[role]} are the same column {called}", hint=column_hint(role)
            )


def _choose_by_name(plain: list[str], chosen: dict[str, int], *, numeric_label: bool) -> None:
    if "text" not in chosen:
        for first, second in PAIRS:
            if "text2" in chosen:
                fits = plain[chosen["text2"]] == second and first in plain
            else:
                fits = first in plain and second in plain
            if fits and not {plain.index(first), plain.index(second)} & _used(chosen, but="text2"):
                chosen["text"] = plain.index(first)
                chosen.setdefault("text2", plain.index(second))
                break
        else:
            _choose_first("text", TEXTS, plain, chosen)
    if "label" not in chosen:
        _choose_first("label", (*SCORES, *CLASSES) if numeric_label else (*CLASSES, *SCORES), plain, chosen)


def _choose_first(role: str, known: Sequence[str], plain: list[str], chosen: dict[str, int]) -> None:
    free = [name for name in known if name in plain and plain.index(name) not in chosen.values()]
    if free:
        chosen[role] = plain.index(free[0])


def _used(chosen: dict[str, int], *, but: str) -> set[int]:
    return {column for role, column in chosen.items() if role != but}


def _choose_by_content(
    rows: Sequence[Sequence[str]], columns: list[int], chosen: dict[str, int], *, needs_label: bool, numeric_label: bool
) -> None:
    """When no column is left over, what is missing must be what is left."""
    free = [column for column in columns if column not in chosen.values()]
    missing = [role for role in ("text", "label") if role not in chosen]
    if not needs_label and len(free) < len(missing):
        missing = ["text"] if "text" in missing else []
    if not missing or len(free) != len(missing):
        return
    if "label" in missing and len(free) > 1:
        free.sort(key=lambda column: _unlike_label([row[column] for row in rows], numeric=numeric_label), reverse=True)
    if needs_label or "text" in missing:  # what is left beside a known text need not be a label
        chosen.update(zip(missing, free, strict=True))


def _unlike_label(values: list[str], *, numeric: bool) -> tuple[bool, int, int]:
    """Small for a column of labels: numbers when those are wanted, few different values, short ones."""
    return numeric and not all(map(is_number, values)), len(set(values)), sum(map(len, values))


def _listing(names: Sequence[str] | None, width: int) -> str:
    if names is not None:
        return f"columns: {', '.join(names)}"
    return f"there are {width} columns, numbered from 0" if width > 1 else "there is one column, number 0"


def _plain(name: str) -> str:
    return re.sub(r"[\s-]+", "_", name.strip().lower())
