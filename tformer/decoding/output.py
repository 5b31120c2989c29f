"""Where generated text is written, and its form: one line per text, or JSON."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tformer.decoding.settings import Generated
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


def as_document(index: int, prompt: str, completions: list[Generated]) -> dict[str, Any]:
    """The JSON of one prompt. `text`, `logprobs` and `finish_reason` are those of the first completion."""
    first = completions[0]
    return {
        "index": index,
        "prompt": prompt,
        "text": first.text,
        "finish_reason": first.finish_reason,
        "logprobs": _listed(first.logprobs),
        "completions": [
            {
                "text": completion.text,
                "ids": list(completion.ids),
                "finish_reason": completion.finish_reason,
                "logprobs": _listed(completion.logprobs),
            }
            for completion in completions
        ],
    }


def _listed(values: tuple[float, ...] | None) -> list[float] | None:
    return None if values is None else list(values)
