"""Files of rows: jsonl, csv, tsv and Parquet."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tformer.data.sources.files import (
    MAX_ROW_CHARACTERS,
    Errors,
    open_input,
    split_lines,
)
from tformer.errors import InputError, did_you_mean

DEFAULT_COLUMN = "text"
PARQUET_ROWS = 256  # decoded at once
PARQUET_MAGIC = b"PAR1"
COLUMN_HINT = "name the column with --text-column (data.columns.text)"
DIALECTS = {".csv": (",", csv.QUOTE_MINIMAL), ".tsv": ("\t", csv.QUOTE_NONE)}

Column = str | int | None


def parse_column(text: str | None) -> Column:
    """A column as a flag names it: its number from 0, or its name."""
    return int(text) if text is not None and text.isdecimal() else text


def json_objects(
    texts: Iterator[str], *, name: str, expected: str = "an object"
) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line, object) for every line that is not blank; `expected` is what a message says there should be."""
    for number, line in enumerate(split_lines(texts, name=name), 1):
        if line.isspace():
            continue
        place = f"{name}:{number}"
        try:
            row = json.loads(line.removesuffix("\n"))  # else what is missing at its end is missed after it
        except json.JSONDecodeError as error:
            what = error.msg.removesuffix(" at")
            raise InputError(f"{place}: not JSON: {what} at character {error.colno}") from None
        except ValueError:  # the only other one that is raised
            raise InputError(
                f"{place}: a whole number of more than {sys.get_int_max_str_digits():,} digits",
                hint='write it as text, in "quotes"',
            ) from None
        except RecursionError:
            raise InputError(f"{place}: JSON nested too deeply to be read") from None
        if not isinstance(row, dict):
            raise InputError(f"{place}: expected {expected}, found {type(row).__name__}")
        yield number, row


def jsonl_rows(texts: Iterator[str], *, name: str, column: Column, errors: Errors) -> Iterator[str]:
    """The text key of each line's object; every other key, nested or not, is ignored."""
    if isinstance(column, int):
        raise InputError(
            f"{name}: jsonl has keys, not numbered columns, found data.columns.text = {column}", hint=COLUMN_HINT
        )
    key = column or DEFAULT_COLUMN
    for number, row in json_objects(texts, name=name, expected=f"an object with the key '{key}'"):
        value = json_text(row, key, place=f"{name}:{number}", errors=errors)
        if value:
            yield value


def json_text(row: Mapping[str, Any], key: str, *, place: str, errors: Errors) -> str:
    """The text under a key, empty for null; InputError when the key is missing or holds something else."""
    if key not in row:
        raise InputError(f"{place}: no key '{key}'; {did_you_mean(key, row)}", hint=COLUMN_HINT)
    value = row[key]
    if value is None:
        return ""
    if not isinstance(value, str):
        raise InputError(f"{place}: '{key}' should be text, found {type(value).__name__}")
    return whole_characters(value, place=place, errors=errors)


def whole_characters(text: str, *, place: str, errors: Errors) -> str:
    """JSON can spell half of a UTF-16 pair, which is no character and has no UTF-8: refused, or replaced."""
    if text.isascii():
        return text
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        if errors == "replace":
            return "".join("\ufffd" if "\ud800" <= character <= "\udfff" else character for character in text)
        found = f"\\u{ord(text[error.start]):04x}"
        raise InputError(f"{place}: {found} is half a character", hint="accept it with --errors replace") from None
    return text


def table_cells(texts: Iterator[str], *, name: str, ending: str) -> Iterator[tuple[int, list[str]]]:
    """(line where it ends, cells) of every row of a csv or tsv; a blank line has no cells.

    csv is read as spreadsheets write it, with quotes. In tsv, tabs part columns and newlines part rows: a quote is a
    quote.
    """
    csv.field_size_limit(MAX_ROW_CHARACTERS)
    delimiter, quoting = DIALECTS[ending]
    rows = csv.reader(split_lines(texts, name=name), delimiter=delimiter, quoting=quoting)  # type: ignore[arg-type]
    try:
        for row in rows:
            yield rows.line_num, row
    except csv.Error as error:
        raise InputError(f"{name}:{rows.line_num}: {error}", hint="is a quote left open?") from None


def table_rows(texts: Iterator[str], *, name: str, column: Column, ending: str) -> Iterator[str]:
    """A column named by text needs a first row of names; one named by number means that there is no such row."""
    index = column if isinstance(column, int) else None
    for number, row in table_cells(texts, name=name, ending=ending):
        if not row:
            continue
        if index is None:
            index = find_column(row, column or DEFAULT_COLUMN, name=name)
            continue
        if index >= len(row):
            raise InputError(
                f"{name}:{number}: expected at least {index + 1} columns, found {len(row)}", hint=COLUMN_HINT
            )
        if row[index]:
            yield row[index]


def find_column(header: Sequence[str], wanted: str | int, *, name: str, hint: str = COLUMN_HINT) -> int:
    """Where a column stands in the first row; `hint` says how to name another."""
    if wanted in header:
        require_single(header, str(wanted), name=f"{name}:1")
        return header.index(str(wanted))
    raise InputError(
        f"{name}:1: no column '{wanted}' in the first row; {did_you_mean(str(wanted), header)}",
        hint=f"{hint}, or give its number from 0 when there is no row of names",
    )


def require_single(names: Sequence[str], column: str, *, name: str) -> None:
    """InputError when several columns have the name of one that is needed."""
    count = names.count(column)
    if count > 1:
        raise InputError(
            f"{name}: {count} columns are called '{column}'",
            hint="rename the others, or (in csv and tsv) give its number from 0",
        )


def require_pyarrow(path: Path) -> None:
    """InputError when pyarrow is not installed."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError:
        raise InputError(
            f"{path}: reading Parquet needs the package pyarrow",
            hint="install it with: pip install 'tformer[parquet]'",
        ) from None


def parquet_rows(path: Path, *, column: Column) -> Iterator[str]:
    """The text column, a few rows at a time."""

    def choose(schema: Any) -> list[str]:
        import pyarrow as pa

        names = schema.names
        wanted = names[column] if isinstance(column, int) and column < len(names) else column or DEFAULT_COLUMN
        if wanted not in names:
            raise InputError(f"{path}: no column '{wanted}'; {did_you_mean(str(wanted), names)}", hint=COLUMN_HINT)
        require_single(names, str(wanted), name=str(path))
        kind = schema.field(wanted).type
        if pa.types.is_dictionary(kind):
            kind = kind.value_type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise InputError(f"{path}: column '{wanted}' should hold text, found {kind}", hint=COLUMN_HINT)
        return [str(wanted)]

    for (value,) in parquet_records(path, choose):
        if value:
            yield value


def parquet_names(path: Path) -> list[str]:
    """The names of all columns."""
    names: list[str] = []

    def choose(schema: Any) -> list[str]:
        names.extend(schema.names)
        return names

    next(parquet_records(path, choose, skip_unreadable=True), None)
    return names


def parquet_records(
    path: Path, choose: Callable[[Any], list[str]], *, skip_unreadable: bool = False
) -> Iterator[tuple[Any, ...]]:
    """The values of the columns that `choose` picks from the schema, row by row; of several of one name, the first.

    Parquet can hold what Python cannot, as a time of the year 100,000: InputError, or None with `skip_unreadable`.
    """
    require_pyarrow(path)
    import pyarrow as pa
    from pyarrow.parquet import ParquetFile

    _check_parquet_edges(path)
    done = 0
    try:
        with ParquetFile(path, memory_map=True) as file:
            names = choose(file.schema_arrow)
            for batch in file.iter_batches(batch_size=PARQUET_ROWS, columns=list(dict.fromkeys(names))):
                by_name = {name: batch.column(batch.schema.names.index(name)) for name in names}
                columns = [_python_values(by_name[name], name, path, done, skip=skip_unreadable) for name in names]
                yield from zip(*columns, strict=True)
                done += len(batch)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: damaged Parquet data after row {done}: {str(error).splitlines()[0]}") from error


def _python_values(values: Any, name: str, path: Path, done: int, *, skip: bool) -> list[Any]:
    import pyarrow as pa

    try:
        return values.to_pylist()
    except (pa.ArrowException, UnicodeDecodeError):
        raise  # damaged
    except (OverflowError, ValueError) as error:
        if skip:
            return [None] * len(values)
        raise InputError(
            f"{path}: column '{name}' has a value after row {done} that cannot be read: {error}"
        ) from error


def _check_parquet_edges(path: Path) -> None:
    with open_input(path) as file:
        size = file.seek(0, 2)
        for offset in (0, max(0, size - len(PARQUET_MAGIC))):
            file.seek(offset)
            found = file.read(len(PARQUET_MAGIC))
            if found != PARQUET_MAGIC:
                raise InputError(
                    f"{path}: damaged or not Parquet: expected {PARQUET_MAGIC!r} at byte {offset} of {size}, "
                    f"found {found!r}"
                )


TextRows = Callable[[Iterator[str], str, Column, Errors], Iterator[str]]

ROW_FORMATS: dict[str, TextRows] = {  # parquet is no stream of text: it has its own door above
    ".jsonl": lambda texts, name, column, errors: jsonl_rows(texts, name=name, column=column, errors=errors),
    ".csv": lambda texts, name, column, errors: table_rows(texts, name=name, column=column, ending=".csv"),
    ".tsv": lambda texts, name, column, errors: table_rows(texts, name=name, column=column, ending=".tsv"),
}
ROW_FORMATS[".ndjson"] = ROW_FORMATS[".jsonl"]
