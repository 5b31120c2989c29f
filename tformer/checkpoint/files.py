"""Every touch of the disk that can fail, one small function each.

All writing in this package goes through these names as attributes of this module (`files.write(...)`), so that a test
can fail or kill at the N-th call, and can read back the order of writes, syncs and renames. Nothing here is clever.

Files are created with mode 0666 and folders with 0777, which the umask then narrows: never `tempfile`, whose 0600
stays behind after a rename.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tformer.errors import StorageError, cannot_write

TEMPORARY = ".tmp-"  # prefix of every name that is not finished yet; swept at the next start
WRITE_BYTES = 64 << 20  # Linux writes at most 2 GiB per call

_HINTS = {
    errno.ENOSPC: "free some space, or choose another folder with --out",
    errno.EDQUOT: "the quota is used up: free some space, or choose another folder with --out",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f), or choose another folder with --out",
    errno.EROFS: "the file system is read-only: choose another folder with --out",
    errno.EACCES: "the folder may not be written: choose another with --out",
    errno.EPERM: "the folder may not be written: choose another with --out",
}


def mkdir(path: Path) -> None:
    os.mkdir(path)


def create(path: Path) -> int:
    """A descriptor of a new or emptied file; a symbolic link is refused."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o666)


def open_append(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)


def write(descriptor: int, data: bytes | memoryview) -> None:
    """Writes all of `data`, in one system call whenever the kernel takes it in one."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view[:WRITE_BYTES]) :]


def truncate(descriptor: int, size: int) -> None:
    os.ftruncate(descriptor, size)


def fsync(descriptor: int) -> None:
    os.fsync(descriptor)


def fsync_dir(path: Path) -> None:
    """Makes the names in a folder durable: a rename is not on disk before this."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(source: Path, target: Path) -> None:
    os.rename(source, target)


def unlink(path: Path) -> None:
    os.unlink(path)


def rmdir(path: Path) -> None:
    os.rmdir(path)


def free_bytes(path: Path) -> int:
    """Bytes that an ordinary user may still write to the file system of `path`."""
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def has_free_inode(path: Path) -> bool:
    status = os.statvfs(path)
    return status.f_files == 0 or status.f_favail > 0  # file systems without a fixed number report 0 of 0


@contextmanager
def storage_errors(path: Path, *, bytes_needed: int | None = None) -> Iterator[None]:
    """Turns a refusal by the operating system into a `StorageError` that names the path and the bytes needed."""
    try:
        yield
    except OSError as error:
        raise storage_error(path, error, bytes_needed=bytes_needed) from error


def storage_error(path: Path, error: OSError, *, bytes_needed: int | None = None) -> StorageError:
    return cannot_write(path, error, bytes_needed=bytes_needed, hint=_HINTS.get(error.errno or 0))


def require_space(path: Path, bytes_needed: int) -> None:
    """Raises `StorageError` when the file system of `path` has fewer free bytes than needed, or no free inode."""
    with storage_errors(path, bytes_needed=bytes_needed):
        free = free_bytes(path)
        inodes = has_free_inode(path)
    if free < bytes_needed:
        raise StorageError(
            f"cannot write {path}: {bytes_needed:,} bytes needed, {free:,} free", hint=_HINTS[errno.ENOSPC]
        )
    if not inodes:
        raise StorageError(
            f"cannot write {path}: the file system has no free inode ({bytes_needed:,} bytes needed)",
            hint="remove some files, or choose another folder with --out",
        )
