"""Tokenized corpora: ids in shards on disk, and the cache directory that keeps them.

`TokenCorpus.slice` and `gather` return int64 ids; the files hold uint16 or uint32. A corpus may be a view of a part of
another (`subset`, `split`), without copying. Positions count tokens from 0.

Tokens are kept under a key of (text's fingerprint, tokenizer's hash). A cache entry is a directory that appears by one
rename of a finished one. A temporary directory is locked by the process that fills it: others that need the same tokens
wait for it, and the next one goes on with what a killed process has written, or removes it. A damaged entry is made
again. If the cache cannot be written, the tokens go to a temporary folder, with a note for the user.

Between documents stands the tokenizer's end-of-text id, if it has one: after every document if there are several; a
source that is one document has none. A tokenizer with `opening` ids (Llama's `<s>`) puts them before each document.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import shutil
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import IO, Self

import numpy as np

from tformer.data.permutation import span_of
from tformer.data.shards import token_files
from tformer.data.shards.array_files import MEMORY_BYTES, ArrayFile
from tformer.data.shards.entry_writer import read_record, record_time, write_entry
from tformer.data.shards.token_files import DamagedShardError, damaged, shard_path, storage_error, token_dtype
from tformer.data.sources.text import TextSource
from tformer.support import files
from tformer.support.errors import InputError, StorageError
from tformer.support.processes import ScratchFolder
from tformer.tokenizer import Tokenizer
from tformer.workers.work import QUIET, Work

WAIT_SECONDS = 0.2  # between two looks at a text that another process tokenizes
KEPT_SECONDS = 7 * 24 * 3600  # that the files of a killed process are kept for the next one to go on
LOCK = "lock"  # a file of a directory that is being filled, locked by the process that fills it
BOUNDARY_TOLERANCE = 0.1  # a split moves to a document's start that is nearer than this share of the last part


LEARNED, SECOND = 1, 2
"""Bits of the marks of a conversation: of the ids of answers, and of all ids of the second of two sequences."""


@dataclass(frozen=True, slots=True)
class Example:
    """One sample: ids [t], and further values that the objective needs.

    `document_ids` [t]: the document of the sample that each id belongs to (0, 1, ...). `token_type_ids` [t]: 0 for the
    first text, 1 for the second. `label`: a class, a score, an array [L] of zeros and ones (several labels), an array
    [t] with one for each id, 1 for a second text that is not the next one, or marks [t] of a conversation.
    """

    ids: np.ndarray
    document_ids: np.ndarray | None = None
    token_type_ids: np.ndarray | None = None
    label: int | float | np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.ids)


Items = np.ndarray | ArrayFile
"""An array in memory or in a file."""


@dataclass(frozen=True)
class TokenCorpus:
    """Tokens [start, stop) of the shards; every shard but the last holds exactly `shard_tokens` ids."""

    name: str
    shards: tuple[Items, ...]
    shard_tokens: int
    all_documents: Items  # int64 [documents + 1]: where each begins; the last is where the corpus ends
    byte_counts: Items  # int64 [m, 2]: (tokens, utf-8 bytes) before a point, from (0, 0) to the whole corpus
    start: int
    stop: int
    fingerprint: str  # sha256 of the text and its document boundaries: equal text, equal fingerprint
    notes: tuple[str, ...] = ()  # for the user, for example where the cache is
    decode: Callable[[list[int]], str] | None = None  # exact byte counts of parts cut between two points
    owner: object = field(default=None, repr=False)  # of a temporary folder, which is deleted with it

    @classmethod
    def from_ids(
        cls, ids: Sequence[int] | np.ndarray, *, documents: Sequence[int] = (), num_bytes: int = 0, name: str = "memory"
    ) -> Self:
        """A corpus in memory; `documents` are the positions where documents begin (default: one document)."""
        array = np.asarray(ids, dtype=np.uint32)
        starts = np.array([*(documents or [0]), len(array)], dtype=np.int64)
        byte_counts = np.array([[0, 0], [len(array), num_bytes]], dtype=np.int64)
        return cls(name, (array,), max(1, len(array)), starts, byte_counts, 0, len(array), fingerprint="")

    def __len__(self) -> int:
        return self.stop - self.start

    def slice(self, start: int, stop: int) -> np.ndarray:
        """int64 ids of [start, stop), cut at the corpus's end as Python's slices are."""
        start, stop = self.start + max(0, start), min(self.start + stop, self.stop)
        if start >= stop:
            return np.empty(0, dtype=np.int64)
        first, last = start // self.shard_tokens, (stop - 1) // self.shard_tokens
        parts = [
            self.shards[index][max(0, start - index * self.shard_tokens) : stop - index * self.shard_tokens]
            for index in range(first, last + 1)
        ]
        return (parts[0] if len(parts) == 1 else np.concatenate(parts)).astype(np.int64)

    def gather(self, starts: np.ndarray, length: int) -> np.ndarray:
        """int64 [n, length]: the tokens from each of `starts` on; all must lie inside the corpus."""
        rows = np.empty((len(starts), length), dtype=np.int64)
        index, places = np.divmod(np.asarray(starts) + self.start, self.shard_tokens)
        whole = places + length <= self.shard_tokens
        for number in np.unique(index[whole]):
            here, shard = np.flatnonzero(whole & (index == number)), self.shards[number]
            if isinstance(shard, ArrayFile):
                shard.gather(places[here], length, out=rows, rows=here)
            else:
                rows[here] = np.lib.stride_tricks.sliding_window_view(shard, length)[places[here]]
        for row in np.flatnonzero(~whole):
            rows[row] = self.slice(int(starts[row]), int(starts[row]) + length)
        return rows

    @property
    def files(self) -> tuple[ArrayFile, ...]:
        """The unverified files that a training reads on demand; empty for a small corpus."""
        return tuple(
            part for part in (*self.shards, self.all_documents, self.byte_counts) if isinstance(part, ArrayFile)
        )

    def document_numbers(self, places: np.ndarray) -> np.ndarray:
        """int64, the shape of `places`: the number of the document that each token belongs to, from 1."""
        tokens = self.start + places
        first = bisect_right(self.all_documents, int(tokens.min())) - 1
        last = bisect_right(self.all_documents, int(tokens.max()), lo=first)
        before = bisect_right(self.all_documents, self.start) - 1
        return first - before + np.searchsorted(self.all_documents[first:last], tokens, side="right")

    @cached_property
    def document_offsets(self) -> np.ndarray:
        """int64 [documents + 1]: where each document begins (a cut one begins at 0), then the number of tokens.

        It is as long as the corpus has documents; what needs only the documents of some tokens has `document_numbers`.
        """
        if self.start == 0 and self.stop == self.all_documents[-1]:
            return self.all_documents[:]
        first = bisect_right(self.all_documents, self.start) - 1
        last = bisect_left(self.all_documents, self.stop)
        return np.clip(self.all_documents[first : last + 1] - self.start, 0, len(self))

    @cached_property
    def num_bytes(self) -> int:
        """UTF-8 bytes of the text (newlines counted once, no byte order mark) that these tokens stand for."""
        return self._bytes_before(self.stop) - self._bytes_before(self.start)

    def subset(self, start: int, stop: int) -> TokenCorpus:
        """A view of tokens [start, stop)."""
        assert 0 <= start < stop <= len(self), f"subset [{start}, {stop}) of a corpus of {len(self)} tokens"
        return replace(self, start=self.start + start, stop=self.start + stop)

    def split(self, *, fraction: float) -> tuple[TokenCorpus, TokenCorpus]:
        """(training part, validation part): the last `fraction` of the corpus, always the same.

        The cut is at token int(n * (1 - fraction)), or at the nearest start of a document if one lies within a tenth of
        the validation part: documents stay whole where they are short, and one long text is cut exactly.
        """
        total = len(self)
        cut = int(total * (1 - fraction))
        near = bisect_left(self.all_documents, self.start + cut)
        candidates = [int(self.all_documents[number]) - self.start for number in (near - 1, near) if number >= 0]
        inside = [start for start in candidates if 0 < start < total]
        if inside:
            nearest = min(inside, key=lambda start: abs(start - cut))
            if abs(nearest - cut) <= BOUNDARY_TOLERANCE * (total - cut):
                cut = nearest
        if not 0 < cut < total:
            raise InputError(
                f"{self.name}: {total} tokens are too few to keep {fraction:g} of them for validation",
                hint="give more text, or a separate validation file (--valid)",
            )
        return self.subset(0, cut), self.subset(cut, total)

    def share(self, *, fraction: float, seed: int) -> TokenCorpus:
        """A connected part of the corpus, at a place fixed by the seed."""
        return self.subset(*span_of(len(self), fraction=fraction, seed=seed))

    def _bytes_before(self, position: int) -> int:
        point = bisect_right(self.byte_counts, position, key=itemgetter(0)) - 1
        tokens, size = (int(value) for value in self.byte_counts[point])
        if tokens == position:
            return size
        next_tokens, next_size = (int(value) for value in self.byte_counts[point + 1])
        share = (position - tokens) / (next_tokens - tokens)
        if self.decode is not None:  # exact for a tokenizer without loss, and in proportion for the others
            ids = replace(self, start=0, stop=next_tokens).slice(tokens, next_tokens).tolist()
            whole = len(self.decode(ids).encode("utf-8", "replace"))
            share = len(self.decode(ids[: position - tokens]).encode("utf-8", "replace")) / max(1, whole)
        return size + round(share * (next_size - size))


def token_corpus(source: TextSource, tokenizer: Tokenizer, work: Work = QUIET) -> TokenCorpus:
    """The source's tokens, from the cache or made now, in memory that does not grow with the text.

    `work` names the cache and the number of processes that encode (see `encoded_batches`; the files are the same with
    any number), reports the bytes done and is polled about once a megabyte.

    Raises Interrupted if it is stopped, and leaves no files behind, or those from which the next process goes on;
    InputError for text without tokens; StorageError for a full disk.
    """
    token_dtype(tokenizer.vocab_size)
    home, key = work.cache_dir, entry_key(source, tokenizer)
    if home is None:
        from tformer.support.device import default_cache_dir  # which imports torch

        home = default_cache_dir()
    notes: tuple[str, ...] = ()
    if (home / key).is_dir():
        try:
            return _open_entry(home / key, source.name, tokenizer, notes=notes)
        except DamagedShardError as error:
            notes = (*notes, f"{error}; tokenizing again")
    home, fallback, owner = _writable(home)
    total, task = source.size_bytes(), f"waiting for another process that tokenizes {source.name}"

    def wait(folder: Path) -> None:
        work.raise_if_stopped(f"while {task}")
        if (record := read_record(folder)) is not None:
            work.report(record.num_bytes, total)
        time.sleep(WAIT_SECONDS)

    with _unfinished(home, key, wait) as folder:
        with contextlib.suppress(DamagedShardError):
            if (home / key).is_dir():  # another process made it meanwhile
                return _open_entry(home / key, source.name, tokenizer, notes=notes + fallback, owner=owner)
        write_entry(folder, source, tokenizer, work)
        _publish(folder, home / key)
    return _open_entry(home / key, source.name, tokenizer, notes=notes + fallback, owner=owner)


def entry_key(source: TextSource, tokenizer: Tokenizer) -> str:
    """The name of the cache entry of a source's tokens."""
    # The recipe may choose another end of documents than the tokenizer.
    parts = (token_files.VERSION, source.fingerprint(), tokenizer.sha256, tokenizer.special.eos, tokenizer.opening)
    return hashlib.sha256(":".join(map(str, parts)).encode()).hexdigest()[:32]


def _writable(home: Path) -> tuple[Path, tuple[str, ...], object]:
    """(folder, notes, owner): the cache, or a temporary folder that is deleted with its owner."""
    try:
        files.make_folders(home)
        with locked(home):
            sweep(home)
            _new_folder(home).rmdir()
        return home, (), None
    except (OSError, InputError) as error:
        folder = ScratchFolder("tokens")
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        note = f"{home}: the cache cannot be written ({reason}); tokens are kept in {folder.path} for this run only"
        return folder.path, (note,), folder


def _new_folder(home: Path) -> Path:
    folder = home / f"{files.TEMPORARY}{os.getpid()}-{secrets.token_hex(4)}"
    files.mkdir(folder)  # not mkdtemp: an entry gets the mode of the umask
    return folder


@contextlib.contextmanager
def locked(home: Path) -> Iterator[None]:
    """Holds the cache's lock: for making, sweeping and replacing directories, never while tokenizing."""
    with open(home / ".lock", "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _unfinished(home: Path, key: str, wait: Callable[[Path], object]) -> Iterator[Path]:
    """The directory of an entry that is being made, locked while this process works in it.

    A killed or interrupted process leaves it for the next one if it holds a record; else it is deleted at the end. As
    long as another process holds the lock, `wait` is called with the directory, again and again.
    """
    folder = home / f"{files.TEMPORARY}tokens-{key}"
    lock = _acquired(home, folder)
    while lock is None:
        wait(folder)
        lock = _acquired(home, folder)
    keep = False
    try:
        yield folder
    except (InputError, StorageError):
        raise
    except BaseException:
        keep = read_record(folder) is not None
        raise
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
        lock.close()


def _acquired(home: Path, folder: Path) -> IO[str] | None:
    """The lock of a directory, which is made if there is none; None while another process holds it."""
    try:
        with locked(home):
            if not folder.is_dir():
                files.mkdir(folder)
            lock = open(folder / LOCK, "a")  # noqa: SIM115 (held until the entry is finished)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.close()
                return None
            return lock
    except OSError as error:
        raise storage_error(home, error) from error


def sweep(home: Path, *, unfinished: bool = False) -> None:
    """Remove temporary directories of ended processes, which no longer hold their locks.

    unfinished: remove also what the next process would go on with, which else is kept for `KEPT_SECONDS`.
    """
    for folder in home.glob(f"{files.TEMPORARY}*"):
        with contextlib.suppress(OSError), open(folder / LOCK, "a") as lock:  # in use, of another user, or no folder
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if unfinished or time.time() - record_time(folder) > KEPT_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)


def _publish(folder: Path, entry: Path) -> None:
    """Rename a finished directory to its place, where a damaged one may be."""
    try:
        with locked(entry.parent):
            files.unlink(folder / LOCK)  # under the cache's lock no process sweeps
            if entry.is_dir():
                aside = _new_folder(entry.parent)
                files.rename(entry, aside)  # readers that opened its files keep them
                shutil.rmtree(aside)
            files.fsync_dir(folder)
            files.rename(folder, entry)
            files.fsync_dir(entry.parent)
    except OSError as error:
        raise storage_error(entry, error) from error


def _open_entry(
    entry: Path, name: str, tokenizer: Tokenizer, *, notes: tuple[str, ...] = (), owner: object = None
) -> TokenCorpus:
    """Opens a cache entry. Raises DamagedShardError if a file is missing, cut, changed or of another tokenizer."""
    digest, int64 = bytes.fromhex(tokenizer.sha256), np.dtype("int64")
    documents = ArrayFile(entry / "documents.bin", int64, tokenizer=digest)
    byte_counts = ArrayFile(entry / "marks.bin", int64, tokenizer=digest, columns=2)
    dtype, facts = token_dtype(tokenizer.vocab_size), documents.header
    if facts.vocab_size != tokenizer.vocab_size or facts.shard_tokens < 1:
        raise damaged(documents.path, "it describes another corpus")
    shards = []
    for number in range(-(-facts.tokens // facts.shard_tokens)):
        shard = ArrayFile(shard_path(entry, number), dtype, tokenizer=digest, limit=tokenizer.vocab_size)
        expected = min(facts.shard_tokens, facts.tokens - number * facts.shard_tokens)
        if shard.header.number != number or len(shard) != expected:
            raise damaged(shard.path, f"{len(shard):,} ids, expected {expected:,}")
        shards.append(shard)
    few = sum(shard.num_bytes for shard in shards) <= MEMORY_BYTES
    return TokenCorpus(
        name=name,
        shards=tuple(shard.load() if few else shard for shard in shards),
        shard_tokens=facts.shard_tokens,
        all_documents=documents.load() if documents.num_bytes <= MEMORY_BYTES else documents,
        byte_counts=byte_counts.load() if byte_counts.num_bytes <= MEMORY_BYTES else byte_counts,
        start=0,
        stop=facts.tokens,
        fingerprint=facts.text.hex(),
        notes=notes,
        decode=tokenizer.decode,
        owner=owner,
    )
