"""Token files: documents are cut into chunks, encoded and written once; `array_files` reads them.

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

import hashlib
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from tformer import files
from tformer.data.sources.files import Piece, Progress, ShouldStop, raise_if_stopped
from tformer.data.sources.text import TextSource
from tformer.errors import InputError, StorageError, cannot_write
from tformer.tokenizer import Tokenizer
from tformer.tokenizer.pieces import BATCH_CHARACTERS, batches_of, find_cut

MARK_BYTES = 4096  # at least this much text between two marks
DOCUMENT_END = b"\xff"  # in the text's hash: a byte that UTF-8 never has
MAGIC = b"TFTOKENS"
VERSION = 1
SHARD_BYTES = 128 << 20

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
    hint = f"the next command tokenises the text anew; where it cannot, remove {Path(path).parent}"
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
    """Appends to one file; `finish` writes the header and forces everything to disk."""

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self.path, self.dtype = path, dtype
        self.count, self._checksum = 0, 0
        try:
            self._descriptor: int | None = files.create(path)  # until `close`
        except OSError as error:
            raise storage_error(path, error) from error
        self._write(bytes(HEADER_BYTES))

    def append(self, values: np.ndarray) -> None:
        data = np.ascontiguousarray(values, dtype=self.dtype).tobytes()
        self._checksum = zlib.crc32(data, self._checksum)
        self._write(data)
        self.count += len(values)

    def finish(self, *, tokenizer: bytes, **facts: Any) -> None:
        header = ShardHeader(
            item_bytes=self.dtype.itemsize, tokenizer=tokenizer, count=self.count, checksum=self._checksum, **facts
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


def safe_chunks(pieces: Iterable[Piece]) -> Iterator[Piece]:
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
            yield Piece(buffer[start:cut], False)
            start = cut
        rest = buffer[start:]
        if piece.ends_document:
            yield Piece(rest, True)
            rest = ""
        parts, length = [rest], len(rest)


def in_batches(
    items: Iterable[Item],
    characters: Callable[[Item], int],
    *,
    task: str,
    should_stop: ShouldStop | None,
) -> Iterator[list[Item]]:
    """The items in batches of about `BATCH_CHARACTERS`, counted by `characters` (at least 1: a batch of any must end).

    Raises Interrupted, with the name of the task, before a batch if `should_stop` returns true.
    """
    for batch in batches_of(items, characters, size=BATCH_CHARACTERS):
        raise_if_stopped(should_stop, task)
        yield batch


# -- writing -----------------------------------------------------------------------------------------------------------


def shard_path(folder: Path, number: int) -> Path:
    return folder / f"tokens-{number:05d}.bin"


def write_entry(
    folder: Path,
    source: TextSource,
    tokenizer: Tokenizer,
    *,
    progress: Progress | None,
    should_stop: ShouldStop | None,
) -> None:
    """Fills `folder`, which the caller removes if this raises InputError, StorageError or Interrupted."""
    total = source.size_bytes()
    entry = _EntryWriter(folder, source.name, tokenizer)
    try:
        chunks = safe_chunks(source.documents())
        task = f"tokenising {source.name}"
        for batch in in_batches(chunks, lambda chunk: len(chunk.text) + 1, task=task, should_stop=should_stop):
            entry.add(batch, tokenizer.encode_batch([chunk.text for chunk in batch]))
            if progress is not None:
                progress(entry.num_bytes, total)
        entry.finish()
    finally:
        entry.close()


class _EntryWriter:
    """The open files of a cache entry, and the figures so far."""

    def __init__(self, folder: Path, name: str, tokenizer: Tokenizer) -> None:
        self.folder, self.name, self.tokenizer = folder, name, tokenizer
        self.dtype = token_dtype(tokenizer.vocab_size)
        self.shard_tokens = SHARD_BYTES // self.dtype.itemsize
        self.digest = bytes.fromhex(tokenizer.sha256)
        self.num_tokens = self.num_bytes = self.num_documents = self.num_shards = 0
        self._text = hashlib.sha256()
        self._in_document = False  # whether the current document has tokens
        self._mark = (0, 0)  # the latest, not yet written
        self._shard: ArrayWriter | None = None
        self._documents = ArrayWriter(folder / "documents.bin", np.dtype("int64"))
        self._marks = ArrayWriter(folder / "marks.bin", np.dtype("int64"))

    def add(self, chunks: list[Piece], encoded: list[list[int]]) -> None:
        ids: list[int] = []
        starts: list[int] = []
        for chunk, chunk_ids in zip(chunks, encoded, strict=True):
            if chunk_ids and not self._in_document:
                if self.num_documents:
                    self._end_document(ids)
                self.num_documents, self._in_document = self.num_documents + 1, True
                starts.append(self.num_tokens + len(ids))
                ids += self.tokenizer.opening
            ids += chunk_ids
            data = chunk.text.encode("utf-8")
            self._text.update(data)
            self.num_bytes += len(data)
            self._add_mark(self.num_tokens + len(ids), MARK_BYTES)
            if chunk.ends_document:
                self._text.update(DOCUMENT_END)
                self._in_document = False
        self._write_ids(ids)
        self._documents.append(np.array(starts, dtype=np.int64))

    def finish(self) -> None:
        if self.num_documents > 1:
            ids: list[int] = []
            self._end_document(ids)
            self._write_ids(ids)
        if self.num_tokens == 0:
            raise InputError(f"{self.name}: the tokenizer makes no tokens of this text")
        self._finish_shard()
        self._add_mark(self.num_tokens, 0)
        self._marks.append(np.array(self._mark, dtype=np.int64))
        self._marks.finish(tokenizer=self.digest)
        self._documents.append(np.array([self.num_tokens], dtype=np.int64))
        self._documents.finish(
            tokenizer=self.digest,
            text=self._text.digest(),
            tokens=self.num_tokens,
            num_bytes=self.num_bytes,
            shard_tokens=self.shard_tokens,
            vocab_size=self.tokenizer.vocab_size,
        )

    def close(self) -> None:
        for writer in (self._shard, self._documents, self._marks):
            if writer is not None:
                writer.close()

    def _end_document(self, ids: list[int]) -> None:
        if self.tokenizer.special.eos is not None:
            ids.append(self.tokenizer.special.eos)

    def _add_mark(self, tokens: int, min_bytes: int) -> None:
        last_tokens, last_bytes = self._mark
        if self.num_bytes - last_bytes < min_bytes:
            return
        if tokens > last_tokens:  # text without tokens belongs to the same place
            self._marks.append(np.array(self._mark, dtype=np.int64))
        self._mark = (tokens, self.num_bytes)

    def _write_ids(self, ids: list[int]) -> None:
        values = np.array(ids, dtype=np.int64)
        if len(values) and not 0 <= values.min() <= values.max() < self.tokenizer.vocab_size:
            raise InputError(
                f"the tokenizer gives ids from {values.min()} to {values.max()}, "
                f"its vocabulary has {self.tokenizer.vocab_size} tokens"
            )
        while len(values):
            if self._shard is None:
                self._shard = ArrayWriter(shard_path(self.folder, self.num_shards), self.dtype)
            room = self.shard_tokens - self._shard.count
            self._shard.append(values[:room])
            self.num_tokens += len(values[:room])
            values = values[room:]
            if self._shard.count == self.shard_tokens:
                self._finish_shard()

    def _finish_shard(self) -> None:
        if self._shard is not None:
            self._shard.finish(tokenizer=self.digest, number=self.num_shards)
            self._shard = None
            self.num_shards += 1
