"""Paths of the data section: file, folder, glob pattern, pipe or standard input, checked before reading."""

from __future__ import annotations

import codecs
import glob
import os
import stat
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tformer.data.sources.files import (
    Spool,
    compression_of,
    open_input,
    require_decompressor,
)
from tformer.data.sources.tables import require_pyarrow
from tformer.errors import InputError

STANDARD_INPUT = "-"
HEAD_BYTES = 8192  # what tells a binary file in a folder


@dataclass(frozen=True)
class Found:
    """Files in a fixed order, or one spooled stream. `notes` tell what a person should know, as files skipped."""

    name: str
    paths: tuple[Path, ...] = ()
    spool: Spool | None = None
    notes: tuple[str, ...] = ()


def locate(path: str, *, is_known: Callable[[Path], bool], known: str) -> Found:
    """What lies behind a path, `-` or a pattern; of a folder, every file with an ending that `is_known`.

    `known` names these endings in the hint. InputError for what cannot be read: a missing or empty file, a folder or
    glob with no text in it, a device, a format whose package is not installed.
    """
    if path == STANDARD_INPUT:
        return _spooled("standard input", sys.stdin.buffer)
    place = Path(os.path.expanduser(path))  # a user that does not exist stays as written
    if place.is_dir():
        return _find_in_folder(place, is_known, known)
    if not place.exists() and glob.has_magic(path):
        matches = sorted(Path(match) for match in glob.glob(str(place), recursive=True) if os.path.isfile(match))
        if not matches:
            raise InputError(f"{path}: no file matches this pattern")
        return Found(path, _checked(matches, path))
    _require_file(place)
    if stat.S_ISFIFO(place.stat().st_mode):
        with open_input(place) as pipe:
            return _spooled(path, pipe)
    return Found(path, _checked([place], path))


def format_ending(path: Path) -> str:
    """The ending that tells the format: `.jsonl` of `a.jsonl.gz`."""
    return (Path(path.stem) if compression_of(path) else path).suffix.lower()


def _require_file(path: Path) -> None:
    try:
        mode = path.stat().st_mode
    except OSError as error:
        hint = None if path.is_absolute() else f"looked in {Path.cwd()}"
        raise InputError(f"{path}: {(error.strerror or str(error)).lower()}", hint=hint) from None
    if not stat.S_ISREG(mode) and not stat.S_ISFIFO(mode):
        raise InputError(f"{path}: expected a file, a folder or a pipe, found a device or socket")


def _spooled(name: str, stream: IO[bytes]) -> Found:
    spool = Spool(stream)
    if spool.size == 0:
        raise InputError(f"{name}: is empty", hint="give a file or a pipe with text in it")
    return Found(name, spool=spool)


def _checked(paths: list[Path], name: str) -> tuple[Path, ...]:
    """Checked before anything long begins: every file opens, needed packages are there, something is not empty."""
    size = 0
    for path in paths:
        require_decompressor(path)
        if format_ending(path) == ".parquet":
            require_pyarrow(path)
        with open_input(path) as file:
            size += os.fstat(file.fileno()).st_size
    if size == 0:
        raise InputError(f"{name}: is empty", hint="give a file with text in it")
    return tuple(paths)


def _find_in_folder(folder: Path, is_known: Callable[[Path], bool], known: str) -> Found:
    """Every file below with a known ending, sorted by path; hidden and binary ones are left out, and counted."""
    paths: list[Path] = []
    skipped: list[Path] = []
    for place, names, files in os.walk(folder):
        names[:] = sorted(name for name in names if not name.startswith("."))
        for name in sorted(files):
            path = Path(place, name)
            if name.startswith(".") or not is_known(path):
                continue
            (paths if _is_readable_text(path) else skipped).append(path)
    if not paths:
        raise InputError(
            f"{folder}: no text in this folder ({len(skipped)} files with a known ending cannot be read as text)",
            hint=f"known endings: {known}; also with .gz or .zst",
        )
    notes = (f"{folder}: skipped {len(skipped)} unreadable or binary files, {skipped[0]} first",) if skipped else ()
    paths.sort(key=lambda path: path.relative_to(folder).as_posix())
    return Found(str(folder), _checked(paths, str(folder)), notes=notes)


def _is_readable_text(path: Path) -> bool:
    """False for what cannot be opened, and for binary content under a text's name: NUL and no UTF-8."""
    try:
        if not path.is_file():
            return False
        with open(path, "rb") as file:
            head = file.read(HEAD_BYTES)
    except OSError:
        return False
    if compression_of(path) is not None or format_ending(path) == ".parquet" or b"\0" not in head:
        return True
    try:
        codecs.utf_8_decode(head, "strict", False)  # not final: the last character may be cut
    except UnicodeDecodeError:
        return False
    return True
