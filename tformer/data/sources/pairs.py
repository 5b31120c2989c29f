"""Sources of pairs of texts: aligned files, tables and built-in pairs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Protocol

from tformer.data.sources.builtin import (
    DEFAULTS,
    PREFIX,
    find_pair_builtin,
)
from tformer.data.sources.files import (
    Errors,
    split_lines,
)
from tformer.data.sources.labelled_tables import (
    KINDS,
    Raw,
)
from tformer.data.sources.locate import (
    format_ending,
    locate,
)
from tformer.data.sources.pair_columns import Columns
from tformer.data.sources.pair_tables import (
    PairRow,
    PairTable,
    open_pair_table,
)
from tformer.data.sources.tables import Column
from tformer.errors import InputError


def with_prefix(prefix: str, source: str) -> str:
    """The source behind its prefix. A blank source stays as it is, and so does one that begins with the prefix."""
    blank = not source or source.isspace()
    return source if blank or source.startswith(prefix) else prefix + source


__all__ = ["PairRow", "PairSource", "PairSpec", "open_pairs", "shared_columns"]


class PairSpec(Protocol):
    """What is needed of one entry of the recipe's `data.train` or `data.valid`."""

    @property
    def path(self) -> str: ...
    @property
    def target_path(self) -> str | None: ...
    @property
    def prefix(self) -> str: ...
    @property
    def task(self) -> str | None: ...
    @property
    def weight(self) -> float | None: ...


class Part(Protocol):
    """One table of a source, two aligned files, or a built-in."""

    def rows(self) -> Iterator[PairRow]: ...
    def fingerprint(self) -> str: ...
    def size_bytes(self) -> int | None: ...


@dataclass(frozen=True)
class PairSource:
    """One entry of the data section, opened.

    Attributes:
        prefix: stands before every source text, as `task_prefix` puts it there.
        task: its name, "" where none was given.
        weight: its share of a mixture, as given.
        notes: what a person should know: columns that were guessed, files that were skipped.
        columns: (source, target) as they are asked for, of every table; empty where there are no columns.
    """

    name: str
    parts: tuple[Part, ...]
    prefix: str = ""
    task: str = ""
    weight: float | None = None
    notes: tuple[str, ...] = ()
    columns: frozenset[tuple[Column, Column]] = frozenset()

    def rows(self) -> Iterator[PairRow]:
        """Every row in order, any number of times; InputError names file and line of a row that is wrong."""
        for part in self.parts:
            for row in part.rows():
                yield PairRow(with_prefix(self.prefix, row.source), row.target, row.place, self.task)

    def fingerprint(self) -> str:
        """Changes when the rows may have changed."""
        digest = hashlib.sha256(repr((self.prefix, self.task)).encode())
        for part in self.parts:
            digest.update(f"{part.fingerprint()}\n".encode())
        return digest.hexdigest()

    def size_bytes(self) -> int | None:
        """Bytes to be read, for progress; None when compression hides them."""
        sizes = [part.size_bytes() for part in self.parts]
        return None if None in sizes else sum(size for size in sizes if size is not None)


@dataclass(frozen=True)
class AlignedFiles:
    """Two files of as many lines."""

    source: Raw
    target: Raw

    def rows(self) -> Iterator[PairRow]:
        for number, (source, target) in enumerate(zip_longest(_lines(self.source), _lines(self.target)), 1):
            if source is None or target is None:
                self.require_same_lines()
                raise InputError(f"{self.source.name}: has changed while it was read")
            yield PairRow(source, target, f"{self.source.name}:{number}")

    def require_same_lines(self) -> None:
        """InputError with both counts when the files differ in length."""
        ours, theirs = (sum(1 for _ in _lines(side)) for side in (self.source, self.target))
        if ours != theirs:
            raise InputError(
                f"{self.source.name} has {_counted(ours)}, {self.target.name} {theirs:,}",
                hint="line N of one file belongs to line N of the other, so both need the same number of lines",
            )

    def fingerprint(self) -> str:
        sides = (self.source, self.target)
        return "aligned:" + ":".join(f"{side.errors}:{side.fingerprint()}" for side in sides)

    def size_bytes(self) -> int | None:
        source, target = self.source.size_bytes(), self.target.size_bytes()
        return None if source is None or target is None else source + target


def open_pairs(
    specs: Sequence[PairSpec],
    *,
    columns: Columns | None = None,
    preferred: Columns | None = None,
    errors: Errors = "strict",
) -> list[PairSource]:
    """One source per entry; without entries, the built-in pairs.

    Args:
        columns: of tables: names, numbers from 0, or several joined by commas; None (each): guessed.
        preferred: what is guessed first, in the tables that have it: the columns of other data.

    Raises InputError: what cannot be read, aligned files of different length, no rows, a column that is missing or
    cannot be told.
    """
    if not specs:
        name = f"{PREFIX}{DEFAULTS['pairs']}"
        return [PairSource(name, (find_pair_builtin(name),))]
    return [_open(spec, columns, preferred, errors) for spec in specs]


def shared_columns(sources: Sequence[PairSource]) -> tuple[Column, Column] | None:
    """(source, target) where all tables of all sources have the same ones; None: they differ, or there are none."""
    found = frozenset[tuple[Column, Column]]().union(*(source.columns for source in sources))
    return next(iter(found)) if len(found) == 1 else None


def _open(spec: PairSpec, columns: Columns | None, preferred: Columns | None, errors: Errors) -> PairSource:
    if spec.target_path is not None:
        aligned = AlignedFiles(_one_side(spec.path, errors), _one_side(spec.target_path, errors))
        aligned.require_same_lines()
        return PairSource(aligned.source.name, (aligned,), spec.prefix, spec.task or "", spec.weight)
    if spec.path.startswith(PREFIX):
        return PairSource(spec.path, (find_pair_builtin(spec.path),), spec.prefix, spec.task or "", spec.weight)
    found = locate(spec.path, is_known=lambda place: format_ending(place) in KINDS, known=", ".join(KINDS))
    if found.spool is not None:
        raws = [Raw(found.name, None, found.spool, errors)]
    else:
        raws = [Raw(str(place), place, None, errors) for place in found.paths if place.stat().st_size]
    tables = [open_pair_table(raw, columns=columns, preferred=preferred) for raw in raws]
    return PairSource(
        found.name,
        tuple(tables),
        spec.prefix,
        spec.task or "",
        spec.weight,
        notes=(*found.notes, *_guesses(tables)),
        columns=frozenset((table.column("source"), table.column("target")) for table in tables),
    )


def _one_side(path: str, errors: Errors) -> Raw:
    """A file of sentences. InputError for what is no single file of plain text."""
    if path.startswith(PREFIX) or format_ending(Path(path)) in KINDS:
        raise InputError(f"{path}: holds both sides of pairs", hint="leave target_path out")
    if Path(path).expanduser().is_dir():
        raise InputError(f"{path}: expected a file with one side of the pairs, found a folder")
    found = locate(path, is_known=lambda place: False, known="plain text")
    if found.spool is not None:
        return Raw(found.name, None, found.spool, errors)
    if len(found.paths) != 1:
        raise InputError(
            f"{path}: expected one file, found {len(found.paths)}", hint="give each as a source of its own"
        )
    return Raw(str(found.paths[0]), found.paths[0], None, errors)


def _lines(raw: Raw) -> Iterator[str]:
    for line in split_lines(raw.texts(), name=raw.name):
        yield line.removesuffix("\n")


def _counted(lines: int) -> str:
    return f"{lines:,} line" if lines == 1 else f"{lines:,} lines"


def _guesses(tables: list[PairTable]) -> tuple[str, ...]:
    """One note per way of guessing, with the first file that it was used for."""
    notes: dict[str, str] = {}
    for table in tables:
        if table.roles.guessed or table.names is None:  # a row of names may have been read as data
            notes.setdefault(table.description(), Path(table.raw.name).name)
    return tuple(f"{name}: {description}" for description, name in notes.items())
