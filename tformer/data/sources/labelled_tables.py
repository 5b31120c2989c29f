"""Labelled rows of one table."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from tformer.data.sources.files import (
    Errors,
    Spool,
    compression_of,
    decode_text,
    file_fingerprint,
    read_bytes,
    split_lines,
)
from tformer.data.sources.labelled_columns import (
    ROLES,
    Roles,
    asked_columns,
    choose_columns,
    column_hint,
    has_names,
)
from tformer.data.sources.labels import (
    LabelRule,
    read_label,
)
from tformer.data.sources.locate import format_ending
from tformer.data.sources.tables import (
    Column,
    json_objects,
    json_text,
    parquet_names,
    parquet_records,
    require_single,
    table_cells,
)
from tformer.errors import InputError, did_you_mean

HEAD_ROWS = 200  # what columns are guessed from
Kind = Literal[".csv", ".tsv", ".jsonl", ".parquet", "lines"]
KINDS: dict[str, Kind] = {
    ".csv": ".csv",
    ".tsv": ".tsv",
    ".jsonl": ".jsonl",
    ".ndjson": ".jsonl",
    ".parquet": ".parquet",
}
LABEL_FORMATS = "labels stand in files that end in .csv, .tsv, .jsonl or .parquet"


@dataclass(frozen=True, slots=True)
class LabelledRow:
    """One example as it was read; `place` is where: "file.tsv:17"."""

    text: str
    text2: str | None
    label: str | None
    place: str


@dataclass(frozen=True)
class Raw:
    """The content behind a table: a file, or a spooled stream."""

    name: str
    path: Path | None
    spool: Spool | None
    errors: Errors

    def texts(self) -> Iterator[str]:
        chunks = read_bytes(self.path) if self.path is not None else self._stream().read()
        return decode_text(chunks, name=self.name, errors=self.errors)

    def fingerprint(self) -> str:
        return file_fingerprint(self.path) if self.path is not None else self._stream().fingerprint

    def size_bytes(self) -> int | None:
        if self.path is None:
            return self._stream().size
        plain = compression_of(self.path) is None and format_ending(self.path) != ".parquet"
        return self.path.stat().st_size if plain else None

    def _stream(self) -> Spool:
        assert self.spool is not None, "either a path or a spool"
        return self.spool


@dataclass(frozen=True)
class Table:
    """One opened table. `names` of its columns or keys; None: it has no row of names, or is plain text."""

    raw: Raw
    kind: Kind
    names: tuple[str, ...] | None
    width: int
    roles: Roles
    rule: LabelRule = field(default_factory=LabelRule)

    def rows(self) -> Iterator[LabelledRow]:
        """Every row in order; InputError names the line of one that is wrong."""
        return ROWS[self.kind](self)

    def column(self, role: str) -> Column:
        """How a column is called: its own name, else its number; None when there is none, or no columns at all."""
        index: int | None = getattr(self.roles, role)
        if index is None or self.kind == "lines":
            return None
        if self.names is None or self.names.count(self.names[index]) > 1:
            return index
        return self.names[index]

    def description(self) -> str:
        """Which columns hold what, for a person."""
        columns = {what: self.column(role) for role, what in ROLES.items()}
        parts = [f"{what} in column {column!r}" for what, column in columns.items() if column is not None]
        return ", ".join(parts) + ("" if self.names is not None else " (counted from 0; there is no row of names)")

    def fingerprint(self) -> str:
        roles = self.roles  # a resumed run asks for the columns that it guessed at first
        columns = f"{roles.text}:{roles.text2}:{roles.label}"
        return f"{self.kind}:{self.names is None}:{columns}:{self.raw.errors}:{self.raw.fingerprint()}"

    def size_bytes(self) -> int | None:
        return self.raw.size_bytes()


def open_table(raw: Raw, *, columns: Any, rule: LabelRule) -> Table:
    """Finds the kind of a table and its columns. InputError: no rows, a column that is missing or cannot be told."""
    asked = asked_columns(columns)
    kind = _kind(raw, asked, rule)
    if kind == "lines":
        return Table(raw, kind, None, 1, Roles(text=0, text2=None, label=None, guessed=False), rule)
    names, head = _head(raw, kind, asked)
    if names is None and not head:
        raise InputError(f"{raw.name}: no rows")
    roles = choose_columns(names, head, asked, name=raw.name, needs_label=rule.needed, numeric_label=rule.numeric)
    if not head:
        raise InputError(f"{raw.name}: no rows under the names of its columns")
    return Table(raw, kind, names, len(head[0] if names is None else names), roles, rule)


def _kind(raw: Raw, asked: dict[str, str | int], rule: LabelRule) -> Kind:
    """By the file's ending, else by its first lines; a .txt file is plain text unless labels are needed."""
    ending = format_ending(raw.path) if raw.path is not None else ""
    if ending in KINDS:
        return KINDS[ending]
    if ending == ".txt" and not rule.needed and not asked:
        return "lines"
    lines = [line for line in islice(split_lines(raw.texts(), name=raw.name), HEAD_ROWS) if not line.isspace()]
    kind = _sniff(lines, asked)
    if kind != "lines" or not (rule.needed or asked):
        return kind
    wanted = "labels" if rule.needed else "columns"
    raise InputError(f"{raw.name}: plain text has no {wanted}", hint=LABEL_FORMATS)


def _sniff(lines: list[str], asked: dict[str, str | int]) -> Kind:
    if not lines:
        return "lines"
    try:
        if isinstance(json.loads(lines[0], parse_int=str), dict):  # Python refuses to read very long numbers
            return ".jsonl"
    except (ValueError, RecursionError):
        pass
    tabs = {line.count("\t") for line in lines}
    if len(tabs) == 1 and tabs != {0}:
        return ".tsv"
    try:
        head = [row for row in csv.reader(lines[:HEAD_ROWS]) if row]
    except csv.Error:
        return "lines"
    first, is_named = head[0], any(isinstance(column, str) for column in asked.values())
    if len(first) > 1 and (set(asked.values()) & set(first) if is_named else has_names(head[:1], asked)):
        return ".csv"
    return "lines"


def _head(raw: Raw, kind: Kind, asked: dict[str, str | int]) -> tuple[tuple[str, ...] | None, list[list[str]]]:
    """The names of the columns, if it has any, and its first rows as text."""
    if kind == ".jsonl":
        for role, column in asked.items():
            if isinstance(column, int):
                raise InputError(
                    f"{raw.name}: jsonl has keys, not numbered columns, found {column}", hint=column_hint(role)
                )
        objects = [row for _, row in islice(json_objects(raw.texts(), name=raw.name), HEAD_ROWS)]
        keys = tuple(dict.fromkeys(key for row in objects for key in row))
        return keys or None, [[_as_text(row.get(key)) for key in keys] for row in objects]
    if kind == ".parquet":
        assert raw.path is not None, "only a file is Parquet"
        names = parquet_names(raw.path)
        for column in asked.values():
            if isinstance(column, int) and column < len(names):  # it is read by its name
                require_single(names, names[column], name=raw.name)
        records = islice(parquet_records(raw.path, lambda schema: names, skip_unreadable=True), HEAD_ROWS)
        return tuple(names), [list(map(_as_text, record)) for record in records]
    rows = [row for _, row in islice(table_cells(raw.texts(), name=raw.name, ending=kind), HEAD_ROWS) if row]
    width = len(rows[0]) if rows else 0
    rows = [row for row in rows if len(row) == width]  # others are named when they are read
    if rows and has_names(rows, asked):
        return tuple(rows[0]), rows[1:]
    return None, rows


def _as_text(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else json.dumps(value, default=str)


def _delimited_rows(table: Table) -> Iterator[LabelledRow]:
    name, width, rule, roles = table.raw.name, table.width, table.rule, table.roles
    waits_for_names = table.names is not None
    for number, cells in table_cells(table.raw.texts(), name=name, ending=table.kind):
        place = f"{name}:{number}"
        if not cells:
            if not rule.needed:  # an empty line in, an empty answer out
                yield LabelledRow("", None if roles.text2 is None else "", None, place)
            continue
        if waits_for_names:
            waits_for_names = False
            continue
        if len(cells) != width:
            raise InputError(
                f"{place}: expected {width} fields, found {len(cells)}",
                hint='a field with a comma or a line break stands in "quotes"' if table.kind == ".csv" else None,
            )
        yield LabelledRow(
            cells[roles.text],
            None if roles.text2 is None else cells[roles.text2],
            None if roles.label is None else read_label(cells[roles.label], rule, place=place),
            place,
        )


def _named_rows(table: Table) -> Iterator[LabelledRow]:
    """Rows whose values have types: of jsonl, of Parquet."""
    name, errors, rule = table.raw.name, table.raw.errors, table.rule
    keys = {role: table.column(role) for role in ROLES}
    records: Iterator[tuple[int, Mapping[str, Any]]]
    if table.kind == ".jsonl":
        records = json_objects(table.raw.texts(), name=name)
    else:
        assert table.raw.path is not None, "only a file is Parquet"
        wanted = list(dict.fromkeys(str(key) for key in keys.values() if key is not None))
        values = parquet_records(table.raw.path, lambda schema: wanted)
        records = ((number, dict(zip(wanted, row, strict=True))) for number, row in enumerate(values, 1))
    text, text2, label = (None if key is None else str(key) for key in keys.values())
    assert text is not None, "every table has a text"
    for number, record in records:
        place = f"{name}:{number}"
        if label is not None and rule.needed and label not in record:
            raise InputError(f"{place}: no key '{label}'; {did_you_mean(label, record)}", hint=column_hint("label"))
        yield LabelledRow(
            json_text(record, text, place=place, errors=errors),
            None if text2 is None else json_text(record, text2, place=place, errors=errors),
            None if label is None else read_label(record.get(label), rule, place=place, errors=errors),
            place,
        )


def _line_rows(table: Table) -> Iterator[LabelledRow]:
    for number, line in enumerate(split_lines(table.raw.texts(), name=table.raw.name), 1):
        yield LabelledRow(line.removesuffix("\n"), None, None, f"{table.raw.name}:{number}")


ROWS: dict[Kind, Callable[[Table], Iterator[LabelledRow]]] = {
    ".csv": _delimited_rows,
    ".tsv": _delimited_rows,
    ".jsonl": _named_rows,
    ".parquet": _named_rows,
    "lines": _line_rows,
}
