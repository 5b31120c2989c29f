"""Output files: checked before the work begins, and complete when they appear."""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tformer.errors import InputError, Interrupted, cannot_write

Write = Callable[[str], object]


@contextmanager
def open_output(path: Path | None) -> Iterator[Write]:
    """A function that writes text to standard output (None) or to a file.

    The file appears by a rename when the work is done; after an interrupt it holds what was done until then, after an
    error it is what it was before. Raises what `require_writable` does; OSError when the disk refuses later.
    """
    if path is None:
        yield _write_out
        return
    target = require_writable(path)
    if _is_stream(target):
        with target.open("w", encoding="utf-8", newline="") as file:
            yield file.write
        return
    temporary = _temporary(target)
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


def require_writable(path: Path, *, option: str = "--output") -> Path:
    """Try to write a file beside the one that will be `path`, and return that one: a link stays a link.

    Raises InputError for a directory or a place that does not exist, StorageError when the system refuses the file.
    """
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise InputError(f"{option} '{path}' is a directory, expected a file")
    if not target.parent.is_dir():
        raise InputError(f"{option} '{path}': the directory '{target.parent}' does not exist")
    if not _is_stream(target):
        trial = _temporary(target)
        try:
            trial.open("x").close()
            trial.unlink()
        except OSError as error:
            raise cannot_write(path, error) from error
    return target


def _is_stream(target: Path) -> bool:
    """Whether it is a pipe or a device, which cannot be renamed into place."""
    return target.exists() and not target.is_file()


def _temporary(target: Path) -> Path:
    return target.with_name(f".tmp-{target.name}-{os.getpid()}")


def _write_out(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def refuse_to_replace(output: Path | None, inputs: Iterable[str | Path], *, option: str = "--output") -> None:
    """Raise InputError when the file to write is one of those to read, under any name.

    Args:
        output: None: nothing is written.
        inputs: files, folders, patterns, or `-` for standard input, which may come from a file too.
    """
    if output is None or not output.is_file():
        return
    for name in map(str, inputs):
        if _reads(name, output):
            raise InputError(
                f"{option} {output} would replace what is read{'' if name == str(output) else f': {name}'}",
                hint="write to another file",
            )


def _reads(name: str, file: Path) -> bool:
    """Whether the input of this name includes the file."""
    if name == "-":
        with suppress(OSError):  # a standard input that is no file
            return os.path.samestat(os.fstat(sys.stdin.fileno()), file.stat())
        return False
    place = os.path.expanduser(name)
    if os.path.isdir(place):
        return Path(os.path.realpath(file)).is_relative_to(os.path.realpath(place))
    places = [place] if os.path.exists(place) else glob.glob(place, recursive=True)
    return any(os.path.samefile(path, file) for path in places if os.path.exists(path))
