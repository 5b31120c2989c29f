"""Text sources: files, folders, patterns, standard input and built-in text, read as documents.

A text file is one document, as is a built-in's module or file; every row of jsonl, csv, tsv and Parquet is one.
Documents come as pieces of at most about a megabyte, so none is held whole, and can be read any number of times.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tformer.data.sources.builtin import DEFAULTS, PREFIX, find_builtin
from tformer.data.sources.columns import Column, column_hint, require_single
from tformer.data.sources.files import (
    Content,
    DocumentChunk,
    FoundFile,
    Source,
    SourceFields,
    cut_pieces,
    end_last,
    facts_of,
    format_ending,
    locate,
    split_lines,
)
from tformer.data.sources.parquet import parquet_rows, parquet_schema
from tformer.data.sources.reading import Reading
from tformer.data.sources.tables import (
    IN_FOLDERS,
    delimited_cells,
    form_key,
    format_by_name,
    json_object,
    json_objects,
    missing_key,
    table_format,
    text_value,
)
from tformer.support import files
from tformer.support.errors import InputError, TformerError, did_you_mean
from tformer.support.file_kinds import RUNNING_TEXT

TEXT_ENDINGS = frozenset(
    f".{name}"
    for names in (
        ("txt", "text", "md", "markdown", "rst", "org", "adoc", "tex", "log", "html", "htm", "xml"),
        ("py", "pyi", "c", "h", "cc", "cpp", "hpp", "java", "js", "ts", "go", "rs", "rb", "sh", "pl", "lua", "sql"),
        ("css", "yaml", "yml", "toml", "ini", "cfg"),
    )
    for name in names
)

DEFAULT_COLUMN = "text"
MANY_FILES = 64  # of a source, whose fingerprint is remembered
SETTLED_NS = 2 * 10**9  # a file that changed less than this ago may change again at the same time by its file system
FINGERPRINTS = "fingerprints"  # folder of the cache
FINGERPRINT = re.compile(rb"[0-9a-f]{64}")


@dataclass(frozen=True)
class TextFile:
    """One file, or a spooled stream; `column` is read if it is a table."""

    content: Content
    column: Column

    def documents(self) -> Iterator[DocumentChunk]:
        """The text, or that of each row that has one. With `Reading.bad_rows` "drop" wrong rows are left out."""
        if not self.is_table:
            yield from end_last(self.content.texts())
            return
        for _, _, text in text_attempts(self.content, self.column):
            if not isinstance(text, InputError):
                yield from cut_pieces(text or "")
            elif not self.content.reading.drops:
                raise text

    @property
    def is_table(self) -> bool:
        return self.content.path is not None and table_format(self.content.path) is not None

    def records(self) -> Iterator[tuple[Mapping[str, Any], Collection[str]]]:
        """As `Table.records`."""
        column = self.column or DEFAULT_COLUMN
        if self.is_table and isinstance(column, str):
            yield from ((record, (column,)) for record in text_records(self.content))

    def bad_rows(self) -> Iterator[tuple[str, Any, InputError]]:
        """As `Table.bad_rows`."""
        attempts = text_attempts(self.content, self.column) if self.is_table else ()
        yield from ((place, raw, text) for place, raw, text in attempts if isinstance(text, InputError))

    def fingerprint(self) -> str:
        content = self.content
        how = ""
        if content.path is not None:
            drop = ":drop" if content.reading.drops else ""
            how = f"{form_key(content, format_ending(content.path))}{drop}:{self.column!r}:"
        return f"{how}{content.decoding}:{content.fingerprint()}:{content.samples()}"

    @property
    def contents(self) -> tuple[Content, ...]:
        return (self.content,)


@dataclass(frozen=True, kw_only=True)
class TextSource(Source):
    """An opened source of documents."""

    def fingerprint(self) -> str:
        """As `Source.fingerprint`; the fingerprint of many files is cached, so that not all are opened again."""
        state = self._state()
        if state is None:
            return super().fingerprint()
        from tformer.support.device import default_cache_dir  # which imports torch

        memo = default_cache_dir() / FINGERPRINTS / f"{state}.txt"
        with suppress(OSError, InputError):
            if FINGERPRINT.fullmatch(known := files.read_bounded(memo, max_bytes=64)):
                return known.decode()
        found = super().fingerprint()
        if self._state() == state:
            with suppress(OSError, TformerError):  # a cache that cannot be written costs only time
                files.make_folders(memo.parent)
                files.write_text(memo, found)
        return found

    def samples(self) -> str:
        """Empty: the fingerprint has them."""
        return ""

    def _state(self) -> str | None:
        """A key of names, sizes and times of change of many files; None for few, and while one has just changed."""
        if len(self.parts) < MANY_FILES:
            return None
        digest, newest = hashlib.sha256(), time.time_ns() - SETTLED_NS
        for part in self.parts:
            if not isinstance(part, TextFile) or not isinstance(part.content.origin, FoundFile):
                return None
            origin = part.content.origin
            facts = facts_of(origin.path)
            if facts is None or facts != origin.facts or max(facts.modified_ns, facts.changed_ns) > newest:
                return None
            read = (part.content.name, part.column, part.content.reading)
            digest.update(f"{read} {facts}\n".encode("utf-8", "replace"))
        return digest.hexdigest()[:32]

    def documents(self) -> Iterator[DocumentChunk]:
        """Every document's pieces, in a fixed order. Raises InputError at the end if all was white space."""
        has_text = False
        for piece in self._items("documents"):
            has_text = has_text or not piece.text.isspace()
            yield piece
        if not has_text:
            raise InputError(f"{self.name}: nothing but white space", hint="give a file with text in it")


def open_sources(
    specs: Sequence[SourceFields], *, columns: object = None, reading: Reading = Reading()
) -> list[TextSource]:
    """One source per entry; without entries, the built-in text. `columns` has an attribute `text`, for tables.

    Raises InputError for what cannot be read: a missing or empty file, a folder or pattern without text, a device.
    """
    column = getattr(columns, "text", None)
    if not specs:
        return [_open(DEFAULTS["text"], None, column, reading)]
    return [_open(spec.path, spec.weight, column, reading) for spec in specs]


def _open(path: str, weight: float | None, column: Column, reading: Reading) -> TextSource:
    if path.startswith(PREFIX):
        return TextSource(name=path, parts=(find_builtin(path),), weight=weight)
    found = locate(
        path,
        is_known=lambda place: format_ending(place) in TEXT_ENDINGS or format_ending(place) in IN_FOLDERS,
        known=".txt, .md, .py, .jsonl, .csv, .tsv, .parquet and others",
    )
    parts = tuple(TextFile(content, column) for content in found.contents(reading, accepts=RUNNING_TEXT))
    return TextSource(name=found.name, parts=parts, weight=weight, notes=found.notes)


# -- one text column: rows as documents --------------------------------------------------------------------------------


def text_attempts(content: Content, column: Column) -> Iterator[tuple[str, Any, str | InputError | None]]:
    """(place, what was read, the text or its InputError) of every row; column: None: "text".

    A column named by its number means that csv and tsv have no row of names. Rows may have any number of further ones.
    """
    texts = {".jsonl": _jsonl_texts, ".parquet": _parquet_texts}.get(format_by_name(content) or "", _delimited_texts)
    return texts(content, column)


def text_records(content: Content) -> Iterator[Mapping[str, Any]]:
    """Every row by the names of columns or keys, if the table has names."""
    if (format := format_by_name(content) or ".csv") == ".jsonl":
        return (row for _, row in json_objects(content, skip_wrong=content.reading.drops))
    if format == ".parquet":
        names = parquet_schema(content.file).names
        rows: Iterator[Sequence[Any]] = parquet_rows(content.file, names, skip_unreadable=True)
    else:
        rows = (cells for _, cells in delimited_cells(content, format) if cells)
        names = list(next(rows))
    return (dict(zip(names, row, strict=False)) for row in rows)


def _jsonl_texts(content: Content, column: Column) -> Iterator[tuple[str, str, str | InputError]]:
    name = content.name
    if isinstance(column, int):
        raise InputError(
            f"{name}: jsonl has keys, not numbered columns, found data.columns.text = {column}",
            hint=column_hint("text"),
        )
    key = column or DEFAULT_COLUMN
    for number, line in enumerate(split_lines(content.texts(), name=name), 1):
        if line.isspace():
            continue
        place = f"{name}:{number}"
        try:
            row = json_object(line, place=place, expected=f"an object with the key '{key}'")
            if key not in row:
                raise missing_key(row, key, role="text", place=place)
            yield place, line, text_value(row[key], key, place=place, errors=content.errors)
        except InputError as error:
            yield place, line, error


def _delimited_texts(content: Content, column: Column) -> Iterator[tuple[str, list[str], str | InputError]]:
    index = column if isinstance(column, int) else None
    for number, row in delimited_cells(content, format_by_name(content) or ".csv"):
        if not row:
            continue
        if index is None:
            wanted = str(column or DEFAULT_COLUMN)
            if wanted not in row:
                raise InputError(
                    f"{content.name}:1: no column '{wanted}' in the first row; {did_you_mean(wanted, row)}",
                    hint=f"{column_hint('text')}, or give its number from 0 when there is no row of names",
                )
            require_single(row, wanted, name=f"{content.name}:1")
            index = row.index(wanted)
            continue
        place = f"{content.name}:{number}"
        if index < len(row):
            yield place, row, row[index]
        else:
            short = f"{place}: expected at least {index + 1} columns, found {len(row)}"
            yield place, row, InputError(short, hint=column_hint("text"))


def _parquet_texts(content: Content, column: Column) -> Iterator[tuple[str, Any, str | None]]:
    import pyarrow as pa

    path, hint = content.file, column_hint("text")
    schema = parquet_schema(path)
    names = schema.names
    wanted = names[column] if isinstance(column, int) and column < len(names) else str(column or DEFAULT_COLUMN)
    if wanted not in names:
        raise InputError(f"{path}: no column '{wanted}'; {did_you_mean(wanted, names)}", hint=hint)
    require_single(names, wanted, name=str(path))
    kind = schema.field(wanted).type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise InputError(f"{path}: column '{wanted}' should hold text, found {kind}", hint=hint)
    return ((content.name, value, value) for (value,) in parquet_rows(path, [wanted]))
