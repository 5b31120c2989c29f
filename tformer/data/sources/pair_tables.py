"""Pairs of one table."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, cast

from tformer.data.sources.files import split_lines
from tformer.data.sources.labelled_tables import (
    HEAD_ROWS,
    KINDS,
    Raw,
)
from tformer.data.sources.locate import format_ending
from tformer.data.sources.pair_columns import (
    Columns,
    PairRoles,
    asked_columns,
    choose_columns,
    column_hint,
    column_name,
    has_names,
    is_present,
)
from tformer.data.sources.tables import (
    json_objects,
    json_text,
    parquet_names,
    parquet_records,
    require_single,
    table_cells,
)
from tformer.errors import InputError, did_you_mean

Kind = Literal[".csv", ".tsv", ".jsonl", ".parquet"]


@dataclass(frozen=True, slots=True)
class PairRow:
    """One pair as it was read; `place` is where: "file.tsv:17"."""

    source: str
    target: str
    place: str
    task: str = ""


@dataclass(frozen=True)
class PairTable:
    """One opened table. `names` of its columns or keys; None: it has no row of names."""

    raw: Raw
    kind: Kind
    names: tuple[str, ...] | None
    width: int
    roles: PairRoles

    def rows(self) -> Iterator[PairRow]:
        """Every row in order; InputError names the line of one that is wrong."""
        return ROWS[self.kind](self)

    def column(self, role: Literal["source", "target"]) -> str | int:
        """How the column (or columns) of a side can be asked for."""
        return column_name(getattr(self.roles, role), self.names)

    def description(self) -> str:
        """Which columns hold what, for a person."""
        text = f"source in column {self.column('source')!r}, target in column {self.column('target')!r}"
        return text + ("" if self.names is not None else " (counted from 0; there is no row of names)")

    def fingerprint(self) -> str:
        columns = f"{self.roles.source}:{self.roles.target}"
        return f"{self.kind}:{self.names is None}:{columns}:{self.raw.errors}:{self.raw.fingerprint()}"

    def size_bytes(self) -> int | None:
        return self.raw.size_bytes()


def open_pair_table(raw: Raw, *, columns: Columns | None, preferred: Columns | None = None) -> PairTable:
    """Finds the kind of a table and its columns; what was not asked for is `preferred`, where the table has that.

    Raises InputError: no table, no rows, a column missing or not to be told.
    """
    asked = asked_columns(columns)
    kind = _kind(raw, asked_columns(preferred) | asked)
    wished = {role: column for role, column in asked_columns(preferred).items() if column not in asked.values()}
    asked = _present(raw, kind, wished) | asked
    names, head = _head(raw, kind, asked)
    if names is None and not head:
        raise InputError(f"{raw.name}: no rows")
    first = head[0] if names is None else names
    roles = choose_columns(names, first, asked, name=raw.name)
    if not head:
        raise InputError(f"{raw.name}: no rows under the names of its columns")
    return PairTable(raw, kind, names, len(first), roles)


def _present(raw: Raw, kind: Kind, wished: dict[str, str | int]) -> dict[str, str | int]:
    """The columns that the table has: by name, and by number if it has no row of names."""
    names, head = _head(raw, kind, {}) if wished else (None, [])
    first = [str(cell) for cell in names or (head[0] if head else ())]
    return {role: column for role, column in wished.items() if is_present(column, first, named=names is not None)}


def _kind(raw: Raw, asked: dict[str, str | int]) -> Kind:
    """By the file's ending, else by its first lines."""
    ending = format_ending(raw.path) if raw.path is not None else ""
    if ending in KINDS:
        return cast(Kind, KINDS[ending])
    lines = [line for line in islice(split_lines(raw.texts(), name=raw.name), HEAD_ROWS) if not line.isspace()]
    if not lines:
        raise InputError(f"{raw.name}: no rows")
    kind = _sniff(lines, asked)
    if kind is None:
        raise InputError(
            f"{raw.name}: plain text is one side of pairs, found no other",
            hint="give the file with the other side (target_path), or one that ends in .tsv, .csv, .jsonl or .parquet",
        )
    return kind


def _sniff(lines: list[str], asked: dict[str, str | int]) -> Kind | None:
    try:
        if isinstance(json.loads(lines[0], parse_int=str), dict):  # Python refuses to read very long numbers
            return ".jsonl"
    except (ValueError, RecursionError):
        pass
    tabs = {line.count("\t") for line in lines}
    if len(tabs) == 1 and tabs != {0}:
        return ".tsv"
    try:
        first = next(csv.reader(lines[:1]), [])
    except csv.Error:
        return None
    by_number = {role: column for role, column in asked.items() if isinstance(column, int)}
    named = any(column in first for column in asked.values())
    return ".csv" if len(first) > 1 and (named or has_names([first], by_number)) else None


def _head(raw: Raw, kind: Kind, asked: dict[str, str | int]) -> tuple[tuple[str, ...] | None, list[Sequence[Any]]]:
    """The names of the columns, if it has any, and its first rows."""
    if kind == ".jsonl":
        for role, column in asked.items():
            if isinstance(column, int):
                raise InputError(
                    f"{raw.name}: jsonl has keys, not numbered columns, found {column}", hint=column_hint(role)
                )
        objects = [row for _, row in islice(json_objects(raw.texts(), name=raw.name), HEAD_ROWS)]
        keys = tuple(dict.fromkeys(key for row in objects for key in row))
        return keys or None, [list(row.values()) for row in objects]
    if kind == ".parquet":
        assert raw.path is not None, "only a file is Parquet"
        names = parquet_names(raw.path)
        records = parquet_records(raw.path, lambda schema: names, skip_unreadable=True)
        return tuple(names), list(islice(records, 1))
    rows = [row for _, row in islice(table_cells(raw.texts(), name=raw.name, ending=kind), HEAD_ROWS) if row]
    if rows and has_names(rows, asked):
        return tuple(rows[0]), list(rows[1:])
    return None, list(rows)


def _delimited_rows(table: PairTable) -> Iterator[PairRow]:
    name, width, roles = table.raw.name, table.width, table.roles
    waits_for_names = table.names is not None
    for number, cells in table_cells(table.raw.texts(), name=name, ending=table.kind):
        if not cells:
            continue
        if waits_for_names:
            waits_for_names = False
            continue
        if len(cells) != width:
            raise InputError(
                f"{name}:{number}: expected {width} fields, found {len(cells)}",
                hint='a field with a comma or a line break stands in "quotes"' if table.kind == ".csv" else None,
            )
        source, target = (_join([cells[column] for column in side]) for side in (roles.source, roles.target))
        yield PairRow(source, target, f"{name}:{number}")


def _named_rows(table: PairTable) -> Iterator[PairRow]:
    """Rows whose values have types: of jsonl, of Parquet."""
    name, names, errors = table.raw.name, table.names, table.raw.errors
    assert names is not None, "every column of jsonl and Parquet has a name"
    sides = {"source": [names[c] for c in table.roles.source], "target": [names[c] for c in table.roles.target]}
    records: Iterator[tuple[int, Mapping[str, Any]]]
    if table.kind == ".jsonl":
        records = json_objects(table.raw.texts(), name=name)
    else:
        assert table.raw.path is not None, "only a file is Parquet"
        wanted = [column for side in sides.values() for column in side]
        for column in wanted:  # it is read by its name
            require_single(names, column, name=name)
        values = parquet_records(table.raw.path, lambda schema: wanted)
        records = ((number, dict(zip(wanted, row, strict=True))) for number, row in enumerate(values, 1))
    for number, record in records:
        place = f"{name}:{number}"
        texts = []
        for role, side in sides.items():
            for key in side:
                if key not in record:
                    raise InputError(f"{place}: no key '{key}'; {did_you_mean(key, record)}", hint=column_hint(role))
            texts.append(_join([json_text(record, key, place=place, errors=errors) for key in side]))
        yield PairRow(texts[0], texts[1], place)


def _join(texts: list[str]) -> str:
    return texts[0] if len(texts) == 1 else " ".join(text for text in texts if text)


ROWS: dict[Kind, Callable[[PairTable], Iterator[PairRow]]] = {
    ".csv": _delimited_rows,
    ".tsv": _delimited_rows,
    ".jsonl": _named_rows,
    ".parquet": _named_rows,
}
