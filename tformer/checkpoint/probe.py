"""Can something be written there? Asked before work begins, by writing, for permissions alone do not tell."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from tformer.checkpoint import files
from tformer.errors import InputError


def require_writable(target: Path) -> None:
    """Create and remove a temporary file in `target`, or in the nearest folder above it that exists.

    Raises:
        StorageError: read-only, full, or not ours to write to.
        InputError: a file stands where a folder would have to be.
    """
    folder = _nearest(target)
    if not folder.is_dir():
        raise InputError(f"{folder} is a file, expected a folder")
    probe = folder / f"{files.TEMPORARY}probe-{os.getpid()}"
    with files.storage_errors(target):
        try:
            descriptor = files.create(probe)
            try:
                files.write(descriptor, b"probe")
                files.fsync(descriptor)
            finally:
                os.close(descriptor)
        finally:
            with contextlib.suppress(OSError):
                files.unlink(probe)


def require_room(target: Path, bytes_needed: int) -> None:
    """Raise `StorageError` unless the file system that `target` is, or will be, on has so many bytes free."""
    files.require_space(_nearest(target), bytes_needed)


def _nearest(target: Path) -> Path:
    """The target itself, or the nearest folder above it that exists."""
    folder = target.absolute()
    while not os.path.lexists(folder):
        folder = folder.parent
    return folder
