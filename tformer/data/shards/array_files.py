"""Token files opened for reading, and the check of their bytes while a training reads them.

Arrays are read with `pread`, not memory-mapped: a file that is cut under a running training gives an error, where a
mapping would end the process with SIGBUS. A file that is replaced by a rename is read on as it was.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import threading
import weakref
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from tformer.data.shards.token_files import HEADER_BYTES, DamagedShardError, ShardHeader, damaged

VERIFY_BYTES = 64 << 20  # ids up to this size are verified when they are opened, more of them in the background
VERIFY_CHUNK = 4 << 20  # bytes read at once
VERIFY_PAUSE = 0.02  # seconds between two chunks of a check in the background: at most 200 MB/s
WATCH_SECONDS = 10.0  # how often a checked file is looked at for changes
LOWEST_PRIORITY = 19


class ArrayFile:
    """The array of a token file, int [n] or [n, columns]; an index or a slice reads its items from the file.

    Args:
        limit: every item is less, as ids are than the size of the vocabulary; None: any.

    Raises DamagedShardError, also when it is read, for a file that is missing, cut, changed or of another tokenizer.
    """

    def __init__(
        self, path: Path, dtype: np.dtype[Any], *, tokenizer: bytes, columns: int = 1, limit: int | None = None
    ) -> None:
        self.path, self.dtype, self._columns, self._limit = path, dtype, columns, limit
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a named pipe does not block
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise  # the file may be whole
            raise DamagedShardError(f"cannot read {path}: {error.strerror}") from error
        self._close = weakref.finalize(self, os.close, self._descriptor)
        try:
            size, header = os.fstat(self._descriptor).st_size, os.pread(self._descriptor, HEADER_BYTES, 0)
        except OSError as error:
            raise DamagedShardError(f"cannot read {path}: {error.strerror}") from error
        self.header = ShardHeader.unpack(header, name=str(path))
        count = self.header.count
        if self.header.tokenizer != tokenizer or self.header.item_bytes != dtype.itemsize:
            raise damaged(path, "it was written for another tokenizer")
        if count < 1 or count % columns or size != HEADER_BYTES + count * dtype.itemsize:
            raise damaged(path, f"{size:,} bytes, expected {count:,} items")
        self._verified: tuple[int, int] | None = None

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
        array = np.empty(max(0, stop - start) * self._columns, dtype=self.dtype)
        self._fill(array.view(np.uint8).data, HEADER_BYTES + start * self._columns * self.dtype.itemsize)
        if self._limit is not None and len(array) and array.max() >= self._limit:
            raise self._damaged(f"it holds the id {array.max()}, expected ids below {self._limit}")
        return array if self._columns == 1 else array.reshape(-1, self._columns)

    def verify(self, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Read the whole file, once for each state that it has; it does nothing more once `should_stop` is true.

        Raises DamagedShardError if the checksum differs from the header's.
        """
        state = self._state()
        if state == self._verified:
            return
        buffer, checksum = memoryview(bytearray(min(VERIFY_CHUNK, self.num_bytes))), 0
        for start in range(0, self.num_bytes, VERIFY_CHUNK):
            chunk = buffer[: self.num_bytes - start]
            self._fill(chunk, HEADER_BYTES + start)
            checksum = zlib.crc32(chunk, checksum)
            if should_stop():
                return
        if checksum != self.header.checksum:
            raise self._damaged(f"its checksum is {checksum:08x}, expected {self.header.checksum:08x}")
        self._verified = state

    def _fill(self, view: memoryview, offset: int) -> None:
        while view:
            try:
                count = os.preadv(self._descriptor, [view], offset)
            except OSError as error:
                raise self._damaged(f"cannot read it: {error.strerror}") from error
            if not count:
                size, whole = self._state()[0], HEADER_BYTES + self.num_bytes
                raise self._damaged(f"it was cut to {size:,} bytes, expected {whole:,}")
            view, offset = view[count:], offset + count

    def _state(self) -> tuple[int, int]:
        status = os.fstat(self._descriptor)
        return status.st_size, status.st_mtime_ns

    def _damaged(self, found: str) -> DamagedShardError:
        """The error; the file is removed, unless it is another by now, so that the text is tokenised again."""
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(self._descriptor), os.stat(self.path)):
                self.path.unlink()
        return damaged(self.path, found)


class BackgroundCheck:
    """Verifies token files in a thread of low priority; a context manager.

    Files that were not verified when they were opened are read once; a file whose size or time of change differs later
    is read again.
    """

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
        if sys.platform == "linux":  # where a thread has a priority of its own
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
        try:
            while not self._stopped.is_set():
                for file in self._files:
                    file.verify(lambda: self._stopped.wait(VERIFY_PAUSE))
                self._stopped.wait(WATCH_SECONDS)
        except DamagedShardError as error:
            self._error = error
