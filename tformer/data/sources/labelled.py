"""Sources of labelled texts and pairs of texts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tformer.data.sources.builtin import (
    DEFAULTS,
    PREFIX,
    find_labelled_builtin,
)
from tformer.data.sources.files import Errors
from tformer.data.sources.labelled_columns import Columns
from tformer.data.sources.labelled_tables import (
    KINDS,
    LabelledRow,
    Raw,
    Table,
    open_table,
)
from tformer.data.sources.labels import LabelRule
from tformer.data.sources.locate import (
    format_ending,
    locate,
)
from tformer.data.sources.tables import Column
from tformer.data.sources.text import SourceSpec
from tformer.errors import InputError

__all__ = ["LabelledRow", "LabelledSource", "open_labelled"]


class Part(Protocol):
    """One table of a source, or a built-in."""

    def rows(self) -> Iterator[LabelledRow]: ...
    def fingerprint(self) -> str: ...
    def size_bytes(self) -> int | None: ...


@dataclass(frozen=True)
class LabelledSource:
    """One entry of the data section, opened.

    Attributes:
        notes: what a person should know: columns that were guessed, files that were skipped.
        has_text2, has_label: whether rows have a second text, and a label.
        text_column, text2_column, label_column: as they are called in the (first) file, None where there are none.
    """

    name: str
    parts: tuple[Part, ...]
    has_text2: bool
    has_label: bool
    notes: tuple[str, ...] = ()
    text_column: Column = None
    text2_column: Column = None
    label_column: Column = None

    def rows(self) -> Iterator[LabelledRow]:
        """Every row in order, any number of times; InputError names file and line of a row that is wrong."""
        for part in self.parts:
            yield from part.rows()

    def fingerprint(self) -> str:
        """Changes when the rows may have changed."""
        digest = hashlib.sha256()
        for part in self.parts:
            digest.update(f"{part.fingerprint()}\n".encode())
        return digest.hexdigest()

    def size_bytes(self) -> int | None:
        """Bytes to be read, for progress; None when compression hides them."""
        sizes = [part.size_bytes() for part in self.parts]
        return None if None in sizes else sum(size for size in sizes if size is not None)


def open_labelled(
    specs: Sequence[SourceSpec],
    *,
    columns: Columns | None = None,
    errors: Errors = "strict",
    needs_label: bool = True,
    numeric_label: bool = False,
    multi_label: bool = False,
    separator: str = "|",
) -> list[LabelledSource]:
    """One source per entry; without entries, the built-in labelled text.

    Args:
        columns: names, or numbers from 0; None (each): guessed.
        needs_label: False: rows may have no label, and plain text will do.
        numeric_label: labels are scores, finite numbers.
        multi_label: labels may be lists (in jsonl and Parquet), joined by `separator`, and empty.

    Raises InputError: what cannot be read, no rows, a column that is missing or cannot be told, sources of which only
    some have two texts a row, weights (rows are not mixed).
    """
    rule = LabelRule(needed=needs_label, numeric=numeric_label, multi=multi_label, separator=separator)
    if len(specs) > 1 and any(spec.weight is not None for spec in specs):
        raise InputError("data.train: labelled sources have no weights: every row is read once in an epoch")
    paths = [spec.path for spec in specs] or [f"{PREFIX}{DEFAULTS['classification']}"]
    sources = [_open(path, columns, errors, rule) for path in paths]
    _require_same_texts([(source.name, source.has_text2) for source in sources])
    return sources


def _open(path: str, columns: Columns | None, errors: Errors, rule: LabelRule) -> LabelledSource:
    if path.startswith(PREFIX):
        builtin = find_labelled_builtin(path)
        if rule.numeric:
            raise InputError(f"{path}: has classes, no scores", hint="give a file with a column of numbers")
        return LabelledSource(path, (builtin,), has_text2=False, has_label=True)
    endings = {*KINDS} if rule.needed else {*KINDS, ".txt"}
    found = locate(path, is_known=lambda place: format_ending(place) in endings, known=", ".join(sorted(endings)))
    if found.spool is not None:
        raws = [Raw(found.name, None, found.spool, errors)]
    else:
        raws = [Raw(str(place), place, None, errors) for place in found.paths if place.stat().st_size]
    tables = [open_table(raw, columns=columns, rule=rule) for raw in raws]
    _require_same_texts([(table.raw.name, table.roles.text2 is not None) for table in tables])
    first = tables[0]
    return LabelledSource(
        found.name,
        tuple(tables),
        has_text2=first.roles.text2 is not None,
        has_label=all(table.roles.label is not None for table in tables),
        notes=(*found.notes, *_guesses(tables)),
        text_column=first.column("text"),
        text2_column=first.column("text2"),
        label_column=first.column("label"),
    )


def _require_same_texts(found: list[tuple[str, bool]]) -> None:
    pairs, singles = ([name for name, is_pair in found if is_pair == kind] for kind in (True, False))
    if pairs and singles:
        raise InputError(
            f"{singles[0]}: one text a row, but {pairs[0]} has two",
            hint="name the columns with --text-column and --text2-column",
        )


def _guesses(tables: list[Table]) -> tuple[str, ...]:
    """One note per way of guessing, with the first file that it was used for."""
    notes: dict[str, str] = {}
    for table in tables:
        has_columns = table.kind != "lines"
        if table.roles.guessed or (has_columns and table.names is None):  # a row of names may have been read as data
            notes.setdefault(table.description(), Path(table.raw.name).name)
    return tuple(f"{name}: {description}" for description, name in notes.items())
