"""Token files and the chunks of text that are encoded for them.

`entry_writer` writes the files of a corpus, `array_files` reads them.

A token cache is a folder of files with a checked header and one array each:

    header (128 bytes, little-endian)
        magic "TFTOKENS", version, item size in bytes, tokenizer's sha256, text's sha256, number of the file,
        items in this file, tokens of the corpus, utf-8 bytes of the corpus, tokens per shard, vocabulary size,
        crc32 of the array, crc32 of the header before this field
    array
        tokens-00000.bin ...  ids, uint16 if the vocabulary fits, else uint32; every file but the last is full
        documents.bin         int64: where each document begins, then the number of tokens
        marks.bin             int64 pairs: (tokens, bytes) before a point, every few kilobytes of text

The header of documents.bin, which is written last, holds the figures of the whole corpus; in the others they are 0.

Long documents are cut where a tokenizer would cut anyway (`tokenizer/pieces.py`): the chunks have the ids of the
whole document. A document without such a place within `CHUNK_LIMIT` characters is cut there, and a word may be split.
Cuts depend on the document alone, never on the sizes of its pieces.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from tformer.data.sources.files import DocumentChunk
from tformer.support import files
from tformer.support.errors import InputError, StorageError, cannot_write
from tformer.tokenizer.pieces import BATCH_CHARACTERS, batches_of, find_cut
from tformer.workers.work import Work

MARK_BYTES = 4096  # at least this much text between two marks
DOCUMENT_END = b"\xff"  # in the text's hash: a byte that UTF-8 never has
MAGIC = b"TFTOKENS"
VERSION = 2  # entries of version 1 may lack text of files that changed while they were read
SHARD_BYTES = 128 << 20
READ_BYTES = 1 << 20  # at once

_FIELDS = struct.Struct("<8sII32s32sIQQQQII")
HEADER_BYTES = 128
CHUNK_CHARACTERS = 1 << 16
CHUNK_LIMIT = 1 << 20

Item = TypeVar("Item")


# -- shard files -------------------------------------------------------------------------------------------------------


class DamagedShardError(InputError):
    """A cached file differs from what was written; when it is opened again, it is made again from the text."""


def damaged(path: Path | str, found: str) -> DamagedShardError:
    """The error of a cached file that differs from what was written."""
    hint = f"the next command tokenizes the text again; where it cannot, remove {Path(path).parent}"
    return DamagedShardError(f"the cached tokens {path} are damaged: {found}", hint=hint)


@dataclass(frozen=True)
class ShardHeader:
    item_bytes: int
    tokenizer: bytes  # sha256, 32 bytes
    text: bytes = bytes(32)
    number: int = 0
    count: int = 0
    tokens: int = 0
    num_bytes: int = 0
    shard_tokens: int = 0
    vocab_size: int = 0
    checksum: int = 0

    def pack(self) -> bytes:
        data = _FIELDS.pack(MAGIC, VERSION, *astuple(self))
        return (data + struct.pack("<I", zlib.crc32(data))).ljust(HEADER_BYTES, b"\0")

    @classmethod
    def unpack(cls, data: bytes, *, name: str) -> ShardHeader:
        size = _FIELDS.size
        if len(data) < HEADER_BYTES or struct.unpack("<I", data[size : size + 4])[0] != zlib.crc32(data[:size]):
            raise damaged(name, "the header's checksum does not fit")
        magic, version, *values = _FIELDS.unpack(data[:size])
        if magic != MAGIC or version != VERSION:
            raise damaged(name, f"magic {magic!r} and version {version}, expected {MAGIC!r} and {VERSION}")
        return cls(*values)


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smallest of uint16 and uint32 that holds every id. Raises InputError if neither does."""
    for name in ("uint16", "uint32"):
        dtype = np.dtype(name)
        if vocab_size - 1 <= np.iinfo(dtype).max:
            return dtype
    raise InputError(
        f"a vocabulary of {vocab_size:,} tokens does not fit {dtype.name}, which ends at {np.iinfo(dtype).max + 1:,}",
        hint="train a tokenizer with a smaller --vocab-size",
    )


class ArrayWriter:
    """Appends to one file; `finish` writes the header and forces everything to disk.

    Args:
        count, checksum: of the items that another writer of this file has synced; what it wrote after them is cut off.

    Raises DamagedShardError where the file does not have these items.
    """

    def __init__(self, path: Path, dtype: np.dtype[Any], *, count: int = 0, checksum: int = 0) -> None:
        self.path, self.dtype = path, dtype
        self.count, self.checksum = count, checksum
        try:
            # `_descriptor` is None once it is closed.
            self._descriptor: int | None = files.reopen(path) if count else files.create(path)
        except OSError as error:
            raise storage_error(path, error) from error
        if count:
            self._cut()
        else:
            self._write(bytes(HEADER_BYTES))

    def _cut(self) -> None:
        """Check the items of the earlier writer, and cut off what follows them."""
        assert self._descriptor is not None
        end = HEADER_BYTES + self.count * self.dtype.itemsize
        found = checksum = 0
        for start in range(HEADER_BYTES, end, READ_BYTES):
            data = os.pread(self._descriptor, min(READ_BYTES, end - start), start)
            found, checksum = found + len(data), zlib.crc32(data, checksum)
        if found != end - HEADER_BYTES or checksum != self.checksum:
            self.close()
            raise damaged(self.path, "it lacks what was written before")
        files.truncate(self._descriptor, end)
        os.lseek(self._descriptor, end, os.SEEK_SET)

    def append(self, values: np.ndarray) -> None:
        data = np.ascontiguousarray(values, dtype=self.dtype).tobytes()
        self.checksum = zlib.crc32(data, self.checksum)
        self._write(data)
        self.count += len(values)

    def sync(self) -> None:
        assert self._descriptor is not None, "closed"
        try:
            files.fsync(self._descriptor)
        except OSError as error:
            raise storage_error(self.path, error) from error

    def finish(self, *, tokenizer: bytes, **facts: Any) -> None:
        header = ShardHeader(
            item_bytes=self.dtype.itemsize, tokenizer=tokenizer, count=self.count, checksum=self.checksum, **facts
        )
        assert self._descriptor is not None, "closed"
        try:
            os.lseek(self._descriptor, 0, os.SEEK_SET)
            self._write(header.pack())
            files.fsync(self._descriptor)
        except OSError as error:
            raise storage_error(self.path, error) from error
        finally:
            self.close()

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _write(self, data: bytes) -> None:
        assert self._descriptor is not None, "closed"
        try:
            files.write(self._descriptor, data)
        except OSError as error:
            needed = HEADER_BYTES + self.count * self.dtype.itemsize + len(data)
            raise storage_error(self.path, error, needed=needed) from error


def storage_error(path: Path, error: OSError, *, needed: int | None = None) -> StorageError:
    hint = "free some space, or set TFORMER_CACHE to a folder with more"
    return cannot_write(path, error, bytes_needed=needed, hint=hint)


# -- chunks ------------------------------------------------------------------------------------------------------------


def safe_chunks(pieces: Iterable[DocumentChunk]) -> Iterator[DocumentChunk]:
    """The same documents in chunks, of at most `CHUNK_CHARACTERS` where safe places are that close."""
    parts: list[str] = []
    length = 0
    for piece in pieces:
        parts.append(piece.text)
        length += len(piece.text)
        if length <= CHUNK_LIMIT and not piece.ends_document:
            continue
        buffer, start = "".join(parts), 0
        while len(buffer) - start > (CHUNK_CHARACTERS if piece.ends_document else CHUNK_LIMIT):
            cut = find_cut(buffer, start, size=CHUNK_CHARACTERS, limit=CHUNK_LIMIT)
            if cut == len(buffer):
                break
            yield DocumentChunk(buffer[start:cut], False)
            start = cut
        rest = buffer[start:]
        if piece.ends_document:
            yield DocumentChunk(rest, True)
            rest = ""
        parts, length = [rest], len(rest)


def in_batches(
    items: Iterable[Item],
    characters: Callable[[Item], int],
    *,
    task: str,
    work: Work,
) -> Iterator[list[Item]]:
    """The items in batches of about `BATCH_CHARACTERS`, counted by `characters` (at least 1: a batch of any must end).

    Raises Interrupted, with the name of the task, before a batch if `work` is stopped.
    """
    for batch in batches_of(items, characters, size=BATCH_CHARACTERS):
        work.raise_if_stopped(f"while {task}")
        yield batch


def shard_path(folder: Path, number: int) -> Path:
    return folder / f"tokens-{number:05d}.bin"
