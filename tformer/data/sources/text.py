"""Text sources: files, folders, patterns, standard input and built-in text, read as documents.

A text file is one document, as is a built-in's module or file; every row of jsonl, csv, tsv and Parquet is one.
Documents come as pieces of at most about a megabyte, so none is held whole, and can be read any number of times.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from tformer.data.sources.builtin import PREFIX, BuiltinText, find_builtin
from tformer.data.sources.columns import Column
from tformer.data.sources.files import (
    Content,
    Errors,
    FilePath,
    Part,
    Piece,
    Source,
    SourceSpec,
    cut_pieces,
    end_last,
    format_ending,
    locate,
)
from tformer.data.sources.tables import table_format, text_column
from tformer.errors import InputError

TEXT_ENDINGS = frozenset(
    f".{name}"
    for names in (
        ("txt", "text", "md", "markdown", "rst", "org", "adoc", "tex", "log", "html", "htm", "xml"),
        ("py", "pyi", "c", "h", "cc", "cpp", "hpp", "java", "js", "ts", "go", "rs", "rb", "sh", "pl", "lua", "sql"),
        ("css", "yaml", "yml", "toml", "ini", "cfg"),
    )
    for name in names
)


class TextPart(Part, Protocol):
    """One file, a spooled stream, or a built-in text."""

    def documents(self) -> Iterator[Piece]: ...


@dataclass(frozen=True)
class TextFile:
    """One file, or a spooled stream; `column` is read if it is a table."""

    content: Content
    column: Column

    def documents(self) -> Iterator[Piece]:
        if self.content.path is not None and table_format(self.content.path) is not None:
            for text in text_column(self.content, self.column):
                yield from cut_pieces(text)
        else:
            yield from end_last(self.content.texts())

    def fingerprint(self) -> str:
        content = self.content
        how = "" if content.path is None else f"{format_ending(content.path)}:{self.column!r}:"
        return f"{how}{content.errors}:{content.fingerprint()}"

    def size_bytes(self) -> int | None:
        return self.content.size_bytes()


@dataclass(frozen=True, kw_only=True)
class TextSource(Source):
    """An opened source of documents."""

    parts: tuple[TextPart, ...]

    def documents(self) -> Iterator[Piece]:
        """Every document's pieces, in a fixed order. Raises InputError at the end if all was white space."""
        has_text = False
        for part in self.parts:
            for piece in part.documents():
                has_text = has_text or not piece.text.isspace()
                yield piece
        if not has_text:
            raise InputError(f"{self.name}: nothing but white space", hint="give a file with text in it")


def open_sources(specs: Sequence[SourceSpec], *, columns: object = None, errors: Errors = "strict") -> list[TextSource]:
    """One source per entry; without entries, the built-in text. `columns` has an attribute `text`, for tables.

    Raises InputError for what cannot be read: a missing or empty file, a folder or pattern without text, a device.
    """
    column = getattr(columns, "text", None)
    if not specs:
        return [_open(BuiltinText.default, None, column, errors)]
    return [_open(spec.path, spec.weight, column, errors) for spec in specs]


def _open(path: str, weight: float | None, column: Column, errors: Errors) -> TextSource:
    if path.startswith(PREFIX):
        return TextSource(name=path, parts=(find_builtin(path),), weight=weight)
    found = locate(path, is_known=_is_known, known=".txt, .md, .py, .jsonl, .csv, .tsv, .parquet and others")
    parts = tuple(TextFile(content, column) for content in found.contents(errors))
    return TextSource(name=found.name, parts=parts, weight=weight, notes=found.notes)


def _is_known(path: FilePath) -> bool:
    return format_ending(path) in TEXT_ENDINGS or table_format(path) is not None
