"""The parts of a text source: a file, a spooled stream, a built-in text. Each reads documents any number of times."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tformer.data.builtin import BuiltinText
from tformer.data.files import Spool, compression_of, file_fingerprint, read_bytes
from tformer.data.locate import format_ending
from tformer.data.tables import ROW_FORMATS, Column, parquet_rows
from tformer.data.text import Errors, Piece, cut_pieces, decode_text, end_last

__all__ = ["BuiltinPart", "FilePart", "Part", "SpoolPart"]


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
