"""Tokenised once, read ever after: token shards kept under a key of (text's fingerprint, tokenizer's hash).

A cache entry is a directory that appears by one rename of a finished one; a temporary directory is locked by the
process that fills it, so what a killed process left behind is known and removed, while writers at the same time do not
disturb each other. A damaged entry is made again. When the cache cannot be written, the tokens go to a temporary
folder, and a note says so.

Between documents stands the tokenizer's end-of-text id, when it has one: after every document if there are several;
a source that is one document has none. The tokenizer of a decoder that was trained on documents with a beginning
(`opening_ids`: Llama's `<s>`) puts it before each.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import numpy as np

from tformer.cache_dir import default_cache_dir
from tformer.data import shards
from tformer.data.corpus import TokenCorpus
from tformer.data.shards import DamagedShardError, map_array, storage_error, token_dtype, verify_array
from tformer.data.tokenise import Encoder, Progress, Source, shard_path, write_entry

TEMPORARY = ".tmp-"


def token_corpus(
    source: Source,
    tokenizer: Encoder,
    *,
    cache_dir: Path | str | None = None,
    progress: Progress | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> TokenCorpus:
    """The source's tokens, from the cache or made now, in memory that does not grow with the text.

    `progress(done_bytes, total_bytes or None)` and `should_stop()` are called about once a megabyte; when the latter
    is true, Interrupted is raised and nothing stays behind. InputError for text without tokens, StorageError for a
    full disk.
    """
    token_dtype(tokenizer.vocab_size)
    home = Path(cache_dir) if cache_dir is not None else default_cache_dir()
    # The layout of the files is part of the key by VERSION; what ends a document may be the recipe's choice.
    parts = (shards.VERSION, source.fingerprint(), tokenizer.sha256, tokenizer.special.eos, tokenizer.opening)
    key = hashlib.sha256(":".join(map(str, parts)).encode()).hexdigest()[:32]
    notes: tuple[str, ...] = ()
    if (home / key).is_dir():
        try:
            return _open_entry(home / key, source.name, tokenizer, notes=notes)
        except DamagedShardError as error:
            notes = (*notes, f"{home / key}: cached tokens are damaged ({error}), tokenising again")
    home, fallback, owner = _writable(home)
    with _temporary(home) as folder:
        write_entry(folder, source, tokenizer, progress=progress, should_stop=should_stop)
        _publish(folder, home / key, source.name, tokenizer)
    return _open_entry(home / key, source.name, tokenizer, notes=notes + fallback, keep=owner)


def _writable(home: Path) -> tuple[Path, tuple[str, ...], object]:
    """(folder, notes, its owner): the cache, or a temporary folder that goes when its owner does."""
    try:
        home.mkdir(parents=True, exist_ok=True)
        with _locked(home):
            _sweep(home)
            _new_folder(home).rmdir()
        return home, (), None
    except OSError as error:
        folder = tempfile.TemporaryDirectory(prefix="tformer-")
        reason = (error.strerror or str(error)).lower()
        note = f"{home}: the cache cannot be written ({reason}); tokens are kept in {folder.name} for this run only"
        return Path(folder.name), (note,), folder


def _new_folder(home: Path) -> Path:
    folder = home / f"{TEMPORARY}{os.getpid()}-{secrets.token_hex(4)}"
    folder.mkdir()  # not mkdtemp: an entry has the mode that the umask asks for
    return folder


@contextlib.contextmanager
def _locked(home: Path) -> Iterator[None]:
    """Holds the cache's lock: for making, sweeping and replacing directories, never while tokenising."""
    with open(home / ".lock", "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _temporary(home: Path) -> Iterator[Path]:
    """A new directory, locked as long as this process works in it, and gone at the end if it is still there."""
    try:
        with _locked(home):
            folder = _new_folder(home)
            lock = _lock_of(folder)
            fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError as error:
        raise storage_error(home, error) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        lock.close()


def _lock_of(folder: Path) -> IO[str]:
    return open(folder / "lock", "a")


def _sweep(home: Path) -> None:
    """Removes temporary directories whose process is gone: nobody holds their lock."""
    for folder in home.glob(f"{TEMPORARY}*"):
        with contextlib.suppress(BlockingIOError, FileNotFoundError), _lock_of(folder) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)


def _publish(folder: Path, entry: Path, name: str, tokenizer: Encoder) -> None:
    """Renames a finished directory into its place, unless another process has put a sound one there meanwhile."""
    try:
        with _locked(entry.parent):
            (folder / "lock").unlink()  # under the cache's lock: nobody sweeps now
            if entry.is_dir():
                try:
                    _open_entry(entry, name, tokenizer)
                    return
                except DamagedShardError:
                    damaged = _new_folder(entry.parent)
                    os.rename(entry, damaged)  # readers that mapped its files keep them
                    shutil.rmtree(damaged)
            os.rename(folder, entry)
            descriptor = os.open(entry.parent, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
    except OSError as error:
        raise storage_error(entry, error) from error


def _open_entry(
    entry: Path, name: str, tokenizer: Encoder, *, notes: tuple[str, ...] = (), keep: object = None
) -> TokenCorpus:
    """Maps a cache entry; DamagedShardError when a file is missing, cut, changed or another tokenizer's."""
    digest = bytes.fromhex(tokenizer.sha256)
    documents, facts = map_array(entry / "documents.bin", np.dtype("int64"), tokenizer=digest)
    marks, marks_header = map_array(entry / "marks.bin", np.dtype("int64"), tokenizer=digest)
    dtype = token_dtype(tokenizer.vocab_size)
    arrays = [(documents, facts), (marks, marks_header)]
    if facts.vocab_size != tokenizer.vocab_size or facts.shard_tokens < 1:
        raise DamagedShardError("documents.bin")
    for number in range(-(-facts.tokens // facts.shard_tokens)):
        array, header = map_array(shard_path(entry, number), dtype, tokenizer=digest)
        if header.number != number or len(array) != min(facts.shard_tokens, facts.tokens - number * facts.shard_tokens):
            raise DamagedShardError(f"tokens-{number:05d}.bin")
        arrays.append((array, header))
    if sum(array.nbytes for array, _ in arrays) <= shards.VERIFY_BYTES:
        for array, header in arrays:
            verify_array(array, header)
    return TokenCorpus(
        name=name,
        shards=tuple(array for array, _ in arrays[2:]),
        shard_tokens=facts.shard_tokens,
        all_documents=documents,
        marks=marks.reshape(-1, 2),
        start=0,
        stop=facts.tokens,
        fingerprint=facts.text.hex(),
        notes=notes,
        decode=tokenizer.decode,
        keep=keep,
    )
