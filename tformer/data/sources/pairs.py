"""Sources of pairs of texts: two aligned files, csv, tsv, jsonl, Parquet and built-in pairs, row by row.

Line N of one aligned file belongs to line N of the other, also if it is empty.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from tformer.data.sources.builtin import DEFAULTS, PREFIX, find_builtin
from tformer.data.sources.columns import SOURCES, TARGETS, Column, PairLayout
from tformer.data.sources.files import Content, Source, SourceFields, expanded, format_ending, locate, split_lines
from tformer.data.sources.reading import Reading
from tformer.data.sources.tables import FORMATS, IN_FOLDERS, PairRow, Table, guessed_columns, open_tables
from tformer.support.errors import InputError


def with_prefix(prefix: str, source: str) -> str:
    """The source behind the prefix of its task; unchanged if it is blank or begins with the prefix."""
    blank = not source or source.isspace()
    return source if blank or source.startswith(prefix) else prefix + source


@dataclass(frozen=True, kw_only=True)
class PairSource(Source):
    """An opened source of pairs.

    Attributes:
        prefix: put before every source text by `with_prefix`.
        task: its name; "" if it has none.
        columns: (source, target) of every table, as a user can name them.
    """

    prefix: str = ""
    task: str = ""
    columns: frozenset[tuple[Column, Column]] = frozenset()

    def rows(self) -> Iterator[PairRow]:
        """Every row in order. Raises InputError with file and line of a wrong row."""
        for row in self._items("rows"):
            source = with_prefix(self.prefix, row.source)
            yield PairRow(source, row.target, row.place, self.task, number=row.number, id=row.id)

    def _settings(self) -> str:
        return repr((self.prefix, self.task))


class PairTable(Table):
    """A table read as pairs."""

    def row(self, values: list[str], **facts: Any) -> PairRow:
        source, target = values
        return PairRow(source, target, **facts)

    def description(self) -> str:
        """The description, with flags to swap columns if their order decided."""
        source, target = (self.column(role) for role in self.layout.roles)
        if not self.guessed or str(source).lower() in SOURCES or str(target).lower() in TARGETS:
            return super().description()
        swap = f"--source-column {target} --target-column {source}"
        return f"{super().description()}, by their order; {swap} swaps them"

    def columns_key(self) -> str:
        return ":".join(str(self.columns[role]) for role in self.layout.roles)


@dataclass(frozen=True)
class AlignedFiles:
    """Two files with the same number of lines."""

    source: Content
    target: Content

    def rows(self) -> Iterator[PairRow]:
        for number, (source, target) in enumerate(zip_longest(_lines(self.source), _lines(self.target)), 1):
            if source is None or target is None:
                self.require_same_lines()
                raise InputError(f"{self.source.name}: has changed while it was read")
            yield PairRow(source, target, f"{self.source.name}:{number}", number=number - 1)

    def require_same_lines(self) -> None:
        """Raise InputError with both counts if the files differ in length."""
        sources, targets = (sum(1 for _ in _lines(side)) for side in (self.source, self.target))
        if sources != targets:
            raise InputError(
                f"{self.source.name} has {sources:,} line{'' if sources == 1 else 's'}, {self.target.name} {targets:,}",
                hint="line N of one file belongs to line N of the other, so both need the same number of lines",
            )

    def fingerprint(self) -> str:
        return "aligned:" + ":".join(f"{side.decoding}:{side.fingerprint()}" for side in (self.source, self.target))

    @property
    def contents(self) -> tuple[Content, ...]:
        return self.source, self.target


def open_pairs(
    specs: Sequence[SourceFields], *, columns: object = None, preferred: object = None, reading: Reading = Reading()
) -> list[PairSource]:
    """One source per entry; without entries, the built-in pairs.

    Args:
        columns: attributes source and target: names, numbers from 0, or several joined by commas; None (each): guessed.
        preferred: the columns of other data, likewise: tried before guessing, in tables that have them.

    Raises InputError: what cannot be read, aligned files of different length, no rows, a column that is missing or
    ambiguous.
    """
    if not specs:
        return [PairSource(name=DEFAULTS["pairs"], parts=(find_builtin(DEFAULTS["pairs"]),))]
    return [_open(spec, columns, preferred, reading) for spec in specs]


def shared_columns(sources: Sequence[PairSource]) -> tuple[Column, Column] | None:
    """(source, target) if all tables of all sources have the same columns; else None, also without a table."""
    found = frozenset[tuple[Column, Column]]().union(*(source.columns for source in sources))
    return next(iter(found)) if len(found) == 1 else None


def _open(spec: SourceFields, columns: object, preferred: object, reading: Reading) -> PairSource:
    given: dict[str, Any] = {"prefix": spec.prefix, "task": spec.task or "", "weight": spec.weight}
    if spec.target_path is not None:
        aligned = AlignedFiles(_open_side(spec.path, reading), _open_side(spec.target_path, reading))
        aligned.require_same_lines()
        return PairSource(name=aligned.source.name, parts=(aligned,), **given)
    if spec.path.startswith(PREFIX):
        return PairSource(name=spec.path, parts=(find_builtin(spec.path, holds="pairs"),), **given)
    found = locate(spec.path, is_known=lambda path: format_ending(path) in IN_FOLDERS, known=", ".join(IN_FOLDERS))
    tables = open_tables(PairTable, found, PairLayout(), reading=reading, columns=columns, preferred=preferred)
    notes = (*found.notes, *guessed_columns(tables))
    named = frozenset((table.column("source"), table.column("target")) for table in tables)
    return PairSource(name=found.name, parts=tuple(tables), notes=notes, columns=named, **given)


def _open_side(path: str, reading: Reading) -> Content:
    """A file of sentences. Raises InputError for anything but one file of plain text."""
    if path.startswith(PREFIX) or format_ending(Path(path)) in FORMATS:
        raise InputError(f"{path}: holds both sides of pairs", hint="leave --target (target_path) out")
    if expanded(path).is_dir():
        raise InputError(f"{path}: expected a file with one side of the pairs, found a folder")
    contents = locate(path, is_known=lambda place: False, known="plain text").contents(reading)
    if len(contents) != 1:
        raise InputError(f"{path}: expected one file, found {len(contents)}", hint="give each as a separate source")
    return contents[0]


def _lines(content: Content) -> Iterator[str]:
    for line in split_lines(content.texts(), name=content.name):
        yield line.removesuffix("\n")
