"""The look at tables of `tformer data`: a document of figures, and its lines and pictures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from tformer.data.look import Look, look_at, shares_of
from tformer.data.sources.labelled import LabelledSource, LabelledTable, open_labelled
from tformer.data.sources.reading import BadRows, Reading
from tformer.data.sources.tables import LabelledRow
from tformer.recipe.data_defaults import words_of
from tformer.recipe.sections import Columns, SourceSpec
from tformer.support.errors import InputError
from tformer.support.formatting import listed, plural
from tformer.viz.plots import Heat, Line, Lines, Plot
from tformer.workflows.tokenizing import Subject

MOST_LABELS = 20


class DataLook:
    """What `tformer data` says of tables.

    Args:
        subject: a tokenizer, whose tokens lengths are counted in; None: words.
        most: tokens that a model reads; None: all, or those of the subject's model.

    Raises InputError for what cannot be read, and for tables without a row that can be used.
    """

    def __init__(
        self,
        paths: Sequence[str],
        valid: Sequence[str],
        columns: Columns,
        reading: Reading,
        *,
        subject: Subject | None = None,
        most: int | None = None,
        **labels: Any,
    ) -> None:
        self.sources = _open(paths, columns, reading, labels)
        self.bad = BadRows()
        for source in self.sources:
            for place, _, error in source.bad_rows():
                self.bad.add(place, error)
        rows: list[LabelledRow] = [row for source in self.sources for row in source.rows()]
        if not rows:
            raise InputError(f"{self.name}: no row can be used: {self.bad}")
        held = [row for source in (_open(valid, columns, reading, labels) if valid else []) for row in source.rows()]
        self.most = most or (None if subject is None else subject.reader.max_length)
        lengths_N = _lengths(rows, subject)
        self.cut = None if self.most is None or subject is None else int((lengths_N > self.most).sum())
        self.look: Look = look_at(
            rows,
            lengths_N,
            unit="words" if subject is None else "tokens",
            valid=held if valid else None,
            separator=labels.get("separator") if labels.get("multi_label") else None,
            has_classes=not labels.get("numeric_label"),
        )

    @property
    def name(self) -> str:
        return ", ".join(source.name for source in self.sources)

    @property
    def unused(self) -> list[str]:
        """Columns of the first table that are not read."""
        for part in self.sources[0].parts:
            if isinstance(part, LabelledTable) and part.names is not None:
                used = {number for numbers in part.columns.values() for number in numbers}
                return [name for number, name in enumerate(part.names) if number not in used]
        return []

    def document(self) -> dict[str, Any]:
        """All figures, as `--json` prints them."""
        first, look = self.sources[0], self.look.document()
        bad = [{"reason": reason, "rows": count} for reason, count in self.bad.reasons.items()]
        for each in bad:
            each["first_lines"] = [int(line) for line in self.bad.lines.get(str(each["reason"]), ())]
        return {
            "data": self.name,
            "columns": {"text": first.text_column, "text2": first.text2_column, "label": first.label_column},
            "unused_columns": self.unused,
            "notes": list(first.notes),
            "bad_rows": self.bad.total,
            "bad_row_reasons": bad,
            "max_length": self.most,
            "cut": self.cut,
            **look,
        }

    def lines(self) -> Iterator[str]:
        """At most six lines of text."""
        first, look = self.sources[0], self.look
        columns = first.notes[0] if first.notes else f"{self.name}: {first.text_column}, {first.label_column}"
        yield columns + (f"; not used: {listed(self.unused, MOST_LABELS)}" if self.unused else "")
        bad = f"; {self.bad.total:,} more cannot be used: {self.bad}" if self.bad.total else ""
        yield f"rows: {look.rows:,}{bad}"
        if look.labels:
            names = list(look.labels)
            yield f"labels ({len(names)}): {listed(names, MOST_LABELS)} ({shares_of(look.labels, names)})"
        lengths, *others = look.lines()
        if self.cut:
            lengths += f"; {plural(self.cut, 'text')} longer than {self.most:,} tokens would be cut"
        yield from (lengths, *others)

    def plots(self) -> list[Plot]:
        """The rows of each label, and the lengths of the texts."""
        look, plots = self.look, list[Plot]()
        if look.labels:
            names = list(look.labels)[:MOST_LABELS]
            counts = np.array([[look.labels[name]] for name in names], dtype=float)
            plots.append(Heat(counts, names, ["rows"], "label", "", "viridis", 0.0, title="Labels", numbers=True))
        middles, counts = np.array([[(a + b) / 2, n] for a, b, n in look.lengths["histogram"]], dtype=float).T
        line, all_lines = Line("texts", middles, counts), ". ".join(self.lines())
        plots.append(Lines(f"{look.unit} of a text", "rows", [line], points=True, title="Lengths", caption=all_lines))
        return plots


def _open(paths: Sequence[str], columns: Columns, reading: Reading, labels: dict[str, Any]) -> list[LabelledSource]:
    """The tables; those without a column of labels, too."""
    specs = [SourceSpec(path=path) for path in paths]
    try:
        return open_labelled(specs, columns=columns, reading=reading, **labels)
    except InputError:
        if columns.label is None:
            with suppress(InputError):
                return open_labelled(specs, columns=columns, reading=reading, needs_label=False)
        raise


def _lengths(rows: Sequence[LabelledRow], subject: Subject | None) -> np.ndarray:
    """int64 [N]: words, or tokens with those of the template."""
    if subject is None:
        return np.array([words_of(row.text) + words_of(row.text2 or "") for row in rows], dtype=np.int64)
    reader = subject.reader
    template = reader.single if rows[0].text2 is None or reader.pair is None else reader.pair(subject.tokenizer)
    counted = [subject.tokenizer.count(row.text) + subject.tokenizer.count(row.text2 or "") for row in rows]
    return np.array(counted, dtype=np.int64) + template.num_special
