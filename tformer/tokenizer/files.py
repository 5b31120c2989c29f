"""Writing a small file so that it exists whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from tformer.errors import StorageError


def write_atomically(path: Path, content: bytes) -> None:
    """Temp file beside the target, fsync, rename, fsync of the folder. A symbolic link is followed once, kept after.

    Raises StorageError, with nothing changed on disk, when the file system refuses.
    """
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(temporary, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise StorageError(
            f"cannot write {path}: {error.strerror or error} ({len(content)} bytes needed)",
            hint="choose a folder that can be written and has room",
        ) from error
