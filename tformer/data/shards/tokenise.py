"""Documents to the files of a token cache: chunks, encoding, writing."""

from __future__ import annotations

import hashlib
import re
import signal
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol

import numpy as np

from tformer.data.shards import files as shards
from tformer.data.shards.files import (
    ArrayWriter,
    token_dtype,
)
from tformer.data.sources.files import Piece
from tformer.errors import InputError, Interrupted

CHUNK_CHARACTERS = 1 << 16
CHUNK_LIMIT = 1 << 20

_LINE_START = re.compile(r"(?<=\S)\n(?=\S)")
_WORD_START = re.compile(r"(?<=\S) (?=\S)")


def safe_chunks(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """The same documents in chunks of `CHUNK_CHARACTERS` or less where safe places are that close."""
    parts: list[str] = []
    length = 0
    for piece in pieces:
        parts.append(piece.text)
        length += len(piece.text)
        if length <= CHUNK_LIMIT and not piece.ends_document:
            continue
        buffer, start = "".join(parts), 0
        while len(buffer) - start > (CHUNK_CHARACTERS if piece.ends_document else CHUNK_LIMIT):
            cut = _find_cut(buffer, start)
            if cut == len(buffer):
                break
            yield Piece(buffer[start:cut], False)
            start = cut
        rest = buffer[start:]
        if piece.ends_document:
            yield Piece(rest, True)
            rest = ""
        parts, length = [rest], len(rest)


def _find_cut(text: str, start: int) -> int:
    """Where the chunk that begins at `start` ends: the end of the text, or at most `CHUNK_LIMIT` further."""
    end, limit = start + CHUNK_CHARACTERS, min(start + CHUNK_LIMIT, len(text))
    newline = _last(_LINE_START, "\n", text, start + 1, end)
    if newline < 0 and (later := _LINE_START.search(text, end, limit)):
        newline = later.start()
    if newline >= 0:
        return newline + 1
    space = -1 if limit == len(text) else _last(_WORD_START, " ", text, start + 1, limit)
    return limit if space < 0 else space


def _last(pattern: re.Pattern[str], character: str, text: str, start: int, end: int) -> int:
    """The last place in [start, end) where the pattern, which begins with `character`, matches; -1 when none does."""
    place = text.rfind(character, start, end)
    while place >= 0 and not pattern.match(text, place):
        place = text.rfind(character, start, place)
    return place


BATCH_CHARACTERS = 1 << 20  # encoded at once, over the tokenizer's threads
MARK_BYTES = 4096  # at least this much text between two marks
DOCUMENT_END = b"\xff"  # in the text's hash: a byte that UTF-8 never has

Progress = Callable[[int, int | None], object]


class Special(Protocol):
    @property
    def eos(self) -> int | None: ...


class Encoder(Protocol):
    """What is needed of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def special(self) -> Special: ...
    @property
    def opening(self) -> tuple[int, ...]: ...
    @property
    def sha256(self) -> str: ...
    def encode_batch(self, texts: list[str], /) -> list[list[int]]: ...
    def decode(self, ids: list[int], /) -> str: ...


class Source(Protocol):
    """What is needed of a `TextSource`."""

    @property
    def name(self) -> str: ...
    def documents(self) -> Iterator[Piece]: ...
    def fingerprint(self) -> str: ...
    def size_bytes(self) -> int | None: ...


def shard_path(folder: Path, number: int) -> Path:
    return folder / f"tokens-{number:05d}.bin"


def write_entry(
    folder: Path,
    source: Source,
    tokenizer: Encoder,
    *,
    progress: Progress | None,
    should_stop: Callable[[], bool] | None,
) -> None:
    """Fills `folder`, which the caller removes when this raises: InputError, StorageError, Interrupted."""
    total = source.size_bytes()
    entry = _EntryWriter(folder, source.name, tokenizer)
    try:
        for batch in _batches(safe_chunks(source.documents())):
            if should_stop is not None and should_stop():
                raise Interrupted(f"interrupted while tokenising {source.name}", signal_number=signal.SIGINT)
            entry.add(batch, tokenizer.encode_batch([chunk.text for chunk in batch]))
            if progress is not None:
                progress(entry.num_bytes, total)
        entry.finish()
    finally:
        entry.close()


def _batches(chunks: Iterable[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    size = 0
    for chunk in chunks:
        batch.append(chunk)
        size += len(chunk.text) + 1  # empty ones count too: a batch of them must end
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class _EntryWriter:
    """The open files of an entry, and what is known so far."""

    def __init__(self, folder: Path, name: str, tokenizer: Encoder) -> None:
        self.folder, self.name, self.tokenizer = folder, name, tokenizer
        self.dtype = token_dtype(tokenizer.vocab_size)
        self.shard_tokens = shards.SHARD_BYTES // self.dtype.itemsize
        self.digest = bytes.fromhex(tokenizer.sha256)
        self.num_tokens = self.num_bytes = self.num_documents = self.num_shards = 0
        self._text = hashlib.sha256()
        self._in_document = False  # the current document has tokens
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
        if tokens > last_tokens:  # else the text since gave no tokens: it belongs to the same place
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
