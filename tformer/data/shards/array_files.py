"""Token files opened for reading, and the check of their bytes while a training reads them.

Arrays are read with `pread`, not memory-mapped: a file that is cut under a running training gives an error, where a
mapping would end the process with SIGBUS. A file that is replaced by a rename is read on as it was.

A corpus of 10^12 tokens has 15,000 files, more than a process may open. The first few hundred stay open; each of the
others is opened for every read, and must have the header that it had at first.

What is checked when: header and size of every file at the start; an id against the size of the vocabulary when it is
read; the checksum of an array of at most `MEMORY_BYTES` at the start, of larger ones in the background, at most once in
a training, 200 MB/s at most.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import sys
import threading
import weakref
import zlib
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from tformer.data.shards.token_files import HEADER_BYTES, DamagedShardError, ShardHeader, damaged
from tformer.support import files

MEMORY_BYTES = 64 << 20  # arrays up to this size are verified and kept in memory, larger ones read when needed
KEPT_BELOW = 512  # a descriptor with a higher number shows that many files are open: it is closed after each read
VERIFY_CHUNK = 4 << 20  # bytes read at once
VERIFY_PAUSE = 0.02  # seconds between two chunks of a check in the background: at most 200 MB/s
GATHERED_TOGETHER = 1 << 14  # items: ranges that begin so near each other are read at once
LOWEST_PRIORITY = 19


class ArrayFile:
    """The array of a token file, int [n] or [n, columns]; an index or a slice reads its items from the file.

    Args:
        limit: every item must be less, as an id is less than the size of the vocabulary; None allows any.

    Raises DamagedShardError, also when it is read, for a file that is missing, cut, changed or of another tokenizer.
    """

    def __init__(
        self, path: Path, dtype: np.dtype[Any], *, tokenizer: bytes, columns: int = 1, limit: int | None = None
    ) -> None:
        self.path, self.dtype, self._columns, self._limit = path, dtype, columns, limit
        descriptor = self._open()
        try:
            status, header = os.fstat(descriptor), os.pread(descriptor, HEADER_BYTES, 0)
            self.header = ShardHeader.unpack(header, name=str(path))
        except OSError as error:
            os.close(descriptor)
            raise DamagedShardError(f"cannot read {path}: {error.strerror}") from error
        except DamagedShardError:
            os.close(descriptor)
            raise
        self._identity = (status.st_dev, status.st_ino)
        self._descriptor: int | None = None
        if descriptor < min(KEPT_BELOW, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2):
            self._descriptor = descriptor
            self._close = weakref.finalize(self, os.close, descriptor)
        else:
            os.close(descriptor)
        count = self.header.count
        if self.header.tokenizer != tokenizer or self.header.item_bytes != dtype.itemsize:
            raise damaged(path, "it was written for another tokenizer")
        if count < 1 or count % columns or status.st_size != HEADER_BYTES + count * dtype.itemsize:
            raise damaged(path, f"{status.st_size:,} bytes, expected {count:,} items")

    def _open(self) -> int:
        try:
            return os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)  # a named pipe does not block
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise  # the file may be whole
            raise DamagedShardError(f"cannot read {self.path}: {error.strerror}") from error

    def __len__(self) -> int:
        return self.header.count // self._columns

    @property
    def num_bytes(self) -> int:
        return self.header.count * self.dtype.itemsize

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, slice):
            place = range(len(self))[index]
            return self[place : place + 1][0]
        start, stop, step = index.indices(len(self))
        assert step == 1, f"items are read in order, found the step {step}"
        return self._within_limit(self._read(start, max(start, stop)))

    def gather(self, places: np.ndarray, length: int, *, out: np.ndarray, rows: np.ndarray) -> None:
        """Write the `length` items from each of `places` on to the rows of `out` with the numbers `rows`."""
        order = np.argsort(places, kind="stable")
        places, rows = places[order], rows[order]
        cuts = 1 + np.flatnonzero(np.diff(places // GATHERED_TOGETHER))
        starts, numbers = places.tolist(), rows.tolist()
        for begin, end in pairwise((0, *cuts.tolist(), len(starts))):
            first, last = starts[begin], starts[end - 1]
            items = self._read(first, last + length)
            if end - begin == 1:
                out[numbers[begin]] = items
            else:
                windows = np.lib.stride_tricks.sliding_window_view(items, length)
                out[rows[begin:end]] = windows[places[begin:end] - first]
        self._within_limit(out[rows])

    def load(self) -> np.ndarray:
        """The whole array in memory, verified."""
        array: np.ndarray = self[:]
        self._check(zlib.crc32(array.data))
        return array

    def verify(self, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Read the whole file, or as much of it as is done before `should_stop` is true.

        Raises DamagedShardError if the checksum differs from the header's.
        """
        buffer, checksum = memoryview(bytearray(min(VERIFY_CHUNK, self.num_bytes))), 0
        for start in range(0, self.num_bytes, VERIFY_CHUNK):
            if should_stop():
                return
            chunk = buffer[: self.num_bytes - start]
            self._fill(chunk, HEADER_BYTES + start)
            checksum = zlib.crc32(chunk, checksum)
        self._check(checksum)

    def _check(self, checksum: int) -> None:
        if checksum != self.header.checksum:
            raise self._damaged(f"its checksum is {checksum:08x}, expected {self.header.checksum:08x}")

    def _read(self, start: int, stop: int) -> np.ndarray:
        array = np.empty((stop - start) * self._columns, dtype=self.dtype)
        self._fill(array.view(np.uint8).data, HEADER_BYTES + start * self._columns * self.dtype.itemsize)
        return array if self._columns == 1 else array.reshape(-1, self._columns)

    def _within_limit(self, array: np.ndarray) -> np.ndarray:
        if self._limit is not None and array.size and array.max() >= self._limit:
            raise self._damaged(f"it holds the id {array.max()}, expected ids below {self._limit}")
        return array

    def _fill(self, view: memoryview, offset: int) -> None:
        if self._descriptor is not None:
            self._fill_from(self._descriptor, view, offset)
            return
        descriptor = self._open()
        try:
            if os.pread(descriptor, HEADER_BYTES, 0) != self.header.pack():
                raise damaged(self.path, "it was replaced by another while it was read")
            self._fill_from(descriptor, view, offset)
        finally:
            os.close(descriptor)

    def _fill_from(self, descriptor: int, view: memoryview, offset: int) -> None:
        while view:
            try:
                count = os.preadv(descriptor, [view], offset)
            except OSError as error:
                raise self._damaged(f"cannot read it: {error.strerror}") from error
            if not count:
                size, whole = os.fstat(descriptor).st_size, HEADER_BYTES + self.num_bytes
                raise self._damaged(f"it was cut to {size:,} bytes, expected {whole:,}")
            view, offset = view[count:], offset + count

    def _damaged(self, found: str) -> DamagedShardError:
        """The error; the file is removed, unless it is another by now, so that the text is tokenized again."""
        with contextlib.suppress(OSError):
            status = os.stat(self.path)
            if (status.st_dev, status.st_ino) == self._identity:
                files.unlink(self.path)
        return damaged(self.path, found)


class BackgroundCheck:
    """Verifies token files, each once, in a thread of low priority that stops at the end of this context manager."""

    def __init__(self, files: Sequence[ArrayFile]) -> None:
        self._files = files
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="check of token files", daemon=True)
        self._error: DamagedShardError | None = None

    def raise_if_damaged(self) -> None:
        """Raise the DamagedShardError of the first damaged file, once it is found."""
        if self._error is not None:
            raise self._error

    def __enter__(self) -> BackgroundCheck:
        if self._files:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        if self._files:
            self._thread.join()

    def _run(self) -> None:
        if sys.platform == "linux":  # where a thread has its own priority
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
        try:
            for file in self._files:
                file.verify(lambda: self._stopped.wait(VERIFY_PAUSE))
        except DamagedShardError as error:
            self._error = error
