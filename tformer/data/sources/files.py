"""Files and standard input as streams of bytes and of text, in bounded memory.

Bytes are plain, gzip (.gz) or Zstandard (.zst). Text is UTF-8; it travels as pieces of at most `PIECE_BYTES`, so a file
that is one endless line streams like any other. CRLF and CR become LF (Python's universal newlines), a byte order mark
at the start is dropped, NUL is kept. Errors name the file and the line or byte.
"""

from __future__ import annotations

import codecs
import contextlib
import hashlib
import io
import os
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Literal, NamedTuple, Protocol

from tformer.errors import InputError, StorageError

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


EDGE_BYTES = 1 << 20  # what a fingerprint reads of each end of a file


class Decompressor(Protocol):
    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, /) -> bytes: ...


def _gzip_decompressor(name: str) -> Callable[[], Decompressor]:
    return lambda: zlib.decompressobj(wbits=31)


def _zstd_decompressor(name: str) -> Callable[[], Decompressor]:
    try:
        import zstandard
    except ImportError:
        raise InputError(
            f"{name}: reading .zst needs the package zstandard", hint="install it with: pip install 'tformer[zstd]'"
        ) from None
    return lambda: zstandard.ZstdDecompressor().decompressobj()


# Each ending's decompressor, and how many bytes it is fed at once: 1 KB of zstd can unfold to 32 MB, of gzip to 1 MB.
COMPRESSIONS: dict[str, tuple[Callable[[str], Callable[[], Decompressor]], int]] = {
    ".gz": (_gzip_decompressor, 1 << 14),
    ".zst": (_zstd_decompressor, 1 << 10),
}


def compression_of(path: Path) -> str | None:
    ending = path.suffix.lower()
    return ending if ending in COMPRESSIONS else None


def require_decompressor(path: Path) -> None:
    """InputError when the package that this file's compression needs is not installed."""
    ending = compression_of(path)
    if ending is not None:
        COMPRESSIONS[ending][0](str(path))


def read_bytes(path: Path) -> Iterator[bytes]:
    """The file's content, decompressed by its ending, in chunks of about `PIECE_BYTES`."""
    with open_input(path) as file:
        ending = compression_of(path)
        if ending is None:
            yield from iter(lambda: file.read(PIECE_BYTES), b"")
        else:
            yield from _decompress(file, str(path), ending)


def open_input(path: Path) -> IO[bytes]:
    """Opens a file for reading; InputError says why it cannot be."""
    try:
        return open(path, "rb")
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {(error.strerror or str(error)).lower()}") from error


def _decompress(file: IO[bytes], name: str, ending: str) -> Iterator[bytes]:
    make, step = COMPRESSIONS[ending]
    new_decoder = make(name)
    decoder, waiting = new_decoder(), b""
    at_start = True  # of a member: several in one file are one text
    ready: list[bytes] = []
    ready_bytes = 0
    while data := waiting or file.read(step):
        try:
            output = decoder.decompress(data)
        except Exception as error:  # zlib.error and zstandard.ZstdError have no common base
            offset = file.tell() - len(data)
            raise InputError(f"{name}: damaged {ending} data near byte {offset}: {error}") from error
        waiting, at_start = b"", False
        if decoder.eof:
            waiting = _skip_zero_padding(decoder.unused_data, file, step)
            decoder, at_start = new_decoder(), True
        ready.append(output)
        ready_bytes += len(output)
        if ready_bytes >= PIECE_BYTES:
            yield from _in_pieces(b"".join(ready))
            ready, ready_bytes = [], 0
    if not at_start:
        raise InputError(f"{name}: damaged {ending} data: it ends at byte {file.tell()}, before its content does")
    if ready_bytes:
        yield b"".join(ready)


def _skip_zero_padding(waiting: bytes, file: IO[bytes], step: int) -> bytes:
    """Tapes and block devices pad with zeros, which no compressed member starts with."""
    waiting = waiting.lstrip(b"\0")
    while not waiting:
        data = file.read(step)
        if not data:
            return b""
        waiting = data.lstrip(b"\0")
    return waiting


def _in_pieces(data: bytes) -> Iterator[bytes]:
    for start in range(0, len(data), PIECE_BYTES):
        yield data[start : start + PIECE_BYTES]


def file_fingerprint(path: Path) -> str:
    """sha256 over size and content; of a large file: size, time of change and both ends."""
    with open_input(path) as file:
        status = os.fstat(file.fileno())
        digest = hashlib.sha256(f"{status.st_size}:".encode())
        digest.update(file.read(EDGE_BYTES))
        if status.st_size > 2 * EDGE_BYTES:
            digest.update(f":{status.st_mtime_ns}:".encode())
            file.seek(-EDGE_BYTES, os.SEEK_END)
        digest.update(file.read(EDGE_BYTES))
    return digest.hexdigest()


class Spool:
    """Standard input or a pipe, kept in an unnamed temporary file: it can be read again, and vanishes with us."""

    def __init__(self, stream: IO[bytes]) -> None:
        digest = hashlib.sha256()
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the spool)
        self.size = 0
        try:
            for chunk in iter(lambda: stream.read(PIECE_BYTES), b""):
                digest.update(chunk)
                self._file.write(chunk)
                self.size += len(chunk)
            self._file.flush()
        except OSError as error:
            # The buffer still holds what could not be written, and closing would fail on it again.
            with contextlib.suppress(OSError):
                self._file.close()
            raise StorageError(
                f"{tempfile.gettempdir()}: cannot keep standard input there: {error.strerror} "
                f"after {self.size:,} bytes",
                hint="set TMPDIR to a folder with more room, or give a file",
            ) from error
        self.fingerprint = digest.hexdigest()

    def read(self) -> Iterator[bytes]:
        """The content from its beginning; several readers do not disturb each other."""
        offset = 0
        while chunk := os.pread(self._file.fileno(), PIECE_BYTES, offset):
            yield chunk
            offset += len(chunk)
