"""Files of rows: jsonl, csv, tsv and parquet. One row is one document; rows without text hold none."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from pathlib import Path

from tformer.data.files import open_input
from tformer.data.text import MAX_ROW_CHARACTERS, Errors, split_lines
from tformer.errors import InputError, did_you_mean

DEFAULT_COLUMN = "text"
PARQUET_ROWS = 256  # decoded at once
PARQUET_MAGIC = b"PAR1"
COLUMN_HINT = "name the column with --text-column (data.columns.text)"

Column = str | int | None


def parse_column(text: str | None) -> Column:
    """A column as a flag names it: its number from 0, or its name."""
    return int(text) if text is not None and text.isdecimal() else text


def jsonl_rows(texts: Iterator[str], *, name: str, column: Column, errors: Errors) -> Iterator[str]:
    """The text key of each line's object; every other key, nested or not, is ignored."""
    if isinstance(column, int):
        raise InputError(
            f"{name}: jsonl has keys, not numbered columns, found data.columns.text = {column}", hint=COLUMN_HINT
        )
    key = column or DEFAULT_COLUMN
    for number, line in enumerate(split_lines(texts, name=name), 1):
        if line.isspace():
            continue
        place = f"{name}:{number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(f"{place}: not JSON: {error.msg} at character {error.colno}") from None
        except RecursionError:
            raise InputError(f"{place}: JSON nested too deeply to be read") from None
        if not isinstance(row, dict):
            raise InputError(f"{place}: expected an object with the key '{key}', found {type(row).__name__}")
        if key not in row:
            raise InputError(f"{place}: no key '{key}'; {did_you_mean(key, row)}", hint=COLUMN_HINT)
        value = row[key]
        if value is not None and not isinstance(value, str):
            raise InputError(f"{place}: '{key}' should be text, found {type(value).__name__}")
        if value:
            yield _without_surrogates(value, place=place, errors=errors) if "\\u" in line else value


def _without_surrogates(text: str, *, place: str, errors: Errors) -> str:
    """JSON can spell half of a UTF-16 pair, which is no character and has no UTF-8."""
    if errors == "replace":
        return "".join("\ufffd" if "\ud800" <= character <= "\udfff" else character for character in text)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        found = f"\\u{ord(text[error.start]):04x}"
        raise InputError(f"{place}: {found} is half a character", hint="accept it with --errors replace") from None
    return text


def csv_rows(texts: Iterator[str], *, name: str, column: Column) -> Iterator[str]:
    """csv as spreadsheets write it, with quotes."""
    yield from _delimited_rows(texts, name=name, column=column, delimiter=",", quoting=csv.QUOTE_MINIMAL)


def tsv_rows(texts: Iterator[str], *, name: str, column: Column) -> Iterator[str]:
    """Tabs part columns and newlines part rows; a quote is a quote."""
    yield from _delimited_rows(texts, name=name, column=column, delimiter="\t", quoting=csv.QUOTE_NONE)


def _delimited_rows(texts: Iterator[str], *, name: str, column: Column, delimiter: str, quoting: int) -> Iterator[str]:
    """A column named by text needs a first row of names; one named by number means that there is no such row."""
    csv.field_size_limit(MAX_ROW_CHARACTERS)
    rows = csv.reader(split_lines(texts, name=name), delimiter=delimiter, quoting=quoting)  # type: ignore[arg-type]
    index = column if isinstance(column, int) else None
    try:
        for row in rows:
            if not row:
                continue
            if index is None:
                index = _find_column(row, column, name=name)
                continue
            if index >= len(row):
                raise InputError(
                    f"{name}:{rows.line_num}: expected at least {index + 1} columns, found {len(row)}",
                    hint=COLUMN_HINT,
                )
            if row[index]:
                yield row[index]
    except csv.Error as error:
        raise InputError(f"{name}:{rows.line_num}: {error}", hint="is a quote left open?") from None


def _find_column(header: list[str], column: Column, *, name: str) -> int:
    wanted = str(column) if column is not None else DEFAULT_COLUMN
    if wanted in header:
        return header.index(wanted)
    raise InputError(
        f"{name}:1: no column '{wanted}' in the first row; {did_you_mean(wanted, header)}",
        hint=f"{COLUMN_HINT}, or give its number from 0 when there is no row of names",
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
    require_pyarrow(path)
    import pyarrow as pa
    from pyarrow.parquet import ParquetFile

    _check_parquet_edges(path)
    done = 0
    try:
        with ParquetFile(path, memory_map=True) as file:
            names = file.schema_arrow.names
            wanted = names[column] if isinstance(column, int) and column < len(names) else column or DEFAULT_COLUMN
            if wanted not in names:
                raise InputError(f"{path}: no column '{wanted}'; {did_you_mean(str(wanted), names)}", hint=COLUMN_HINT)
            kind = file.schema_arrow.field(wanted).type
            if pa.types.is_dictionary(kind):
                kind = kind.value_type
            if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
                raise InputError(f"{path}: column '{wanted}' should hold text, found {kind}", hint=COLUMN_HINT)
            for batch in file.iter_batches(batch_size=PARQUET_ROWS, columns=[wanted]):
                yield from filter(None, batch.column(0).to_pylist())
                done += len(batch)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: damaged Parquet data after row {done}: {str(error).splitlines()[0]}") from error


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
    ".csv": lambda texts, name, column, errors: csv_rows(texts, name=name, column=column),
    ".tsv": lambda texts, name, column, errors: tsv_rows(texts, name=name, column=column),
}
ROW_FORMATS[".ndjson"] = ROW_FORMATS[".jsonl"]
