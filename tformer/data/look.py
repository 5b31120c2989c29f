"""A look at data before training: lengths, classes, and what is blank, repeated, contradictory or in both parts.

Near duplicates are texts that differ in case, white space and punctuation only (`duplicate_keys`). Of large data the
beginning is looked at.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import numpy as np

from tformer.data.sources.files import DocumentChunk, split_lines
from tformer.data.sources.labelled import duplicate_keys, split_labels
from tformer.data.sources.questions import QuestionRow
from tformer.data.sources.tables import LabelledRow, PairRow, TaggedRow
from tformer.support.formatting import listed, plural

MAX_ROWS = 500_000
MAX_CHARACTERS = 1 << 26  # of rows
MAX_TEXT = 1 << 24  # characters of running text
LONG_LINE = 10_000  # characters
SHOWN = 5  # texts with several labels, and lines of each
MOST_LABELS = 20  # in a line
BINS = 24  # of lengths

Rows = Iterable[LabelledRow | PairRow]


@dataclass(frozen=True)
class Look:
    """Summary of data: figures for JSON, and at most three lines of text without zero counts.

    Figures of rows:
        rows, looked_at: number of rows, and of the first ones that the other figures describe.
        labels: number of rows of each label (of words of each tag; of questions with an answer and without), the most
            frequent first; empty for scores and of pairs.
        lengths: median, p95 and longest of the texts, in `unit`; histogram: [from, to, rows] of each bin. Of pairs for
            `source` and `target`.
        max_length, cut: what a model reads, and the number of longer rows; None: not known. windows: longer rows are
            read in windows.
        blank: rows without text, or pairs of which a side has none; exact, near: rows that occur before, as they are or
            nearly; equal: pairs of a text and itself.
        conflicting: texts with several labels, or sources with several targets; conflicts: the lines of the first ones.
        in_both: validation rows whose text (of pairs: source) is in the training data; None without validation data.

    Figures of running text: characters, whole (False: there are more), lines, words or tokens; blank, long and repeated
    lines (those that occur before); lengths of lines, in characters.
    """

    figures: Mapping[str, Any]
    lines: tuple[str, ...]


def look_at(
    rows: Rows,
    lengths: np.ndarray,
    *,
    unit: str,
    most: int | None = None,
    valid: Rows | None = None,
    separator: str | None = None,
    has_classes: bool = True,
) -> Look:
    """The look at labelled rows or pairs, at least one.

    Args:
        lengths: int64 [N], in this unit; of pairs [N, 2], of both sides.
        most: what a model reads, in this unit.
        separator: of several labels of one row; None: a row has one.
        has_classes: labels are classes, no scores.
    """
    looked_at = list(_beginning(rows))
    is_pair = isinstance(looked_at[0], PairRow)
    written = [row for row in looked_at if (all if is_pair else any)(map(str.strip, texts_of(row)))]
    texts = [texts_of(row) for row in written]
    asked, answers = (
        slice(1 if is_pair else 2),
        [getattr(row, "tags", None) or getattr(row, "label", None) for row in written],
    )
    keys_N = asked_N = duplicate_keys(each[asked] for each in texts)
    if is_pair:  # a source is asked for its target
        target_N = duplicate_keys(each[1:] for each in texts)
        keys_N, answers = asked_N * 31 + target_N, target_N.tolist()
    places: dict[int, dict[Any, str]] = {}  # of each text: its labels, with the line of the first row of each
    for key, answer, row in zip(asked_N.tolist(), answers, written, strict=True):
        if answer is not None:
            places.setdefault(key, {}).setdefault(answer, row.place.rpartition(":")[2])
    conflicts = [tuple(of.values()) for of in places.values() if len(of) > 1]
    exact = len(texts) - len(set(texts))
    labels = chain.from_iterable(_labels_of(row, separator) for row in looked_at)
    found: dict[str, Any] = {
        "rows": len(lengths),
        "looked_at": len(looked_at),
        "labels": dict(Counter(labels).most_common()) if has_classes else {},
        "unit": unit,
        "lengths": _spread(lengths[: len(looked_at)]),
        "max_length": most,
        "cut": None if most is None else int((lengths.reshape(len(lengths), -1) > most).any(axis=1).sum()),
        "windows": hasattr(looked_at[0], "marks"),
        "blank": len(looked_at) - len(written),
        "exact": exact,
        "near": len(texts) - len(np.unique(keys_N)) - exact,
        "conflicting": len(conflicts),
        "conflicts": tuple(conflicts[:SHOWN]) if looked_at[0].place else (),
        "in_both": None,
    }
    if is_pair:
        found["equal"] = sum(source == target for source, target in texts)
    if valid is not None:
        valid_N = duplicate_keys(texts_of(row)[asked] for row in _beginning(valid))
        found["in_both"] = int(np.isin(valid_N, asked_N).sum())
    return Look(found, tuple(_lines_on_rows(found)))


def look_at_text(pieces: Iterable[DocumentChunk], *, unit: str = "", count: Callable[[str], int] | None = None) -> Look:
    """The look at running text. count: of a text's words or tokens; `unit` says which."""
    counts, seen, lengths = Counter[str](), set[int](), array("q")

    def texts() -> Iterator[str]:
        for piece in pieces:
            if counts["characters"] >= MAX_TEXT:
                counts["more"] = 1
                return
            counts["characters"] += len(piece.text)
            counts[unit] += 0 if count is None else count(piece.text)
            yield piece.text
            if piece.ends_document and not piece.text.endswith("\n"):
                yield "\n"

    for line in map(str.strip, split_lines(texts(), name="")):
        lengths.append(len(line))
        counts["repeated"] += bool(line) and hash(line) in seen
        seen.add(hash(line))
    lengths_N = np.array(lengths, dtype=np.int64)
    found: dict[str, Any] = {
        "characters": counts["characters"],
        "whole": not counts["more"],
        "lines": len(lengths_N),
        "unit": "characters",
        "lengths": _spread(lengths_N),
        "blank": int((lengths_N == 0).sum()),
        "long": int((lengths_N > LONG_LINE).sum()),
        "repeated": counts["repeated"],
    }
    counted = {} if count is None else {unit: counts[unit]}
    return Look(found | counted, tuple(_lines_on_text(found, counted)))


def texts_of(row: LabelledRow | PairRow) -> tuple[str, str]:
    return (row.source, row.target) if isinstance(row, PairRow) else (row.text, row.text2 or "")


def _beginning(rows: Rows) -> Iterator[LabelledRow | PairRow]:
    """The first rows, at least one, of at most `MAX_ROWS` and `MAX_CHARACTERS`."""
    size = 0
    for number, row in enumerate(islice(rows, MAX_ROWS)):
        size += sum(map(len, texts_of(row)))
        if number and size > MAX_CHARACTERS:
            return
        yield row


def _labels_of(row: LabelledRow | PairRow, separator: str | None) -> Sequence[str]:
    if isinstance(row, TaggedRow):
        return row.tags
    if isinstance(row, QuestionRow):
        return ("answer" if row.answers else "no answer",)
    label: str | None = getattr(row, "label", None)
    if label is None:
        return ()
    return [label] if separator is None else split_labels(label, separator)


def _spread(lengths: np.ndarray) -> dict[str, Any]:
    if lengths.ndim == 2:
        return {"source": _spread(lengths[:, 0]), "target": _spread(lengths[:, 1])}
    median, p95, longest = (int(np.quantile(lengths, share)) for share in (0.5, 0.95, 1.0))
    numbers, edges = np.histogram(lengths, bins=BINS, range=(0, max(1, longest)))
    histogram = [[a, b, n] for a, b, n in zip(edges[:-1].tolist(), edges[1:].tolist(), numbers.tolist(), strict=True)]
    return {"median": median, "p95": p95, "longest": longest, "histogram": histogram}


# -- in words ----------------------------------------------------------------------------------------------------------


def line_on_labels(names: Sequence[str], labels: Mapping[str, int] | None) -> str:
    """The names of labels in this order, and their shares where their numbers of rows are known."""
    shares = ""
    if labels is not None:
        total = max(1, sum(labels.values()))
        shares = f" ({listed([f'{labels.get(name, 0) / total:.1%}' for name in names], MOST_LABELS)})"
    return f"labels ({len(names)}): {listed(names, MOST_LABELS)}{shares}"


def sides_of(lengths: Mapping[str, Any]) -> dict[str, Any]:
    """Lengths by side: each side of pairs by its name, other data under an empty name."""
    return {"": lengths} if "median" in lengths else dict(lengths)


def _line_on_lengths(found: Mapping[str, Any]) -> str:
    return "lengths: " + "; ".join(
        f"{side} median {of['median']:,} {found['unit']}, 95 % at most {of['p95']:,}, longest {of['longest']:,}".strip()
        for side, of in sides_of(found["lengths"]).items()
    )


def _lines_on_rows(found: Mapping[str, Any]) -> Iterator[str]:
    part = "" if found["looked_at"] == found["rows"] else f" (of the first {found['looked_at']:,} rows)"
    one, asked, answers, fate = "text", "text", "labels", "read in windows" if found["windows"] else "cut"
    blank, validated = ("blank text", ""), "validation row"
    if is_pair := "equal" in found:
        one, asked, answers, fate = "pair", "source", "targets", "left out"
        blank, validated = ("pair", " with a blank side"), "validation pair"
    cut = found["cut"] and f"; {plural(found['cut'], one)} longer than {found['max_length']:,} tokens would be {fate}"
    yield f"{_line_on_lengths(found)}{part}{cut or ''}"
    places = "; ".join(" and ".join(each[:SHOWN]) for each in found["conflicts"])
    parts = {
        "texts": [
            (found["blank"], *blank),
            (found["exact"], "exact duplicate", ""),
            (found["near"], "near duplicate", ""),
            (found["equal"] if is_pair else 0, "pair", " of a text and itself"),
        ],
        "caution": [
            (found["conflicting"], asked, f" with several {answers}{places and f' (lines {places})'}"),
            (found["in_both"], validated, f" whose {asked} is in the training data"),
        ],
    }
    for head, counted in parts.items():
        if said := [f"{plural(count, noun)}{rest}" for count, noun, rest in counted if count]:
            yield f"{head}: {', '.join(said)}{part}"


def _lines_on_text(found: Mapping[str, Any], counted: Mapping[str, int]) -> Iterator[str]:
    part = "" if found["whole"] else f" (of the first {found['characters']:,} characters)"
    tokens = "".join(f", {count:,} {unit}" for unit, count in counted.items())
    yield f"text: {plural(found['characters'], 'character')} in {plural(found['lines'], 'line')}{tokens}{part}"
    yield f"{_line_on_lengths(found)}{part}"
    shares = {"blank": "are blank", "repeated": "occur before"}
    said = [f"{found[name] / found['lines']:.1%} {words}" for name, words in shares.items() if found[name]]
    said += [f"{plural(found['long'], 'line')} longer than {LONG_LINE:,} characters"] if found["long"] else []
    if said:
        yield f"lines: {', '.join(said)}{part}"
