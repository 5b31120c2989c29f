"""One writer per run directory: an advisory lock that dies with its process, and the PID to name it by."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from tformer.checkpoint import files
from tformer.errors import RunInUseError

LOCK_NAME = ".lock"


class RunLock:
    """Holds `<run>/.lock` from construction until `release`; the kernel releases it for a killed process.

    Raises:
        RunInUseError: another process holds it; the message names its PID.
        StorageError: the file cannot be made.
    """

    def __init__(self, run: Path) -> None:
        path = run / LOCK_NAME
        with files.storage_errors(path):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        except BlockingIOError:
            pid = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
            os.close(descriptor)
            raise RunInUseError(
                f"{run} is in use by process {pid or '(unknown)'}",
                hint="wait until it has finished, stop it, or choose another folder with --out",
            ) from None
        except OSError as error:
            os.close(descriptor)
            raise files.storage_error(path, error) from error
        self._descriptor: int | None = descriptor

    def release(self) -> None:
        """The file stays: removing it would let two processes lock two different files of one name."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def is_locked(run: Path) -> bool:
    """Whether a process writes to the run at this moment. Looks for an instant, and leaves no file behind."""
    try:
        descriptor = os.open(run / LOCK_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
