"""Tables of answers: the columns of the input table in order, then the columns of the answers.

The answers come as JSON lists, one a line in the order of the rows, from one process or several. The process that
writes reads every row and keeps it until its answer comes, so that no process sends rows.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, Literal

from tformer.data.sources.files import COMPRESSIONS, require_packages
from tformer.data.sources.parquet import parquet_schema
from tformer.data.sources.tables import LabelledRow, Table, json_objects, row_facts
from tformer.support.errors import InputError
from tformer.support.files import Write
from tformer.support.formatting import as_cell, json_text

Kind = Literal["text", "number", "list"]
"""What a column of answers holds; a list is of texts."""

DELIMITED = (".csv", ".tsv")
WRITTEN = (*DELIMITED, ".jsonl", ".parquet")
NOT_WRITTEN = (".xlsx", ".xls", ".ods", *COMPRESSIONS)
ABSENT = object()
"""The value of a key that a row of jsonl lacks."""


def output_format(output: Path | None, read: str | None, as_json: bool = False) -> str | None:
    """The format of answers to a table in the format `read`, or to lines (None): by the ending of the output file.

    One of `WRITTEN`; "rows": JSON objects with the row's number and id; None: lines, or objects without these. With
    another ending, and on standard output, it is that of the table that was read (of Parquet jsonl); lines are
    answered with lines, which .tsv holds as well.

    Raises InputError for an ending of a table that is not written.
    """
    ending = "" if output is None else output.suffix.lower()
    if ending in NOT_WRITTEN:
        known = ", ".join(WRITTEN)
        raise InputError(f"--output {output}: {ending} is not written", hint=f"give a file that ends in {known}")
    if as_json:
        return None if read is None else "rows"
    if ending in WRITTEN and not (read is None and ending == ".tsv"):
        require_packages(Path(f"answers{ending}"))
        return ending
    return {None: None, ".parquet": ".jsonl"}.get(read, read if read in WRITTEN else ".csv")


def new_names(wanted: Iterable[str], taken: Iterable[str], *, prefix: str = "predicted_") -> list[str]:
    """The wanted names of columns, each with the prefix where its name is taken."""
    used, names = set(taken), list[str]()
    for name in wanted:
        while name in used:
            name = f"{prefix}{name}"
        used.add(name)
        names.append(name)
    return names


@dataclass(frozen=True)
class AnswerTable:
    """A table of answers; in csv with the separator of the table that was read.

    Attributes:
        format: one of `WRITTEN`, or "rows".
        columns: names of the columns of the answers, and what they hold. A name that the table has gets a prefix.
        tables: that were read, with one set of columns; empty: the answers have all columns.
        separator: between the texts of a list, in csv and tsv.
        waiting: rows that were read and have no answer yet; with their records, but for "rows".
    """

    format: str
    columns: Sequence[tuple[str, Kind]]
    tables: Sequence[Table] = ()
    separator: str = "|"
    waiting: deque[LabelledRow] = field(default_factory=deque)

    def reading(self, rows: Iterable[LabelledRow]) -> Iterator[LabelledRow]:
        """Yield the rows, and put each into the queue of rows that wait for an answer."""
        for row in rows:
            self.waiting.append(row)
            yield row

    @contextmanager
    def writing(self, write: Write) -> Iterator[Write]:
        """A function that takes answers, and writes their rows with `write`, which gets bytes for Parquet.

        After an interrupt the table has the rows that were answered until then. Raises InputError for tables whose
        columns differ, and for two columns of one name where the format has no place for them.
        """
        if self.format == "rows":
            take_next = self.waiting.popleft
            yield lambda lines: write("".join(_json_line(row_facts(take_next()) | each) for each in _answers(lines)))
            return
        delimiter = self.tables[0].content.delimiter if self.tables and self.tables[0].format == ".csv" else ","
        read = self._columns_read()
        names = [name for name, _ in read]
        names += new_names((name for name, _ in self.columns), names)
        in_memory: list[list[Any]] = []  # rows of Parquet, whose types follow from all values
        if self.format in DELIMITED:
            write(delimited_lines([names], self.format, delimiter))

        def take(lines: str) -> None:
            rows = []
            for answer in _answers(lines):
                record = (self.waiting.popleft().record if self.tables else None) or []
                cells = [record.get(name, ABSENT) for name, _ in read] if isinstance(record, dict) else record
                if self.format in DELIMITED:
                    cells = list(map(as_text, cells))
                    answer = [self.separator.join(x) if isinstance(x, list) else as_text(x, digits=6) for x in answer]
                rows.append([*cells, *answer])
            if self.format == ".parquet":
                in_memory.extend(rows)
            elif self.format in DELIMITED:
                write(delimited_lines(rows, self.format, delimiter))
            else:
                write("".join(_json_line(dict(zip(names, row, strict=True))) for row in rows))

        try:
            yield take
        finally:
            if self.format == ".parquet":
                write(_parquet(names, [type for _, type in read], in_memory))

    def _columns_read(self) -> list[tuple[str, Any]]:
        """The name of each column that was read, and its `pyarrow.DataType` if it has one."""
        if not self.tables:
            return []
        first = self.tables[0]
        if first.format == ".jsonl":  # a later row may have keys that the first ones lack
            objects = chain.from_iterable(json_objects(table.content) for table in self.tables)
            return [(key, None) for key in dict.fromkeys(key for _, row in objects for key in row)]
        for other in self.tables:
            if (other.names, other.width) != (first.names, first.width):
                name = other.content.name
                raise InputError(f"{name} has other columns than {first.content.name}", hint="give each file alone")
        if first.format == ".parquet":
            return [(field.name, field.type) for field in parquet_schema(first.content.file)]
        names = list(first.names or map(str, range(first.width)))
        twice = [name for name in names if names.count(name) > 1]
        if twice and self.format not in DELIMITED:
            hint = "--output FILE.csv keeps both"
            raise InputError(f"{first.content.name}: two columns have the name '{twice[0]}'", hint=hint)
        return [(name, None) for name in names]


def _answers(lines: str) -> Iterator[Any]:
    return (json.loads(line) for line in lines.split("\n") if line)


# --- rows and cells ---------------------------------------------------------------------------------------------------


def as_text(value: Any, *, digits: int | None = None) -> str:
    """A value as the text of a cell: "" if it is missing, JSON for numbers, truth values, lists and objects.

    digits: of a number with a fraction; None: all.
    """
    if value is None or value is ABSENT or isinstance(value, str):
        return value if isinstance(value, str) else ""
    if isinstance(value, float) and digits is not None:
        return f"{value:.{digits}g}"
    is_json = isinstance(value, bool | int | float | list | dict)
    return json.dumps(value, ensure_ascii=False, default=str) if is_json else str(value)


def delimited_lines(rows: Iterable[Iterable[str]], format: str, delimiter: str = ",") -> str:
    """Rows of csv, with quotes where needed, or of tsv, with escaped tabs and line ends in cells."""
    if format == ".tsv":
        return "".join("\t".join(map(as_cell, row)) + "\n" for row in rows)
    marks = (delimiter, '"', "\r", "\n")
    pieces: list[str] = []  # joined once: a cell may be long, and `csv.writer` takes eight bytes for each character
    for row in rows:
        cells = [_quoted(cell) if any(mark in cell for mark in marks) else cell for cell in row]
        cells = cells if cells != [""] else [_quoted("")]
        pieces += [piece for cell in cells for piece in (delimiter, cell)][1:]
        pieces.append("\n")
    return "".join(pieces)


def _quoted(cell: str) -> str:
    return '"' + cell.replace('"', '""') + '"'


def _json_line(row: dict[str, Any]) -> str:
    present = {name: value for name, value in row.items() if value is not ABSENT}
    return json_text(present, default=str)


def _parquet(names: Sequence[str], types: Sequence[Any], rows: Sequence[Sequence[Any]]) -> bytes:
    """A Parquet file. `types`: of the first columns; None: the values' type, text if they have several."""
    import pyarrow as pa
    from pyarrow.parquet import write_table

    columns = []
    for type, values in zip_longest(types, zip(*rows, strict=True)):
        cells = [None if value is ABSENT else value for value in values]
        try:
            columns.append(pa.array(cells, type))
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
            columns.append(pa.array([None if value is None else as_text(value) for value in cells]))
    file = pa.BufferOutputStream()
    write_table(pa.table(columns, names=list(names)), file)
    return file.getvalue().to_pybytes()
