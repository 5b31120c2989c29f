"""Text sources: files, folders, globs, standard input and built-in text, read as documents.

A text file is one document; every row of jsonl, csv, tsv and Parquet is one. Documents come as pieces of at most about
a megabyte, and can be read any number of times.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tformer.data.sources.builtin import (
    DEFAULTS,
    PREFIX,
    BuiltinText,
    find_builtin,
)
from tformer.data.sources.files import (
    Errors,
    Piece,
    Spool,
    compression_of,
    cut_pieces,
    decode_text,
    end_last,
    file_fingerprint,
    read_bytes,
)
from tformer.data.sources.locate import (
    STANDARD_INPUT,
    format_ending,
    locate,
)
from tformer.data.sources.tables import (
    ROW_FORMATS,
    Column,
    parquet_rows,
)
from tformer.errors import InputError


class Part(Protocol):
    """One file of a source, or its like."""

    def documents(self) -> Iterator[Piece]: ...
    def fingerprint(self) -> str: ...
    def size_bytes(self) -> int | None: ...


@dataclass(frozen=True)
class FilePart:
    path: Path
    column: Column
    errors: Errors

    def documents(self) -> Iterator[Piece]:
        ending = format_ending(self.path)
        if ending == ".parquet":
            rows = parquet_rows(self.path, column=self.column)
        else:
            texts = decode_text(read_bytes(self.path), name=str(self.path), errors=self.errors)
            if ending not in ROW_FORMATS:
                yield from end_last(texts)
                return
            rows = ROW_FORMATS[ending](texts, str(self.path), self.column, self.errors)
        for row in rows:
            yield from cut_pieces(row)

    def fingerprint(self) -> str:
        return f"{format_ending(self.path)}:{self.column!r}:{self.errors}:{file_fingerprint(self.path)}"

    def size_bytes(self) -> int | None:
        plain = compression_of(self.path) is None and format_ending(self.path) != ".parquet"
        return self.path.stat().st_size if plain else None


@dataclass(frozen=True)
class SpoolPart:
    name: str
    spool: Spool
    errors: Errors

    def documents(self) -> Iterator[Piece]:
        return end_last(decode_text(self.spool.read(), name=self.name, errors=self.errors))

    def fingerprint(self) -> str:
        return f"{self.errors}:{self.spool.fingerprint}"

    def size_bytes(self) -> int | None:
        return self.spool.size


@dataclass(frozen=True)
class BuiltinPart:
    builtin: BuiltinText

    def documents(self) -> Iterator[Piece]:
        for text in self.builtin.documents():
            yield from cut_pieces(text)

    def fingerprint(self) -> str:
        return self.builtin.fingerprint()

    def size_bytes(self) -> int | None:
        return None


__all__ = ["STANDARD_INPUT", "Columns", "SourceSpec", "TextSource", "open_sources"]

TEXT_ENDINGS = frozenset(
    f".{name}"
    for names in (
        ("txt", "text", "md", "markdown", "rst", "org", "adoc", "tex", "log", "html", "htm", "xml"),
        ("py", "pyi", "c", "h", "cc", "cpp", "hpp", "java", "js", "ts", "go", "rs", "rb", "sh", "pl", "lua", "sql"),
        ("css", "yaml", "yml", "toml", "ini", "cfg"),
    )
    for name in names
)


class SourceSpec(Protocol):
    """What is needed of one entry of the recipe's `data.train` or `data.valid`."""

    @property
    def path(self) -> str: ...
    @property
    def weight(self) -> float | None: ...


class Columns(Protocol):
    """What is needed of the recipe's `data.columns`."""

    @property
    def text(self) -> Column: ...


@dataclass(frozen=True)
class TextSource:
    """One entry of the data section, opened. `notes` tell what a person should know: files that were skipped."""

    name: str
    parts: tuple[Part, ...]
    weight: float | None = None  # share of a mixture, as given
    notes: tuple[str, ...] = ()

    def documents(self) -> Iterator[Piece]:
        """Every document's pieces, in a fixed order; InputError at the end when there was nothing but white space."""
        has_text = False
        for part in self.parts:
            for piece in part.documents():
                has_text = has_text or not piece.text.isspace()
                yield piece
        if not has_text:
            raise InputError(f"{self.name}: nothing but white space", hint="give a file with text in it")

    def fingerprint(self) -> str:
        """Changes when the text may have changed: the key of cached tokens, and what a resumed run compares."""
        digest = hashlib.sha256()
        for part in self.parts:
            digest.update(f"{part.fingerprint()}\n".encode())
        return digest.hexdigest()

    def size_bytes(self) -> int | None:
        """Bytes of text to come, for progress; None when compression hides it."""
        sizes = [part.size_bytes() for part in self.parts]
        return None if None in sizes else sum(size for size in sizes if size is not None)


def open_sources(
    specs: Sequence[SourceSpec], *, columns: Columns | None = None, errors: Errors = "strict", builtin_for: str = "lm"
) -> list[TextSource]:
    """One source per entry; without entries, the built-in text of the task `builtin_for`.

    InputError for what cannot be read: a missing or empty file, a folder or glob with no text in it, a device.
    """
    column = columns.text if columns is not None else None
    if not specs:
        return [_open(f"{PREFIX}{DEFAULTS[builtin_for]}", None, column, errors)]
    return [_open(spec.path, spec.weight, column, errors) for spec in specs]


def _open(path: str, weight: float | None, column: Column, errors: Errors) -> TextSource:
    if path.startswith(PREFIX):
        return TextSource(path, (BuiltinPart(find_builtin(path)),), weight)
    found = locate(path, is_known=_is_known, known=".txt, .md, .py, .jsonl, .csv, .tsv, .parquet and others")
    if found.spool is not None:
        return TextSource(found.name, (SpoolPart(found.name, found.spool, errors),), weight)
    return TextSource(found.name, tuple(FilePart(place, column, errors) for place in found.paths), weight, found.notes)


def _is_known(path: Path) -> bool:
    ending = format_ending(path)
    return ending in TEXT_ENDINGS or ending in ROW_FORMATS or ending == ".parquet"
