"""Where generated text goes: standard output at once, or a file that appears whole."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tformer.errors import InputError, Interrupted

Write = Callable[[str], object]


@contextmanager
def open_output(path: Path | None) -> Iterator[Write]:
    """A function that writes text to standard output (None) or to a file.

    The file appears by a rename when the work is done; after an interrupt it holds what was done until then, after an
    error it is what it was before. It may be the file that the prompts are read from.
    Raises InputError for a directory or a place that does not exist; OSError when the disk refuses.
    """
    if path is None:
        yield _write_out
        return
    target = Path(os.path.realpath(path))  # a link stays a link
    if target.is_dir():
        raise InputError(f"--output '{path}' is a directory, expected a file")
    if not target.parent.is_dir():
        raise InputError(f"--output '{path}': the directory '{target.parent}' does not exist")
    if target.exists() and not target.is_file():  # a pipe or a device cannot be renamed into place
        with target.open("w", encoding="utf-8", newline="") as file:
            yield file.write
        return
    temporary = target.with_name(f".tmp-{target.name}-{os.getpid()}")
    try:
        with temporary.open("x", encoding="utf-8", newline="") as file:
            try:
                yield file.write
            except Interrupted:
                file.close()
                temporary.replace(target)
                raise
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def _write_out(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
