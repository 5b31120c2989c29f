"""A look at labelled rows before training: classes, lengths, blank, repeated and contradictory texts, and leaks.

Near duplicates are texts that differ in case, white space and punctuation only (`duplicate_keys`). Of very large data
the first rows are looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, takewhile
from typing import Any

import numpy as np

from tformer.data.sources.labelled import duplicate_keys, split_labels
from tformer.data.sources.tables import LabelledRow
from tformer.support.formatting import listed, plural

MAX_ROWS = 500_000
MAX_CHARACTERS = 1 << 26
SHOWN = 5  # texts with several labels
BINS = 24  # of lengths


@dataclass(frozen=True)
class Look:
    """What the rows of a table hold.

    Attributes:
        rows, looked_at: number of rows, and of the first ones that are described here.
        labels: number of rows of each label, the most frequent first; empty for scores.
        lengths: median, p95 and longest of the texts, in `unit`; histogram: [from, to, rows] of each bin.
        blank: rows without text; exact, near: rows whose text occurs before, as it is or nearly.
        conflicting: texts that occur with several labels; conflicts: the lines of the first ones.
        in_both: rows of the validation data whose text is in the training data, too; None without validation data.
    """

    rows: int
    looked_at: int
    labels: Mapping[str, int]
    unit: str
    lengths: Mapping[str, Any]
    blank: int
    exact: int
    near: int
    conflicting: int
    conflicts: tuple[tuple[str, ...], ...]
    in_both: int | None = None

    def document(self) -> dict[str, Any]:
        """The figures as JSON has them."""
        return asdict(self)

    def lines(self) -> Iterator[str]:
        """At most three lines: lengths; blank and repeated texts; conflicts and leaks. Nothing is said of nothing."""
        part = "" if self.looked_at == self.rows else f" (of the first {self.looked_at:,} rows)"
        of = self.lengths
        yield (
            f"lengths: median {of['median']:,} {self.unit}, 95 % at most {of['p95']:,}, longest {of['longest']:,}{part}"
        )
        found = {"blank text": self.blank, "exact duplicate": self.exact, "near duplicate": self.near}
        if any(found.values()):
            yield f"texts: {', '.join(plural(count, what) for what, count in found.items() if count)}{part}"
        worst = []
        if self.conflicting:
            lines = "; ".join(" and ".join(places) for places in self.conflicts)
            worst.append(f"{plural(self.conflicting, 'text')} with several labels (lines {lines})")
        if self.in_both:
            worst.append(f"{plural(self.in_both, 'validation row')} whose text is in the training data")
        if worst:
            yield f"caution: {', '.join(worst)}{part}"


def shares_of(labels: Mapping[str, int], names: Sequence[str], *, most: int = 20) -> str:
    """The shares of these labels, in their order."""
    total = max(1, sum(labels.values()))
    return listed([f"{labels.get(name, 0) / total:.1%}" for name in names], most)


def look_at(
    rows: Sequence[LabelledRow],
    lengths_N: np.ndarray,
    *,
    unit: str,
    valid: Sequence[LabelledRow] | None = None,
    separator: str | None = None,
    has_classes: bool = True,
) -> Look:
    """The look at rows in memory.

    Args:
        lengths_N: int64 [N], in this unit.
        separator: of several labels of one row; None: a row has one.
        has_classes: labels are classes, no scores.
    """
    total = len(rows)
    sizes = accumulate(len(row.text) + len(row.text2 or "") for row in rows[:MAX_ROWS])
    rows = rows[: max(1, sum(1 for _ in takewhile(lambda size: size <= MAX_CHARACTERS, sizes)))]
    blank_N = np.array([not (row.text.strip() or (row.text2 or "").strip()) for row in rows], dtype=bool)
    keys_N = duplicate_keys(rows)
    written = [(row.text, row.text2) for row, blank in zip(rows, blank_N, strict=True) if not blank]
    repeated = len(written) - len(np.unique(keys_N[~blank_N]))
    exact = len(written) - len(set(written))
    places: dict[int, dict[str, str]] = {}  # of each text: its labels, with the line of the first row of each
    for key, row, blank in zip(keys_N.tolist(), rows, blank_N.tolist(), strict=True):
        if not blank and row.label is not None:
            places.setdefault(key, {}).setdefault(row.label, row.place.rpartition(":")[2])
    conflicts = [tuple(of.values()) for of in places.values() if len(of) > 1]
    counts: dict[str, int] = {}
    for row in rows:
        labels = [] if row.label is None or not has_classes else [row.label]
        for label in labels if separator is None else [one for each in labels for one in split_labels(each, separator)]:
            counts[label] = counts.get(label, 0) + 1
    lengths_N = lengths_N[: len(rows)]
    median, p95, longest = (int(np.quantile(lengths_N, share)) for share in (0.5, 0.95, 1.0))
    numbers, edges = np.histogram(lengths_N, bins=BINS, range=(0, max(1, longest)))
    histogram = [[a, b, n] for a, b, n in zip(edges[:-1].tolist(), edges[1:].tolist(), numbers.tolist(), strict=True)]
    in_both = None
    if valid is not None:
        in_both = int(np.isin(duplicate_keys(valid[:MAX_ROWS]), keys_N[~blank_N]).sum())
    return Look(
        rows=total,
        looked_at=len(rows),
        labels=dict(sorted(counts.items(), key=lambda item: -item[1])),
        unit=unit,
        lengths={"median": median, "p95": p95, "longest": longest, "histogram": histogram},
        blank=int(blank_N.sum()),
        exact=exact,
        near=repeated - exact,
        conflicting=len(conflicts),
        conflicts=tuple(conflicts[:SHOWN]),
        in_both=in_both,
    )
