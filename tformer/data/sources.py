"""Where text comes from: files, folders, globs, standard input and built-in text, all read as documents.

A text file is one document, as is a built-in's module or file; of jsonl, csv, tsv and parquet every row is one.
Nothing is held whole: documents come as pieces of at most about a megabyte, and can be read any number of times.
"""

from __future__ import annotations

import codecs
import glob
import hashlib
import os
import stat
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from tformer.data.builtin import DEFAULTS, PREFIX, find_builtin
from tformer.data.files import Spool, compression_of, open_input, require_decompressor
from tformer.data.parts import BuiltinPart, FilePart, Part, SpoolPart, format_ending
from tformer.data.tables import ROW_FORMATS, Column, require_pyarrow
from tformer.data.text import Errors, Piece
from tformer.errors import InputError

STANDARD_INPUT = "-"
HEAD_BYTES = 8192  # what tells a binary file in a folder
TEXT_ENDINGS = frozenset(
    f".{name}"
    for names in (
        ("txt", "text", "md", "markdown", "rst", "org", "adoc", "tex", "log", "html", "htm", "xml"),
        ("py", "pyi", "c", "h", "cc", "cpp", "hpp", "java", "js", "ts", "go", "rs", "rb", "sh", "pl", "lua", "sql"),
        ("css", "yaml", "yml", "toml", "ini", "cfg"),
    )
    for name in names
)


class SourceSpec(Protocol):
    """What is needed of one entry of the recipe's `data.train` or `data.valid`."""

    @property
    def path(self) -> str: ...
    @property
    def weight(self) -> float | None: ...


class Columns(Protocol):
    """What is needed of the recipe's `data.columns`."""

    @property
    def text(self) -> Column: ...


@dataclass(frozen=True)
class TextSource:
    """One entry of the data section, opened. `notes` tell what a person should know: files that were skipped."""

    name: str
    parts: tuple[Part, ...]
    weight: float | None = None  # share of a mixture, as given
    notes: tuple[str, ...] = ()

    def documents(self) -> Iterator[Piece]:
        """Every document's pieces, in a fixed order; InputError at the end when there was nothing but white space."""
        has_text = False
        for part in self.parts:
            for piece in part.documents():
                has_text = has_text or not piece.text.isspace()
                yield piece
        if not has_text:
            raise InputError(f"{self.name}: nothing but white space", hint="give a file with text in it")

    def fingerprint(self) -> str:
        """Changes when the text may have changed: the key of cached tokens, and what a resumed run compares."""
        digest = hashlib.sha256()
        for part in self.parts:
            digest.update(f"{part.fingerprint()}\n".encode())
        return digest.hexdigest()

    def size_bytes(self) -> int | None:
        """Bytes of text to come, for progress; None when compression hides it."""
        sizes = [part.size_bytes() for part in self.parts]
        return None if None in sizes else sum(size for size in sizes if size is not None)


def open_sources(
    specs: Sequence[SourceSpec], *, columns: Columns | None = None, errors: Errors = "strict", builtin_for: str = "lm"
) -> list[TextSource]:
    """One source per entry; without entries, the built-in text of the task `builtin_for`.

    InputError for what cannot be read: a missing or empty file, a folder or glob with no text in it, a device.
    """
    column = columns.text if columns is not None else None
    if not specs:
        return [_open(f"{PREFIX}{DEFAULTS[builtin_for]}", None, column, errors)]
    return [_open(spec.path, spec.weight, column, errors) for spec in specs]


def _open(path: str, weight: float | None, column: Column, errors: Errors) -> TextSource:
    if path.startswith(PREFIX):
        return TextSource(path, (BuiltinPart(find_builtin(path)),), weight)
    if path == STANDARD_INPUT:
        name = "standard input"
        return TextSource(name, (_spool(name, sys.stdin.buffer, errors),), weight)
    place = Path(path).expanduser()
    if place.is_dir():
        return _open_folder(place, weight, column, errors)
    if not place.exists() and glob.has_magic(path):
        matches = sorted(Path(match) for match in glob.glob(str(place), recursive=True) if os.path.isfile(match))
        if not matches:
            raise InputError(f"{path}: no file matches this pattern")
        return TextSource(path, _file_parts(matches, path, column, errors), weight)
    _require_file(place)
    if stat.S_ISFIFO(place.stat().st_mode):
        with open_input(place) as pipe:
            return TextSource(path, (_spool(path, pipe, errors),), weight)
    return TextSource(path, _file_parts([place], path, column, errors), weight)


def _require_file(path: Path) -> None:
    try:
        mode = path.stat().st_mode
    except OSError as error:
        hint = None if path.is_absolute() else f"looked in {Path.cwd()}"
        raise InputError(f"{path}: {(error.strerror or str(error)).lower()}", hint=hint) from None
    if not stat.S_ISREG(mode) and not stat.S_ISFIFO(mode):
        raise InputError(f"{path}: expected a file, a folder or a pipe, found a device or socket")


def _spool(name: str, stream: IO[bytes], errors: Errors) -> SpoolPart:
    spool = Spool(stream)
    if spool.size == 0:
        raise InputError(f"{name}: is empty", hint="give a file or a pipe with text in it")
    return SpoolPart(name, spool, errors)


def _file_parts(paths: Iterable[Path], name: str, column: Column, errors: Errors) -> tuple[Part, ...]:
    """Checked before anything long begins: every file opens, needed packages are there, something is not empty."""
    parts: list[Part] = []
    size = 0
    for path in paths:
        require_decompressor(path)
        if format_ending(path) == ".parquet":
            require_pyarrow(path)
        with open_input(path) as file:
            size += os.fstat(file.fileno()).st_size
        parts.append(FilePart(path, column, errors))
    if size == 0:
        raise InputError(f"{name}: is empty", hint="give a file with text in it")
    return tuple(parts)


def _open_folder(folder: Path, weight: float | None, column: Column, errors: Errors) -> TextSource:
    """Every file below with a known ending, sorted by path; hidden and binary ones are left out, and counted."""
    paths: list[Path] = []
    skipped: list[Path] = []
    for place, names, files in os.walk(folder):
        names[:] = sorted(name for name in names if not name.startswith("."))
        for name in sorted(files):
            path = Path(place, name)
            if name.startswith(".") or not _is_known(path):
                continue
            (paths if _is_readable_text(path) else skipped).append(path)
    if not paths:
        raise InputError(
            f"{folder}: no text in this folder ({len(skipped)} files with a known ending cannot be read as text)",
            hint="known endings: .txt, .md, .py, .jsonl, .csv, .tsv, .parquet and others; also with .gz or .zst",
        )
    notes = (f"{folder}: skipped {len(skipped)} unreadable or binary files, {skipped[0]} first",) if skipped else ()
    paths.sort(key=lambda path: path.relative_to(folder).as_posix())
    return TextSource(str(folder), _file_parts(paths, str(folder), column, errors), weight, notes)


def _is_known(path: Path) -> bool:
    ending = format_ending(path)
    return ending in TEXT_ENDINGS or ending in ROW_FORMATS or ending == ".parquet"


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
