"""The files of a cache entry, written from a text; a killed process leaves a record from which the next one goes on.

The record says how many batches of the text and how many items of each file are synced. The next process reads
these batches again without encoding them, compares the hash of their text, cuts off what the files have beyond their
items, and encodes the rest. The files equal those of an undisturbed process byte for byte, with any number of workers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from tformer.data.shards import token_files
from tformer.data.shards.encoders import as_token_ids, encoded_batches
from tformer.data.shards.token_files import (
    DOCUMENT_END,
    ArrayWriter,
    DamagedShardError,
    in_batches,
    safe_chunks,
    shard_path,
    storage_error,
    token_dtype,
)
from tformer.data.sources.files import DocumentChunk
from tformer.data.sources.text import TextSource
from tformer.support import __version__, files
from tformer.support.errors import InputError
from tformer.tokenizer import Tokenizer
from tformer.workers.work import Work

RECORD = "progress"
RECORD_BYTES = 64 << 20  # of text between two records
MAX_RECORD_BYTES = 1 << 16


@dataclass
class Written:
    """State of the files of an entry, in the order of the text.

    Attributes:
        batches: number of batches of the text.
        num_tokens, num_bytes, num_documents: of the text so far.
        num_shards: complete ones.
        in_document: whether the current document has tokens.
        mark: the latest (tokens, bytes), not yet in a file.
        items: (number, checksum) of the items in each unfinished file.
        text: sha256 of the text; set in a record.
        version: of the package; set in a record.
    """

    batches: int = 0
    num_tokens: int = 0
    num_bytes: int = 0
    num_documents: int = 0
    num_shards: int = 0
    in_document: bool = False
    mark: tuple[int, int] = (0, 0)
    items: dict[str, tuple[int, int]] = field(default_factory=dict)
    text: str = ""
    version: str = ""


def read_record(folder: Path) -> Written | None:
    """The state that a killed process left in a folder; None without a whole record of this version."""
    with suppress(OSError, InputError):
        digest, _, content = files.read_bounded(folder / RECORD, max_bytes=MAX_RECORD_BYTES).partition(b"\n")
        if hashlib.sha256(content).hexdigest().encode() == digest:
            values = files.parse_object(content, name=RECORD)
            return Written(**values) if values["version"] == __version__ else None
    return None


def record_time(folder: Path) -> float:
    """When the record was written, in seconds since the epoch; 0 without one."""
    try:
        return (folder / RECORD).stat().st_mtime
    except OSError:
        return 0.0


def write_record(folder: Path, written: Written) -> None:
    """Replace the record. Errors: StorageError."""
    content = json.dumps(asdict(written))
    digest = hashlib.sha256(content.encode()).hexdigest()
    files.write_text(folder / RECORD, f"{digest}\n{content}")


def write_entry(folder: Path, source: TextSource, tokenizer: Tokenizer, work: Work) -> None:
    """Write the tokens of a source into `folder`, or go on where a killed process ended.

    Raises InputError, StorageError, Interrupted, and the errors of `encoded_batches`.
    """
    total, task = source.size_bytes(), f"tokenizing {source.name}"

    def batches() -> Iterator[list[DocumentChunk]]:
        chunks = safe_chunks(source.documents())
        return in_batches(chunks, lambda chunk: len(chunk.text) + 1, task=task, work=work)

    text, todo = batches(), hashlib.sha256()
    record = read_record(folder)
    if record is not None:
        for batch in islice(text, record.batches):
            todo.update(_text_of(batch))
    entry = None
    if record is not None and todo.hexdigest() == record.text:
        with suppress(DamagedShardError):
            entry = EntryWriter(folder, source.name, tokenizer, record, todo)
    if entry is None:
        for file in folder.glob("*.bin"):
            files.unlink(file)
        text, entry = batches(), EntryWriter(folder, source.name, tokenizer, Written(), hashlib.sha256())
    with closing(entry), closing(encoded_batches(text, tokenizer, workers=work.workers)) as encoded:  # type: ignore[type-var]
        for chunks, ids, lengths in encoded:
            entry.add(chunks, ids, lengths)
            entry.record_if_due()
            work.report(entry.written.num_bytes, total)
        entry.finish()


def _text_of(chunks: list[DocumentChunk]) -> bytes:
    """The text of some chunks as bytes to hash: UTF-8, with a byte that UTF-8 never has after each document."""
    return b"".join(chunk.text.encode() + (DOCUMENT_END if chunk.ends_document else b"") for chunk in chunks)


class EntryWriter:
    """The open files of a cache entry, and what was written. DamagedShardError for files that differ from that."""

    def __init__(self, folder: Path, name: str, tokenizer: Tokenizer, written: Written, text: Any) -> None:
        self.folder, self.name, self.tokenizer, self.written = folder, name, tokenizer, written
        self.dtype = token_dtype(tokenizer.vocab_size)
        self.shard_tokens = token_files.SHARD_BYTES // self.dtype.itemsize
        self.digest = bytes.fromhex(tokenizer.sha256)
        self._text = text  # a hashlib object
        self._recorded_bytes = written.num_bytes
        self._shard: ArrayWriter | None = None
        self._writers: list[ArrayWriter] = []
        try:
            self._documents = self._open(folder / "documents.bin", np.dtype("int64"))
            self._marks = self._open(folder / "marks.bin", np.dtype("int64"))
            if (partial := shard_path(folder, written.num_shards)).name in written.items:
                self._shard = self._open(partial, self.dtype)
        except BaseException:
            self.close()
            raise

    def _open(self, path: Path, dtype: np.dtype[Any]) -> ArrayWriter:
        count, checksum = self.written.items.get(path.name, (0, 0))
        writer = ArrayWriter(path, dtype, count=count, checksum=checksum)
        self._writers.append(writer)
        return writer

    @cached_property
    def _ending(self) -> np.ndarray:
        """The ids after each of several documents."""
        eos = self.tokenizer.special.eos
        return as_token_ids(np.array([] if eos is None else [eos], dtype=np.int64), self.tokenizer)

    @cached_property
    def _opening(self) -> np.ndarray:
        """The ids before each document."""
        return as_token_ids(np.array(self.tokenizer.opening, dtype=np.int64), self.tokenizer)

    def add(self, chunks: list[DocumentChunk], ids: np.ndarray, lengths: np.ndarray) -> None:
        """Write a batch: its chunks, the ids of all of them, and the number of ids of each."""
        done = self.written
        parts: list[np.ndarray] = []
        starts: list[int] = []
        tokens, begin, end = done.num_tokens, 0, 0
        for chunk, length in zip(chunks, lengths.tolist(), strict=True):
            if length and not done.in_document:
                ending = self._ending if done.num_documents else ids[:0]
                parts += [ids[begin:end], ending, self._opening]
                tokens, begin = tokens + len(ending), end
                starts.append(tokens)
                tokens += len(self._opening)
                done.num_documents, done.in_document = done.num_documents + 1, True
            end, tokens = end + length, tokens + length
            done.num_bytes += len(chunk.text) if chunk.text.isascii() else len(chunk.text.encode())
            self._add_mark(tokens, token_files.MARK_BYTES)
            done.in_document = done.in_document and not chunk.ends_document
        self._text.update(_text_of(chunks))
        self._write_ids(np.concatenate([*parts, ids[begin:end]]))
        self._documents.append(np.array(starts, dtype=np.int64))
        done.batches += 1

    def record_if_due(self) -> None:
        """Sync the files and write a record every `RECORD_BYTES` of text."""
        done = self.written
        if done.num_bytes - self._recorded_bytes < RECORD_BYTES:
            return
        for writer in self._writers:
            writer.sync()
        done.items = {writer.path.name: (writer.count, writer.checksum) for writer in self._writers if writer.count}
        done.text, done.version = self._text.hexdigest(), __version__
        try:
            files.fsync_dir(self.folder)  # the names of new shards
            write_record(self.folder, done)
        except OSError as error:
            raise storage_error(self.folder, error) from error
        self._recorded_bytes = done.num_bytes

    def finish(self) -> None:
        done = self.written
        if done.num_documents > 1:
            self._write_ids(self._ending)
        if done.num_tokens == 0:
            raise InputError(f"{self.name}: the tokenizer makes no tokens of this text")
        self._finish_shard()
        self._add_mark(done.num_tokens, 0)
        self._marks.append(np.array(done.mark, dtype=np.int64))
        self._marks.finish(tokenizer=self.digest)
        self._documents.append(np.array([done.num_tokens], dtype=np.int64))
        self._documents.finish(
            tokenizer=self.digest,
            text=self._text.digest(),
            tokens=done.num_tokens,
            num_bytes=done.num_bytes,
            shard_tokens=self.shard_tokens,
            vocab_size=self.tokenizer.vocab_size,
        )
        with suppress(FileNotFoundError):
            files.unlink(self.folder / RECORD)

    def close(self) -> None:
        for writer in self._writers:
            writer.close()

    def _add_mark(self, tokens: int, min_bytes: int) -> None:
        last_tokens, last_bytes = self.written.mark
        if self.written.num_bytes - last_bytes < min_bytes:
            return
        if tokens > last_tokens:  # text without tokens makes no new mark
            self._marks.append(np.array(self.written.mark, dtype=np.int64))
        self.written.mark = (tokens, self.written.num_bytes)

    def _write_ids(self, ids: np.ndarray) -> None:
        while len(ids):
            if self._shard is None:
                self._shard = self._open(shard_path(self.folder, self.written.num_shards), self.dtype)
            room = self.shard_tokens - self._shard.count
            self._shard.append(ids[:room])
            self.written.num_tokens += len(ids[:room])
            ids = ids[room:]
            if self._shard.count == self.shard_tokens:
                self._finish_shard()

    def _finish_shard(self) -> None:
        if self._shard is not None:
            self._shard.finish(tokenizer=self.digest, number=self.written.num_shards)
            self._writers.remove(self._shard)
            self._shard = None
            self.written.num_shards += 1
