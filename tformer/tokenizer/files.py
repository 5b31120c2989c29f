"""A tokenizer's file: written so that it exists whole or not at all, and known by its hash."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from tformer.errors import cannot_write


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
        hint = "choose a folder that can be written and has room"
        raise cannot_write(path, error, bytes_needed=len(content), hint=hint) from error


def canonical_sha256(tokenizer_json: str) -> str:
    """The hash of a tokenizer's JSON whatever its layout (keys sorted, no spaces). Raises ValueError for no JSON."""
    try:
        value = json.loads(tokenizer_json)
    except ValueError as error:
        raise ValueError(f"the tokenizer is not JSON: {error}") from None
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("utf-8")).hexdigest()
