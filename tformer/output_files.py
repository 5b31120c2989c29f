"""Output files: checked before the work begins, and complete when they appear."""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tformer import files
from tformer.errors import InputError, Interrupted

Write = Callable[[str], object]
BUFFER_BYTES = 1 << 16


@contextmanager
def open_output(path: Path | None) -> Iterator[Write]:
    """A function that writes text to standard output (None) or to a file.

    The file appears, synced, by a rename when the work is done; after an interrupt it holds what was done until then,
    after an error it is what it was before. Raises what `require_writable` does; StorageError when the disk refuses.
    """
    if path is None:
        yield _write_out
        return
    target = require_writable(path)
    if files.is_stream(target):
        with files.open_sink(target) as stream:
            yield lambda text: stream.write(text.encode("utf-8"))
        return
    output = _OutputFile(path, target)
    try:
        try:
            yield output.write
        except Interrupted:
            output.publish()
            raise
        output.publish()
    finally:
        output.discard()


class _OutputFile:
    """Text for a file, buffered and written under a temporary name until `publish`. Errors: StorageError."""

    def __init__(self, path: Path, target: Path) -> None:
        self._path, self._target = path, target
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._published = False
        with files.storage_errors(path):
            self._temporary = files.temporary_beside(target)
            self._descriptor = files.create(self._temporary)

    def write(self, text: str) -> None:
        self._pending.append(files.encode_text(text))
        self._pending_bytes += len(self._pending[-1])
        if self._pending_bytes >= BUFFER_BYTES:
            self._flush()

    def _flush(self) -> None:
        data = b"".join(self._pending)
        self._pending, self._pending_bytes = [], 0
        with files.storage_errors(self._path, bytes_needed=len(data)):
            files.write(self._descriptor, data)

    def publish(self) -> None:
        """Sync the file and give it its name."""
        self._flush()
        with files.storage_errors(self._path):
            files.fsync(self._descriptor)
            files.rename(self._temporary, self._target)
            self._published = True
            files.fsync_dir(self._target.parent)

    def discard(self) -> None:
        """Close the file, and remove what was not published."""
        os.close(self._descriptor)
        if not self._published:
            with suppress(OSError):
                files.unlink(self._temporary)


def require_writable(path: Path, *, option: str = "--output") -> Path:
    """Try to write a file beside the one that will be `path`, and return that one: a link stays a link.

    Raises InputError for a directory or a place that does not exist, StorageError when the system refuses the file.
    """
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise InputError(f"{option} '{path}' is a directory, expected a file")
    if not target.parent.is_dir():
        raise InputError(f"{option} '{path}': the directory '{target.parent}' does not exist")
    if not files.is_stream(target):
        with files.storage_errors(path):
            trial = files.temporary_beside(target)
            os.close(files.create(trial))
            files.unlink(trial)
    return target


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
