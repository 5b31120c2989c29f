"""Whole or not at all: files and folders that appear by one rename, and folders that vanish in a safe order."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Callable, Iterable
from pathlib import Path

from tformer.checkpoint import files

MANIFEST = "manifest.json"
OLD = ".old-"  # prefix of a folder while another takes its place


def write_durably(path: Path, chunks: Iterable[bytes | memoryview]) -> tuple[int, str]:
    """Writes and fsyncs one new file; returns its size and SHA-256. The name itself is durable after `fsync_dir`."""
    size, digest = 0, hashlib.sha256()
    descriptor = files.create(path)
    try:
        for chunk in chunks:
            files.write(descriptor, chunk)
            digest.update(chunk)
            size += len(chunk)
        files.fsync(descriptor)
    finally:
        os.close(descriptor)
    return size, digest.hexdigest()


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Replaces a file by rename; a symbolic link is followed once, so that the link stays a link.

    A pipe or a device, such as /dev/null, is written to and never replaced.

    Raises:
        StorageError: the disk refuses; the old file is untouched and the temporary is gone.
    """
    target = Path(os.path.realpath(path))
    temporary = target.with_name(files.TEMPORARY + target.name)
    with files.storage_errors(path):
        if target.exists() and not target.is_file() and not target.is_dir():
            with open(target, "wb") as stream:
                stream.writelines(chunks)
            return
        try:
            write_durably(temporary, chunks)
            files.rename(temporary, target)
        except BaseException:
            with contextlib.suppress(OSError):
                files.unlink(temporary)
            raise
        files.fsync_dir(target.parent)


def write_text(path: Path, text: str) -> None:
    write_file(path, [text.encode("utf-8")])


def publish_directory(target: Path, fill: Callable[[Path], None]) -> None:
    """Makes the folder `target` appear complete: filled under a temporary name, synced, renamed, synced.

    `fill` writes durable files into the folder it is given. A folder that already stands at `target` is moved to
    `.old-<name>` for the moment between two renames, from where a scan still finds it.
    Operating system errors pass through; the temporary is removed and the old folder is back in place.
    """
    temporary = target.with_name(files.TEMPORARY + target.name)
    old = target.with_name(OLD + target.name)
    settle_replaced(target)
    remove_tree(temporary)
    try:
        files.mkdir(temporary)
        fill(temporary)
        files.fsync_dir(temporary)
        if os.path.lexists(target):
            files.rename(target, old)
        files.rename(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            if os.path.lexists(old) and not os.path.lexists(target):
                files.rename(old, target)
        with contextlib.suppress(OSError):
            remove_tree(temporary)
        raise
    files.fsync_dir(target.parent)
    remove_tree(old)


def settle_replaced(target: Path) -> None:
    """Finishes a replacement that was cut short: the old folder goes if the new one is in place, else comes back."""
    old = target.with_name(OLD + target.name)
    if not os.path.lexists(old):
        return
    if os.path.lexists(target):
        remove_tree(old)
    else:
        files.rename(old, target)
        files.fsync_dir(target.parent)


def remove_tree(path: Path) -> None:
    """Removes a file or folder if it is there; links are unlinked, never followed; a manifest goes first.

    Without its manifest a checkpoint does not exist, so a removal cut short leaves no half checkpoint behind.
    """
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(mode):
        files.unlink(path)
        return
    manifest = path / MANIFEST
    if os.path.lexists(manifest):
        files.unlink(manifest)
        files.fsync_dir(path)  # on disk before any other file goes
    for name in sorted(os.listdir(path)):
        remove_tree(path / name)
    files.rmdir(path)
