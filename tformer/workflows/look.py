"""The look at data of `tformer data`: a document of figures, and its lines and pictures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from tformer.data.look import MOST_LABELS, line_on_labels, look_at, look_at_text, sides_of, texts_of
from tformer.data.sources.columns import CHATS, Column, is_number
from tformer.data.sources.files import expanded, format_ending, locate
from tformer.data.sources.image_files import IMAGE_ENDINGS, find_images, is_idx
from tformer.data.sources.images import class_order, survey_images
from tformer.data.sources.labelled import LabelledSource, open_labelled
from tformer.data.sources.pairs import open_pairs
from tformer.data.sources.questions import open_questions
from tformer.data.sources.reading import BadRows, Reading
from tformer.data.sources.tables import IN_FOLDERS, LabelledRow, PairRow, Table, json_objects
from tformer.data.sources.text import TEXT_ENDINGS, open_sources
from tformer.recipe.data_defaults import ImageSurvey, choose_by_data, words_of
from tformer.recipe.load import load_recipe
from tformer.recipe.sections import Columns, SourceSpec
from tformer.support.errors import InputError
from tformer.support.formatting import listed
from tformer.tasks.labelled import Parts
from tformer.tasks.tags.rows import CONLL_ENDINGS, KEYS, open_tagged
from tformer.viz.plots import Heat, Line, LinePlot, Plot
from tformer.workflows.tokenizing import open_subject

FIRST_FILES = 1000  # of a folder
GUESSED_ROWS, FEW_ROWS = 1000, 10  # whose labels are compared; with fewer, any may be labels

OBJECTIVES = {
    "seq2seq": "pairs",
    "causal_lm": "text",
    "token_classification": "tags",
    "question_answering": "questions",
}
"""Kinds of data that objectives read; the others read labels."""
ROLES = {"labels": ("text", "text2", "label"), "pairs": ("source", "target")}
"""Columns that kinds of data are said to have."""
WITHOUT_COLUMNS = {"pairs": "aligned lines", "tags": "words with tags", "questions": "questions about contexts"}


class DataLook:
    """Report of `tformer data` on labelled tables, pairs, running text, tagged words and questions about contexts.

    Args:
        objective: that the data is for; None: what its columns fit.
        tokenizer: a run or a tokenizer.json, whose tokens lengths are counted in; None: words.
        most: tokens that a model reads; None: all, or those of the run.

    Raises InputError for what cannot be read, and for tables without a row that can be used.
    """

    def __init__(
        self,
        specs: Sequence[SourceSpec],
        valid: Sequence[SourceSpec],
        columns: Columns,
        reading: Reading,
        *,
        objective: str | None = None,
        tokenizer: Path | None = None,
        most: int | None = None,
    ) -> None:
        self.kind, self.sources = _open(specs, columns, reading, objective)
        self.bad = BadRows(chain.from_iterable(source.bad_rows() for source in self.sources))
        reader = None if tokenizer is None else open_subject(tokenizer).reader
        unit = "words" if reader is None else "tokens"
        if self.kind == "text":
            if valid:
                raise InputError("--valid: lines of running text are not looked for in other data")
            pieces = chain.from_iterable(source.documents() for source in self.sources)
            self.look = look_at_text(pieces, unit=unit, count=words_of if reader is None else reader.tokenizer.count)
            return
        rows = [row for source in self.sources for row in source.rows()]
        if not rows:
            hint = CHATS if any("found a list" in reason for reason in self.bad.reasons) else None
            raise InputError(f"{self.name}: no row can be used: {self.bad}", hint=hint)
        alike = {kind: name for name, kind in OBJECTIVES.items()}.get(self.kind, objective or "classification")
        held = _open(valid, columns, reading, alike)[1] if valid else []
        self.look = look_at(
            rows,
            _lengths(rows, tokenizer),
            unit=unit,
            most=most or (None if reader is None else reader.max_length),
            valid=chain.from_iterable(source.rows() for source in held) if valid else None,
            separator="|" if objective == "multi_label" else None,
            has_classes=objective != "regression",
        )

    @property
    def name(self) -> str:
        return ", ".join(source.name for source in self.sources)

    @property
    def columns(self) -> tuple[dict[str, Column], list[str]]:
        """Columns of the first table: those that are read, by role, and the others."""
        table = self.sources[0].parts[0]
        if not isinstance(table, Table):
            return dict.fromkeys(ROLES.get(self.kind, ())), []
        used = set(chain.from_iterable(table.columns.values()))
        unused = [name for number, name in enumerate(table.names or ()) if number not in used]
        return {role: table.column(role) for role in ROLES.get(self.kind, ())}, unused

    def document(self) -> dict[str, Any]:
        """All figures, as `--json` prints them."""
        columns, unused = self.columns
        return {
            "data": self.name,
            "columns": columns,
            "unused_columns": unused,
            "notes": list(self.sources[0].notes),
            "bad_rows": self.bad.total,
            "bad_row_reasons": [
                {"reason": reason, "rows": count, "first_lines": list(map(int, self.bad.lines.get(reason, ())))}
                for reason, count in self.bad.reasons.items()
            ],
            **self.look.figures,
        }

    def lines(self) -> Iterator[str]:
        """At most six lines of text."""
        notes, found, (columns, unused) = self.sources[0].notes, self.look.figures, self.columns
        read = ", ".join(str(column) for column in columns.values() if column is not None)
        kind = WITHOUT_COLUMNS.get(self.kind, "running text")
        first = notes[0] if notes and self.kind != "text" else f"{self.name}: {read or kind}"
        others = listed([name or "(no name)" for name in unused], MOST_LABELS)
        yield first + (f"; not used: {others}" if unused else "")
        if self.kind != "text":
            bad = f"; {self.bad.total:,} more that --bad-rows drop leaves out: {self.bad}" if self.bad.total else ""
            yield f"rows: {found['rows']:,}{bad}"
        if names := list(found.get("labels", ())):
            yield line_on_labels(names, found["labels"])
        yield from self.look.lines

    def plots(self) -> list[Plot]:
        """The rows of each label, and the lengths of the texts, of both sides of pairs, or of lines."""
        found, plots, one = self.look.figures, list[Plot](), "line" if self.kind == "text" else "text"
        if found.get("labels"):
            plots.append(plot_of_labels(found["labels"]))
        lines = []
        for side, of in sides_of(found["lengths"]).items():
            middles, counts = np.array([[(a + b) / 2, n] for a, b, n in of["histogram"]], dtype=float).T
            lines.append(Line(side or f"{one}s", middles, counts))
        x, y, caption = f"{found['unit']} of a {one}", "lines" if one == "line" else "rows", ". ".join(self.lines())
        return [*plots, LinePlot(x, y, lines, points=True, title="Lengths", caption=caption)]


class ImageLook:
    """Report of `tformer data` on labelled images: number, size, labels, and the held-out part of a training."""

    def __init__(self, path: str) -> None:
        """Raises InputError for images without labels."""
        self.name = path
        self.survey = ImageSurvey(*survey_images(path))
        choice = choose_by_data("vit", self.survey)
        data = load_recipe(arch="vit", flags={"data.train": [{"path": path}]}, by_data=choice).recipe.data
        classes = np.array(find_images(expanded(path), needs_label=True).classes)
        valid = Parts.of(np.unique(classes, return_inverse=True)[1], data, name=path, rows=None).valid
        self.labels, self.held_out = (
            {name: int((of == name).sum()) for name in class_order(set(classes.tolist()))}
            for of in (classes, classes[valid])
        )

    def document(self) -> dict[str, Any]:
        return {"data": self.name, **asdict(self.survey), "labels": self.labels, "held_out": self.held_out}

    def lines(self) -> Iterator[str]:
        yield f"{self.name}: {self.survey}"
        yield line_on_labels(list(self.labels), self.labels)
        of_each = " to ".join(dict.fromkeys(f"{count(self.held_out.values()):,}" for count in (min, max)))
        total = sum(self.held_out.values())
        yield f"held out by train --arch vit without --valid: {total:,} images, {of_each} of each label"

    def plots(self) -> list[Plot]:
        return [plot_of_labels(self.labels)]


def has_images(path: str) -> bool:
    """Whether a path is an image, a file of images, or a folder whose first files are images and no texts."""
    place = expanded(path)
    files = islice(place.rglob("*"), FIRST_FILES) if place.is_dir() else [place]
    endings = {file.suffix.lower() for file in files}
    found = not endings.isdisjoint({*IMAGE_ENDINGS, ".zip"}) and endings.isdisjoint({*TEXT_ENDINGS, *IN_FOLDERS})
    return found or (place.is_file() and is_idx(place))


def plot_of_labels(labels: Mapping[str, int]) -> Heat:
    names = list(labels)[:MOST_LABELS]
    counts = np.array([[labels[name]] for name in names], dtype=float)
    return Heat(counts, names, ["rows"], "label", "", "viridis", 0.0, title="Labels", numbers=True)


def specs_of(paths: Sequence[str], targets: Sequence[str], *, option: str) -> list[SourceSpec]:
    """Entries of the data section. Raises InputError for `targets` (by this option) that are not as many."""
    if targets and len(targets) != len(paths):
        raise InputError(f"{option}: found {len(targets)} files, expected {len(paths)}, as many as sources")
    return [SourceSpec(path=path, target_path=target) for path, target in zip_longest(paths, targets)]


def _kind_with_marks(path: str, columns: Columns, reading: Reading) -> str | None:
    """tags or questions, by the ending of a file or by the keys of its first row; None: another kind."""
    ending = format_ending(Path(path))
    if ending in CONLL_ENDINGS:
        return "tags"
    if ending not in (".json", ".jsonl") or columns != Columns():
        return None
    try:
        [content, *_] = locate(path, is_known=lambda _: True, known="").contents(reading, accepts=("jsonl",))
        [(_, row)] = islice(json_objects(content), 1)
    except (InputError, ValueError):  # JSON over several lines, or none at all
        return "questions" if ending == ".json" else None
    lists = {key for key, value in row.items() if isinstance(value, list | dict)}
    if (ending == ".json" and "data" in lists) or (lists >= {"answers"} and row.keys() >= {"question", "context"}):
        return "questions"
    return "tags" if all(lists & {*names} for names in KEYS.values()) else None


def _kinds(specs: Sequence[SourceSpec], columns: Columns, reading: Reading, objective: str | None) -> tuple[str, ...]:
    """The kinds of data that these may be, the likeliest first."""
    if objective in OBJECTIVES or any(spec.target_path for spec in specs):
        return (OBJECTIVES.get(objective or "", "pairs"),)
    if objective is None and (kind := _kind_with_marks(specs[0].path, columns, reading)) is not None:
        return (kind,)
    if columns.source is not None or columns.target is not None:
        return ("pairs",)
    if columns.label is not None:
        return ("labels",)
    if objective is not None or columns.text is not None:
        return ("labels", "unlabelled")
    is_plain = all(format_ending(Path(spec.path)) in TEXT_ENDINGS for spec in specs)
    return ("labels", "pairs", "text" if is_plain else "unlabelled")


def _open(
    specs: Sequence[SourceSpec], columns: Columns, reading: Reading, objective: str | None
) -> tuple[str, list[Any]]:
    """Kind and sources of the data. Raises the error of the likeliest kind if no kind fits.

    A table whose labels hardly occur twice, and are no numbers, has pairs.
    """
    how: dict[str, Any] = {"columns": columns, "reading": reading}
    labels: dict[str, Any] = {"multi_label": objective == "multi_label", "numeric_label": objective == "regression"}
    kinds, errors = _kinds(specs, columns, reading, objective), list[InputError]()
    for kind in kinds:
        try:
            if kind == "questions":
                return kind, open_questions(specs, reading=reading)
            if kind == "tags":
                return kind, open_tagged(specs, **how)
            if kind in ("pairs", "text"):
                return kind, open_pairs(specs, **how) if kind == "pairs" else open_sources(specs, **how)
            labelled = open_labelled(specs, **how, **labels, needs_label=kind == "labels")
        except InputError as error:
            errors.append(error)
            continue
        if "pairs" in kinds and _has_targets(labelled):
            with suppress(InputError):
                return "pairs", open_pairs(specs, **how)
        return "labels", labelled
    raise errors[0]


def _has_targets(sources: Sequence[LabelledSource]) -> bool:
    """Whether the labels look like targets of pairs: most of the first rows have different ones."""
    rows = islice((row for source in sources for row in source.rows()), GUESSED_ROWS)
    labels = [row.label or "" for row in rows if row.text2 is None]
    return len(labels) >= FEW_ROWS and 2 * len(set(labels)) > len(labels) and not all(map(is_number, labels))


def _lengths(rows: Sequence[LabelledRow] | Sequence[PairRow], tokenizer: Path | None) -> np.ndarray:
    """Lengths int64 [N], of pairs [N, 2]: words, or tokens including the template's."""
    first, counts, special = rows[0], [words_of, words_of], [0, 0]
    if tokenizer is not None:
        readers = [open_subject(tokenizer).reader] * 2
        if isinstance(first, PairRow):
            with suppress(InputError):  # a tokenizer.json has no sides
                readers[1] = open_subject(tokenizer, side="target").reader
        counts = [reader.tokenizer.count for reader in readers]
        special = [reader.single.num_special for reader in readers]
        if isinstance(first, LabelledRow):
            pair = None if first.text2 is None else readers[0].pair
            special = [special[0] if pair is None else pair(readers[0].tokenizer).num_special, 0]
    sides = (zip(counts, texts_of(row), strict=True) for row in rows)
    lengths_N2 = np.array([[count(text) for count, text in each] for each in sides], dtype=np.int64) + special
    return lengths_N2 if isinstance(first, PairRow) else lengths_N2.sum(axis=1)
