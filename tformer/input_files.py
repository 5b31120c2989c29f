"""Open files for reading. A named pipe without a writer is refused after a time limit."""

from __future__ import annotations

import io
import os
import stat
import time
from pathlib import Path
from typing import Any

from tformer.errors import InputError

WRITER_SECONDS = 2.0  # how long a named pipe may have no writer


def open_regular(path: Path) -> io.BufferedReader:
    """Open an existing ordinary file for reading; folders, pipes and devices are refused without blocking."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise InputError(f"{path} is not an ordinary file")
        return open(path, "rb")
    except FileNotFoundError:
        raise InputError(f"{path} does not exist") from None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error


def open_stream(path: Path) -> io.BufferedReader:
    """Open a file, device or named pipe for reading.

    Raises:
        OSError: as `open` does.
        InputError: a named pipe that no process writes to.
    """
    if not stat.S_ISFIFO(os.stat(path).st_mode):
        return open(path, "rb")
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    deadline = time.monotonic() + WRITER_SECONDS
    first = b""
    while not first:
        try:
            first = os.read(descriptor, 1)  # b"": no writer; it blocks when there is one that has not written yet
        except BlockingIOError:
            break
        if not first and time.monotonic() > deadline:
            os.close(descriptor)
            raise InputError(
                f"{path} is a named pipe that no process writes to (waited {WRITER_SECONDS:g} s)",
                hint="start the writer first, or give a file, or - for standard input",
            )
        time.sleep(0 if first else 0.02)
    os.set_blocking(descriptor, True)
    return io.BufferedReader(_Pipe(descriptor, first))


class _Pipe(io.RawIOBase):
    """A pipe of which one byte may have been read already."""

    def __init__(self, descriptor: int, first: bytes) -> None:
        self._file = open(descriptor, "rb", buffering=0)  # noqa: SIM115 (closed by `close`)
        self._first = first

    def readable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._file.fileno()

    def readinto(self, buffer: Any) -> int | None:
        if not self._first:
            return self._file.readinto(buffer)
        buffer[0:1], self._first = self._first, b""
        return 1

    def close(self) -> None:
        self._file.close()
        super().close()
