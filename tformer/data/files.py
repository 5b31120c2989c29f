"""Reading files as streams of bytes: plain, .gz and .zst, in bounded memory, with errors that name file and offset."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Protocol

from tformer.data.text import PIECE_BYTES
from tformer.errors import InputError, StorageError

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
