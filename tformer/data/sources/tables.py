"""Tables: csv, tsv, spreadsheets, jsonl and Parquet, read row by row any number of times; and lines of text as rows.

The format follows from the file's ending, else from its first lines. The roles of its columns (`columns.Layout`) are
found in its first rows when it is opened.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import Any, Protocol, TypeVar

from tformer.data.sources.columns import (
    ROLES,
    Chosen,
    Column,
    LabelForm,
    Layout,
    TableHead,
    column_hint,
    column_name,
    id_column,
    is_present,
    require_single,
)
from tformer.data.sources.files import (
    MAX_ROW_CHARACTERS,
    SHEETS,
    Content,
    FilePath,
    Found,
    format_ending,
    size_of,
    split_lines,
)
from tformer.data.sources.parquet import parquet_rows, parquet_schema
from tformer.data.sources.reading import DELIMITERS, BadRows, Reading, whole_characters
from tformer.data.sources.spreadsheets import open_sheet, sheet_rows
from tformer.support.errors import InputError, did_you_mean
from tformer.support.formatting import kind_of
from tformer.support.options import Errors

HEAD_ROWS = 200  # from which columns are guessed
HEAD_CHARACTERS = 1 << 16  # of each cell there
LINES = "lines"  # the format of plain text, one text a line
SHEET = "sheet"  # the format of spreadsheets
CELLS = (".csv", ".tsv", SHEET)  # formats whose cells are text, without names of their own
FORMATS = {".csv": ".csv", ".tsv": ".tsv", ".jsonl": ".jsonl", ".ndjson": ".jsonl", ".parquet": ".parquet"}
FORMATS |= dict.fromkeys(SHEETS, SHEET)
"""The format of each file ending."""
IN_FOLDERS = tuple(ending for ending in FORMATS if ending not in SHEETS)
"""Endings of the tables that a folder gives: a spreadsheet among them may be a copy."""


@dataclass(frozen=True, slots=True)
class LabelledRow:
    """One example as it was read; `place` is "file.tsv:17".

    `number` counts the rows of its table from 0, `id` is its cell in the table's column of ids; None: there is none.
    `group`: rows of one group are never divided between training and what it is measured on. `record`: all cells in
    the order of `Table.names`, of jsonl the object; None: the table does not keep it. `negatives`: wrong second texts.
    """

    text: str
    text2: str | None
    label: str | None
    place: str
    number: int | None = field(default=None, compare=False)
    id: str | None = field(default=None, compare=False)
    group: str | None = field(default=None, compare=False)
    record: list[Any] | dict[str, Any] | None = field(default=None, compare=False)
    negatives: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TaggedRow(LabelledRow):
    """A sentence of words with tags.

    `spans`: first character of each word in `text`, and the one after the last. `tags`: of each word. Of a window of a
    sentence, `seen`: int64, the numbers of the words that have their label there; `marks`: int64, of each token.
    """

    spans: tuple[tuple[int, int], ...] = ()
    tags: tuple[str, ...] = ()
    seen: Any = field(default=None, compare=False)
    marks: Any = field(default=None, compare=False)

    @classmethod
    def of(cls, words: Sequence[str], tags: Sequence[str], place: str) -> TaggedRow:
        """The words with a space between them."""
        ends = accumulate(len(word) + 1 for word in words)
        spans = tuple((end - 1 - len(word), end - 1) for word, end in zip(words, ends, strict=True))
        return cls(" ".join(words), None, "", place, spans=spans, tags=tuple(tags))


@dataclass(frozen=True, slots=True)
class PairRow:
    """One pair as it was read; `place` is "file.tsv:17"; `number` and `id` as in a `LabelledRow`."""

    source: str
    target: str
    place: str
    task: str = ""
    number: int | None = field(default=None, compare=False)
    id: str | None = field(default=None, compare=False)


def row_facts(row: LabelledRow | PairRow) -> dict[str, Any]:
    """Number (`row`, from 0) and `id` of a row, those that are known, for listings."""
    return {key: value for key, value in (("row", row.number), ("id", row.id)) if value is not None}


class RowSource(Protocol):
    """Rows to tokenize: an opened source, or rows in memory."""

    @property
    def name(self) -> str: ...
    def rows(self) -> Iterator[Any]: ...
    def fingerprint(self) -> str: ...


def table_format(path: FilePath) -> str | None:
    """The format of a file by its ending, as in `FORMATS`; None if it is no table."""
    return FORMATS.get(format_ending(path))


def form_key(content: Content, format: str) -> str:
    """Format, separator and quotes, for fingerprints."""
    if format != ".csv":
        return format
    delimiter = "" if content.delimiter == "," else content.delimiter
    return f"{format}{delimiter}{':quotes' if content.reading.quotes == 'text' else ''}"


def format_by_name(content: Content) -> str | None:
    """The format by the file's ending, unless the user named a separator that is not its own."""
    format = None if content.path is None else table_format(content.path)
    separator = content.reading.separator
    names_csv = format is None or (format == ".tsv" and separator != "\t")
    return ".csv" if separator is not None and names_csv else format


SomeTable = TypeVar("SomeTable", bound="Table")


@dataclass(frozen=True)
class Table(ABC):
    """An opened table; a subclass makes its rows.

    Attributes:
        format: a value of `FORMATS`, or `LINES`.
        names: of its columns or keys; None if it has no row of names.
        columns: numbers of the columns of each role that it has.
        guessed: whether any of these was not named by the user.
        found: what else was found: encoding, separator, sheet; in words.
        label_form: of its labels, see `Layout.label_form`.
        id_column: number of the column of ids; None: there is none.
        keeps_records: labelled rows have their `record`.
    """

    content: Content
    layout: Layout
    format: str
    names: tuple[str, ...] | None
    width: int
    columns: Chosen
    guessed: bool
    found: tuple[str, ...] = ()
    label_form: LabelForm = ""
    id_column: int | None = None
    keeps_records: bool = False

    @abstractmethod
    def row(self, values: list[Any], **facts: Any) -> Any:
        """Build a row of values in the order of `columns`; there are no values for a blank line that is kept.

        facts: its `place`, `number` and `id`, and its `record` if that is kept.

        A label of jsonl and Parquet is as it was written, and None where it is missing and not required; all other
        values are text.
        """

    @abstractmethod
    def columns_key(self) -> str:
        """Numbers of columns, for the fingerprint: a resumed run names the columns that its first start guessed."""

    def rows(self) -> Iterator[Any]:
        """Every row. Raises InputError with the place ("file.tsv:17") of a wrong one, or for several with their number.

        With `Reading.bad_rows` "drop" wrong rows are left out.
        """
        bad, drops = BadRows(), self.content.reading.drops
        for place, _, row in self._attempts():
            if isinstance(row, InputError):
                bad.add(place, row)
            elif drops or not bad.total:  # after a wrong row, the others are only counted
                yield row
        if bad.total and not drops:
            raise bad.error(self.content.name)

    def bad_rows(self) -> Iterator[tuple[str, Any, InputError]]:
        """(place, what was read, error) of every wrong row."""
        for place, raw, row in self._attempts():
            if isinstance(row, InputError):
                yield place, raw, row

    def _attempts(self) -> Iterator[tuple[str, Any, Any]]:
        """(place, what was read, the row or its InputError) of every row."""
        parse = self._parser()
        for index, (number, raw) in enumerate(self._raw_rows()):
            place = f"{self.content.name}:{number}"
            try:
                values, record = parse(place, raw)
                facts = {"place": place, "number": index, "id": self._id_of(record)}
                if self.keeps_records:
                    facts["record"] = [""] * self.width if record == [] else record
                row = self.row(values, **facts)
            except InputError as error:
                row = error
            yield place, raw, row

    def records(self) -> Iterator[tuple[Mapping[str, Any], Collection[str]]]:
        """Yield each readable row as values by name of column or key, with the names that are used."""
        nameless = self.names is None and self.format in (*CELLS, LINES)
        for _, raw in () if nameless else replace(self, keeps_records=True)._raw_rows():
            with suppress(InputError):
                record = dict(zip(self.names or (), raw, strict=False)) if isinstance(raw, list) else raw
                record = self.layout.flat(json_object(raw, place="")) if isinstance(raw, str) else record
                yield record, self.used(record)

    def used(self, record: Mapping[str, Any]) -> Collection[str]:
        """The names in a record that are used."""
        used = {*chain(*self.columns.values()), self.id_column}
        return [(self.names or ())[column] for column in used if column is not None]

    def _id_of(self, record: Any) -> str | None:
        if self.id_column is None or not record:
            return None
        if isinstance(record, list):
            return str(record[self.id_column])
        value = record.get((self.names or ())[self.id_column])
        return None if value is None else str(value)

    def _raw_rows(self) -> Iterator[tuple[int, Any]]:
        """(number of its line, what was read) of every row: cells, a line, or the record of a Parquet file."""
        content, names = self.content, self.names or ()
        if self.format == ".parquet":
            ids = () if self.id_column is None else (self.id_column,)
            used = (column for numbers in (*self.columns.values(), ids) for column in numbers)
            read = list(names) if self.keeps_records else [names[column] for column in used]
            there, nested = parquet_schema(content.file).names, self.layout.nests
            read = list(dict.fromkeys(name if nested is None or name in there else nested for name in read))
            for number, row in enumerate(parquet_rows(content.file, read), 1):
                yield number, self.layout.flat(dict(zip(read, row, strict=True)))
        elif self.format in CELLS:
            below_names = self.names is None
            for number, cells in delimited_cells(content, self.format):
                if cells and not below_names:
                    below_names = True
                elif cells or self.layout.keeps_blank_lines:
                    yield number, cells
        else:
            for number, line in enumerate(split_lines(content.texts(), name=content.name), 1):
                if self.format == LINES or not line.isspace():
                    yield number, line.removesuffix("\n")

    def _parser(self) -> Callable[[str, Any], tuple[list[Any], Any]]:
        """The function (place, what was read) -> (values in the order of `columns`, all cells or the record).

        It raises InputError for a row that has not all of them.
        """
        if self.format == LINES:
            return lambda place, line: ([line], [line])
        return self._parse_cells() if self.format in CELLS else self._parse_record()

    def _parse_cells(self) -> Callable[[str, list[str]], tuple[list[Any], Any]]:
        columns, joins = list(self.columns.values()), self._joins
        is_plain = all(len(numbers) == 1 for numbers in columns) and list not in joins

        def parse(place: str, cells: list[str]) -> tuple[list[Any], Any]:
            if not cells:
                return [], []
            if len(cells) != self.width:
                raise InputError(
                    f"{place}: expected {self.width} fields, found {len(cells)}",
                    hint='put a field with a comma or a line break in "quotes"' if self.format == ".csv" else None,
                )
            if not is_plain:
                given = ([cells[column] for column in numbers] for numbers in columns)
                return [join(texts) for join, texts in zip(joins, given, strict=True)], cells
            return [cells[numbers[0]] for numbers in columns], cells

        return parse

    @property
    def _joins(self) -> list[Callable[[list[str]], Any]]:
        """For each role the function that joins the texts of its columns."""
        return [list if role in self.layout.apart else _joined for role in self.columns]

    def _parse_record(self) -> Callable[[str, Any], tuple[list[Any], Any]]:
        """The parser of records of jsonl and Parquet, whose values have several types."""
        names, errors, joins = self.names, self.content.errors, self._joins
        assert names is not None, "every column of jsonl and Parquet has a name"
        keys = {role: [names[column] for column in numbers] for role, numbers in self.columns.items()}
        required = [(role, key) for role in self.layout.required for key in keys.get(role, ())]

        def parse(place: str, row: Any) -> tuple[list[Any], Any]:
            record = self.layout.flat(json_object(row, place=place)) if isinstance(row, str) else row
            for role, key in required:
                if key not in record:
                    raise missing_key(record, key, role=role, place=place)

            def texts(role: str, key: str) -> list[str]:
                value = record.get(key)
                given = value if isinstance(value, list) and role in self.layout.apart else [value]
                return [text_value(one, key, place=place, errors=errors) for one in given]

            values = [
                record.get(several[0])
                if role in ("label", "group")
                else join([text for key in several for text in texts(role, key)])
                for (role, several), join in zip(keys.items(), joins, strict=True)
            ]
            return values, record

        return parse

    def fingerprint(self) -> str:
        content, has_no_names = self.content, self.names is None
        form = f"{form_key(content, self.format)}{self.label_form and f':{self.label_form}'}"
        form += ":drop" if content.reading.drops else ""
        return f"{form}:{has_no_names}:{self.columns_key()}:{content.decoding}:{content.fingerprint()}"

    @property
    def contents(self) -> tuple[Content, ...]:
        return (self.content,)

    def column(self, role: str) -> Column:
        """The column or columns of a role as a user names them; None if the table has none."""
        if role not in self.columns or self.format == LINES:
            return None
        return column_name(self.columns[role], self.names)

    def description(self) -> str:
        """The columns and their contents, for messages."""
        parts = [*self.found, *(f"{ROLES[role]} in column {self.column(role)!r}" for role in self.columns)]
        return ", ".join(parts) + ("" if self.names is not None else " (counted from 0; there is no row of names)")


def _open_table(
    kind: type[SomeTable], content: Content, layout: Layout, *, columns: object, preferred: object
) -> SomeTable:
    """Finds the format of a table and the columns of its roles.

    Args:
        columns: what the user named: an attribute for each role.
        preferred: columns to use for other roles, in a table that has them.

    Raises InputError for a file without a table or without rows, and for a column that is missing or ambiguous.
    """
    named = layout.named(columns)
    wished = {role: column for role, column in layout.named(preferred).items() if column not in named.values()}
    format = _find_format(content, layout, wished | named)
    if format == LINES:
        return kind(content, layout, format, None, 1, {"text": (0,)}, guessed=False)
    if wished:
        head = _head(content, format, layout, {})
        first = head.names or (head.rows[0] if head.rows else ())
        has_names = head.names is not None
        present = {role: each for role, each in wished.items() if is_present(each, first, has_names=has_names)}
        named = present | named
    head = _head(content, format, layout, named)
    if head.names is None and not head.rows:
        raise InputError(f"{content.name}: no rows")
    chosen = layout.choose(head, named)
    if not head.rows:
        raise InputError(f"{content.name}: no rows under the names of its columns")
    if format == ".parquet" and head.names is not None:  # columns are read by their names
        for numbers in chosen.values():
            for number in numbers:
                require_single(head.names, head.names[number], name=content.name)
    guessed = bool(chosen.keys() - named.keys())
    form = layout.label_form([row[chosen["label"][0]] for row in head.rows] if "label" in chosen else [])
    return kind(
        content,
        layout,
        format,
        head.names,
        head.width,
        chosen,
        guessed,
        found=(*_found_form(content, format), *(["decimal commas"] if form == "decimal commas" else [])),
        label_form=form,
        id_column=id_column(head, chosen),
    )


def _found_form(content: Content, format: str) -> Iterator[str]:
    """The unusual facts found about a table's form, in words."""
    reading = content.reading
    if content.encoding != "utf-8" and reading.encoding is None:
        yield f"encoding {content.encoding}"
    if format == ".csv" and content.delimiter != "," and reading.delimiter is None:
        yield f"separator {DELIMITERS[content.delimiter]}"
    if format == SHEET:
        sheet, count = open_sheet(content)
        if count > 1:
            yield f"sheet '{sheet.name}', the first of {count}"


def open_tables(
    kind: type[SomeTable], found: Found, layout: Layout, *, reading: Reading, columns: object, preferred: object = None
) -> list[SomeTable]:
    """A table for each located file that is not empty."""
    return [
        _open_table(kind, content, layout, columns=columns, preferred=preferred)
        for content in found.contents(reading, are_tables=True, accepts=("jsonl",))
        if content.path is None or size_of(content.path)
    ]


def guessed_columns(tables: Sequence[Table]) -> tuple[str, ...]:
    """Notes on guessed columns and found forms: one for each way, with the first file that it was used for."""
    notes: dict[str, str] = {}
    for table in tables:
        # Without a row of names, one may have been read as data.
        if table.guessed or table.found or (table.format != LINES and table.names is None):
            notes.setdefault(table.description(), Path(table.content.name).name)
    return tuple(f"{name}: {description}" for description, name in notes.items())


def _find_format(content: Content, layout: Layout, named: Mapping[str, str | int]) -> str:
    """Find the format by the file's ending, else by its first lines."""
    if (format := format_by_name(content)) is not None:
        return format
    if content.path is not None and format_ending(content.path) == ".txt" and layout.accepts_plain_text(named):
        return LINES
    lines, tabs = list[str](), set[int]()
    for line in islice(split_lines(content.texts(), name=content.name), HEAD_ROWS):
        if not line.isspace():
            tabs.add(line.count("\t"))
            lines.append(line[:HEAD_CHARACTERS] if lines else line)
    format = _sniff(content, lines, tabs, layout, named) if lines else LINES
    if format == LINES and not layout.accepts_plain_text(named):
        raise layout.plain_text_error(content.name, empty=not lines)
    return format


def _sniff(content: Content, lines: list[str], tabs: set[int], layout: Layout, named: Mapping[str, str | int]) -> str:
    try:
        if isinstance(json.loads(lines[0], parse_int=str), dict):  # Python refuses to read very long numbers
            return ".jsonl"
    except (ValueError, RecursionError):
        pass
    if len(tabs) == 1 and tabs != {0}:
        return ".tsv"
    try:
        first = next((row for row in csv.reader(lines, delimiter=content.delimiter) if row), [])
    except csv.Error:
        return LINES
    by_number = {role: column for role, column in named.items() if isinstance(column, int)}
    has_names = any(column in first for column in named.values())
    return ".csv" if len(first) > 1 and (has_names or layout.has_names([first], by_number)) else LINES


def _head(content: Content, format: str, layout: Layout, named: Mapping[str, str | int]) -> TableHead:
    if format == ".jsonl":
        for role, column in named.items():
            if isinstance(column, int):
                raise InputError(
                    f"{content.name}: jsonl has keys, not numbered columns, found {column}", hint=column_hint(role)
                )
        rows = islice(json_objects(content, skip_wrong=True), HEAD_ROWS)
        objects = [{key: _as_text(value) for key, value in layout.flat(row).items()} for _, row in rows]
        keys = tuple(dict.fromkeys(key for row in objects for key in row))
        return TableHead(content.name, keys or None, [[row.get(key, "") for key in keys] for row in objects])
    if format == ".parquet":
        names = parquet_schema(content.file).names
        values: Iterator[tuple[Any, ...]] = islice(parquet_rows(content.file, names, skip_unreadable=True), HEAD_ROWS)
        if layout.nests in names:
            objects = [layout.flat(dict(zip(names, row, strict=True))) for row in values]
            names = list(dict.fromkeys(key for row in objects for key in row))
            values = (tuple(map(row.get, names)) for row in objects)
        return TableHead(content.name, tuple(names), [list(map(_as_text, row)) for row in values])
    cells = [list(map(_as_text, row)) for _, row in islice(delimited_cells(content, format), HEAD_ROWS) if row]
    cells = [row for row in cells if len(row) == len(cells[0])]  # other widths are reported when rows are read
    if cells and layout.has_names(cells, named):
        return TableHead(content.name, tuple(cells[0]), cells[1:])
    return TableHead(content.name, None, cells)


def _as_text(value: Any) -> str:
    text = "" if value is None else value if isinstance(value, str) else json.dumps(value, default=str)
    return text[:HEAD_CHARACTERS]


def _joined(texts: list[str]) -> str:
    return texts[0] if len(texts) == 1 else " ".join(text for text in texts if text)


def missing_key(record: Mapping[str, Any], key: str, *, role: str, place: str) -> InputError:
    """The error of a record without a key."""
    return InputError(f"{place}: no key '{key}'; {did_you_mean(key, record)}", hint=column_hint(role, record))


def text_value(value: Any, key: str, *, place: str, errors: Errors) -> str:
    """A value of jsonl or Parquet as text, empty for null. Raises InputError for any other type."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise InputError(f"{place}: '{key}' should be text, found {kind_of(value)}")
    return whole_characters(value, place=place, errors=errors)


# -- formats -----------------------------------------------------------------------------------------------------------


def delimited_cells(content: Content, format: str) -> Iterator[tuple[int, list[str]]]:
    """(number of its last line, cells) of every row of a csv or tsv file or a spreadsheet; a blank row has no cells.

    csv is read as spreadsheets write it, with quotes, and `Content.delimiter` between cells. In tsv every tab separates
    cells and every newline rows; a quote has no meaning. Raises InputError for a quote that opens a cell and was text:
    one that is not closed before a separator or a line end, or, unless quotes were named, one that makes a row of
    several lines that have all separators of a row each. A separator before a space or at a line's end may be prose.
    """
    if format == SHEET:
        yield from sheet_rows(content)
        return
    lines = split_lines(content.texts(), name=content.name)
    if format == ".tsv":
        for number, line in enumerate(lines, 1):
            text = line.removesuffix("\n")
            yield number, text.split("\t") if text else []
        return
    csv.field_size_limit(MAX_ROW_CHARACTERS)
    quoting: Any = csv.QUOTE_NONE if content.reading.quotes == "text" else csv.QUOTE_MINIMAL
    separator, width = re.compile(f"{re.escape(content.delimiter)}(?![ \n])"), 0
    read = list[str]()  # lines of the row
    # A generator would hold the last line.
    kept = map(lambda line: read.append(line) or line, lines)  # type: ignore[func-returns-value]  # noqa: C417
    rows = csv.reader(kept, delimiter=content.delimiter, quoting=quoting, strict=True)
    try:
        for row in rows:
            width = width or len(row)
            if content.reading.quotes is None and len(read) > 1 < width:
                found = {len(separator.findall(line)) for line in read if not line.isspace()}
                if found == {width - 1}:
                    end = f"closed in line {rows.line_num}, but each line has all separators of a row"
                    begin = rows.line_num - len(read) + 1
                    raise _wrong_quote(content.name, begin, end, ", --quotes cells keeps the row")
            read.clear()  # a long line is not held with its cells
            yield rows.line_num, row
    except csv.Error as error:
        if "new-line character" in str(error):
            hint = "it ends no row: quote the cell, or end rows with \\n"
            raise InputError(f"{content.name}:{rows.line_num}: a carriage return outside quotes", hint=hint) from None
        is_closed = "expected after" in str(error)
        end = f"closed in line {rows.line_num}, but not at the end of a cell" if is_closed else "never closed"
        raise _wrong_quote(content.name, rows.line_num - len(read) + 1, end) from None


def _wrong_quote(name: str, line: int, end: str, other: str = "") -> InputError:
    """The error for a quote that opens a cell in this line and is text. end: where it is closed; other: of the hint."""
    hint = f'--quotes text reads quotes as text{other}; inside a quoted cell each is written twice ("")'
    return InputError(f"{name}:{line}: a quote opens a cell and is {end}", hint=hint)


def json_objects(content: Content, *, skip_wrong: bool = False) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of every line that is not blank.

    skip_wrong: leave out what is none, if any line holds one.
    """
    first: InputError | None = None
    found = False
    for number, line in enumerate(split_lines(content.texts(), name=content.name), 1):
        if line.isspace():
            continue
        try:
            row = json_object(line, place=f"{content.name}:{number}")
        except InputError as error:
            if not skip_wrong:
                raise
            first = first or error
            continue
        found = True
        yield number, row
    if first is not None and not found:
        raise first


def json_object(line: str, *, place: str, expected: str = "an object") -> dict[str, Any]:
    """The object that a line of jsonl, or a text, holds. Raises InputError, with `expected`, for anything else."""
    try:
        row = json.loads(line.removesuffix("\n"))  # else an error at its end is reported one line further
    except json.JSONDecodeError as error:
        what, of = error.msg.removesuffix(" at"), f" of line {error.lineno}" if error.lineno > 1 else ""
        raise InputError(f"{place}: not JSON: {what} at character {error.colno}{of}") from None
    except ValueError:  # the only other one that is raised
        raise InputError(
            f"{place}: a whole number of more than {sys.get_int_max_str_digits():,} digits",
            hint='write it as text, in "quotes"',
        ) from None
    except RecursionError:
        raise InputError(f"{place}: JSON nested too deeply to be read") from None
    if not isinstance(row, dict):
        raise InputError(f"{place}: expected {expected}, found {kind_of(row)}")
    return row
