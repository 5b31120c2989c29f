"""Bytes to text in bounded memory: UTF-8, one newline, no byte order mark, and errors that say where.

Text travels as pieces of at most `PIECE_BYTES`, so that a file that is one endless line streams like any other.
CRLF and CR become LF (Python's universal newlines); a byte order mark at the start is dropped; NUL is kept.
"""

from __future__ import annotations

import codecs
import io
from collections.abc import Iterator
from typing import Literal, NamedTuple

from tformer.errors import InputError

PIECE_BYTES = 1 << 20
MAX_ROW_CHARACTERS = 1 << 26  # a row of jsonl, csv or tsv is parsed whole, so it needs a limit

Errors = Literal["strict", "replace"]

FOREIGN = (  # what a file that is not UTF-8 most likely is
    (b"\xff\xfe", "it looks like UTF-16: convert it, for example with `iconv -f UTF-16 -t UTF-8`"),
    (b"\xfe\xff", "it looks like UTF-16: convert it, for example with `iconv -f UTF-16 -t UTF-8`"),
    (b"\x1f\x8b", "it looks like gzip: name it with the ending .gz"),
    (b"\x28\xb5\x2f\xfd", "it looks like Zstandard: name it with the ending .zst"),
    (b"PK\x03\x04", "it looks like a zip archive: unpack it and give the folder"),
    (b"PAR1", "it looks like Parquet: name it with the ending .parquet"),
)


class Piece(NamedTuple):
    """A part of a document, and whether the document ends with it."""

    text: str
    ends_document: bool


def decode_text(chunks: Iterator[bytes], *, name: str, errors: Errors) -> Iterator[str]:
    """The text of a byte stream, piece by piece; InputError with line and byte for invalid UTF-8 when strict."""
    newlines = io.IncrementalNewlineDecoder(None, translate=True)
    lines_before, bytes_before, pending, head = 0, 0, b"", b""
    final = False
    while not final:
        chunk = next(chunks, b"")
        final = not chunk
        data = pending + chunk
        if bytes_before == 0:
            if not final and len(data) < len(codecs.BOM_UTF8):
                pending = data  # too short to see a byte order mark
                continue
            head = data[:4]
            if data.startswith(codecs.BOM_UTF8):
                data, bytes_before = data[len(codecs.BOM_UTF8) :], len(codecs.BOM_UTF8)
        try:
            text, used = codecs.utf_8_decode(data, errors, final)
        except UnicodeDecodeError as error:
            before = newlines.decode(data[: error.start].decode("utf-8"), True)
            raise InputError(
                f"{name}:{lines_before + before.count(chr(10)) + 1}: invalid UTF-8 at byte "
                f"{bytes_before + error.start} (0x{data[error.start]:02x}: {error.reason})",
                hint=_foreign_hint(head),
            ) from None
        pending, bytes_before = data[used:], bytes_before + used
        text = newlines.decode(text, final)
        if text:
            lines_before += text.count("\n")
            yield text


def _foreign_hint(head: bytes) -> str:
    for magic, hint in FOREIGN:
        if head.startswith(magic):
            return hint
    return "convert it to UTF-8, or accept replacement characters with --errors replace (data.errors)"


def split_lines(pieces: Iterator[str], *, name: str) -> Iterator[str]:
    """Lines with their newline (the last may have none); InputError for a line too long to be parsed as a row."""
    parts: list[str] = []
    length, number = 0, 1
    for piece in pieces:
        lines = piece.split("\n")
        for line in lines[:-1]:
            yield "".join((*parts, line, "\n"))
            parts, length, number = [], 0, number + 1
        parts.append(lines[-1])
        length += len(lines[-1])
        if length > MAX_ROW_CHARACTERS:
            raise InputError(
                f"{name}:{number}: a row has more than {MAX_ROW_CHARACTERS:,} characters",
                hint="text without rows belongs in a .txt file, which may have lines of any length",
            )
    if length:
        yield "".join(parts)


def cut_pieces(text: str) -> Iterator[Piece]:
    """One whole document as pieces."""
    for start in range(0, len(text), PIECE_BYTES):
        yield Piece(text[start : start + PIECE_BYTES], start + PIECE_BYTES >= len(text))


def end_last(texts: Iterator[str]) -> Iterator[Piece]:
    """A stream of text as the pieces of one document."""
    previous: str | None = None
    for text in texts:
        if previous is not None:
            yield Piece(previous, False)
        previous = text
    if previous is not None:
        yield Piece(previous, True)
