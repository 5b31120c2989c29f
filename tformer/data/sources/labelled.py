"""Labelled texts and pairs of texts: tables, lines of plain text and built-in sources; labels and their numbers.

The order of labels is that of their values when all are numbers, else alphabetical (by code point). Several labels of
one example are one string with a separator between them: "sport|politics"; an empty string means none.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np

from tformer.data.permutation import derive_key, permute_by_network
from tformer.data.sources.builtin import DEFAULTS, PREFIX, find_builtin
from tformer.data.sources.columns import WHOLE_FLOAT, Column, LabelledLayout, MatchLayout, TextLayout, is_number
from tformer.data.sources.files import Source, SourceFields, format_ending, locate
from tformer.data.sources.reading import Reading, whole_characters
from tformer.data.sources.tables import IN_FOLDERS, LabelledRow, Table, guessed_columns, open_tables
from tformer.support.errors import InputError, did_you_mean
from tformer.support.formatting import kind_of, listed, shortened, whole_number
from tformer.support.options import Errors

SHOWN_CHARACTERS, SHOWN_LABELS = 60, 6  # of a label in a message; of labels
FEW_CLASSES = 20  # up to this number of classes, some of each are held out, also beyond the fraction
MAX_SCORE = float(np.finfo(np.float32).max)  # models compute in float32


@dataclass(frozen=True)
class LabelledTable(Table):
    """A table read as labelled rows. check_label: called with label and place, raises InputError for a wrong one."""

    layout: LabelledLayout
    check_label: Callable[[str, str], object] | None = None

    def row(self, values: list[Any], **facts: Any) -> LabelledRow:
        if not values:
            return LabelledRow("", "" if "text2" in self.columns else None, None, **facts)
        cells, label, place = dict(zip(self.columns, values, strict=True)), None, facts["place"]
        has_text = any(cells.get(role, "").strip() for role in ("text", "text2"))
        if self.content.reading.drops and self.layout.needs_label and not has_text:
            raise InputError(f"{place}: the text is blank")
        if "group" in cells:
            facts["group"] = "" if cells["group"] is None else str(cells["group"]).strip()
            if not facts["group"]:
                raise InputError(f"{place}: the group is empty", hint="give each row without one its own")
        if "label" in cells:
            given = cells["label"]
            if self.label_form == "decimal commas" and isinstance(given, str):
                if "." in given:
                    raise InputError(
                        f"{place}: the label '{_short(given)}' has a decimal point, the first ones a comma"
                    )
                given = given.replace(",", ".")
            label = read_label(given, self.layout, place=place, errors=self.content.errors)
            if self.label_form == "whole labels" and label is not None and WHOLE_FLOAT.fullmatch(label):
                label = label.removesuffix(".0")
            if self.check_label is not None and label is not None:
                self.check_label(label, place)
        if "negatives" in cells:
            facts["negatives"] = tuple(text for text in cells["negatives"] if text.strip())
        return LabelledRow(cells["text"], cells.get("text2"), label, **facts)

    def columns_key(self) -> str:
        roles = [role for role in self.layout.roles if role not in ("group", "negatives") or role in self.columns]
        return ":".join(str(self.columns.get(role, (None,))[0]) for role in roles)


@dataclass(frozen=True, kw_only=True)
class LabelledSource(Source):
    """An opened source of labelled rows.

    Attributes:
        has_text2: whether rows have a second text.
        text_column, text2_column, label_column: names or numbers in the (first) file; None if there is no such column.
    """

    has_text2: bool
    text_column: Column = None
    text2_column: Column = None
    label_column: Column = None

    def rows(self) -> Iterator[LabelledRow]:
        """Every row in order. Raises InputError with file and line of a wrong row."""
        return self._items("rows")

    @property
    def tables(self) -> list[Table]:
        """The opened tables; none of a built-in source."""
        return [part for part in self.parts if isinstance(part, Table)]

    def keeping_records(self) -> LabelledSource:
        """The same source, whose rows have their `record`."""
        return self._with_tables(keeps_records=True)

    def checked(self, index: LabelIndex | None) -> LabelledSource:
        """The same source; a row with a label that is not in the index cannot be used."""
        return self._with_tables(check_label=None if index is None else index.encode)

    def _with_tables(self, **facts: Any) -> LabelledSource:
        parts = (replace(part, **facts) if isinstance(part, LabelledTable) else part for part in self.parts)
        return replace(self, parts=tuple(parts))


def open_labelled(
    specs: Sequence[SourceFields],
    *,
    columns: object = None,
    preferred: object = None,
    reading: Reading = Reading(),
    needs_label: bool = True,
    numeric_label: bool = False,
    multi_label: bool = False,
    separator: str = "|",
    matches: bool = False,
) -> list[LabelledSource]:
    """One source per entry; without entries, the built-in labelled text.

    Args:
        columns: attributes text, text2 and label: names, or numbers from 0; None (each): guessed.
        preferred: the columns of other data, likewise: tried before guessing, in tables that have them.
        needs_label: False: rows may have no label, lines of plain text are read too, and no row is left out.
        numeric_label: labels are scores, finite numbers.
        multi_label: labels may be lists (in jsonl and Parquet), joined by `separator`, and empty.
        matches: texts that belong together, without labels, and their negatives (`MatchLayout`).

    Raises InputError: what cannot be read, no rows, a column that is missing or ambiguous, sources of which only some
    have two texts a row, weights (rows are not mixed).
    """
    kind = MatchLayout if matches else LabelledLayout
    layout = kind(needs_label, numeric_label, multi_label, separator)
    if len(specs) > 1 and any(spec.weight is not None for spec in specs):
        raise InputError("data.train: labelled sources have no weights: every row is read once in an epoch")
    paths = [spec.path for spec in specs] or [DEFAULTS["labels"]]
    sources = [_open(path, columns, reading, layout, preferred) for path in paths]
    require_same_texts((source.name, source.has_text2) for source in sources)
    return sources


def open_texts(path: str, *, column: Column, trained: Column, reading: Reading) -> LabelledSource:
    """Open a table with one text a row: the named column, else the training's column if present, else a guess."""
    named, preferred = (SimpleNamespace(text=each) for each in (column, trained))
    return _open(path, named, reading, TextLayout(), preferred)


def _open(
    path: str, columns: object, reading: Reading, layout: LabelledLayout, preferred: object = None
) -> LabelledSource:
    if path.startswith(PREFIX):
        builtin = find_builtin(path, holds="labels")
        if layout.numeric_label:
            raise InputError(f"{path}: has classes, no scores", hint="give a file with a column of numbers")
        return LabelledSource(name=path, parts=(builtin,), has_text2=False)
    endings = {*IN_FOLDERS} if layout.needs_label else {*IN_FOLDERS, ".txt"}
    found = locate(path, is_known=lambda place: format_ending(place) in endings, known=", ".join(sorted(endings)))
    tables = open_tables(LabelledTable, found, layout, reading=reading, columns=columns, preferred=preferred)
    require_same_texts((table.content.name, "text2" in table.columns) for table in tables)
    first = tables[0]
    return LabelledSource(
        name=found.name,
        parts=tuple(tables),
        has_text2="text2" in first.columns,
        notes=(*found.notes, *guessed_columns(tables)),
        text_column=first.column("text"),
        text2_column=first.column("text2"),
        label_column=first.column("label"),
    )


def require_same_texts(found: Iterable[tuple[str, bool]]) -> None:
    """Raise InputError if some of these (names, with two texts) have two texts a row and others one."""
    names = {is_pair: name for name, is_pair in reversed(list(found))}  # the first of each
    if len(names) == 2:
        hint = "name the columns with --text-column and --text2-column"
        raise InputError(f"{names[False]}: one text a row, but {names[True]} has two", hint=hint)


# -- labels ------------------------------------------------------------------------------------------------------------


def collect_labels(labels: Iterable[str], *, multi: bool = False, separator: str = "|") -> tuple[str, ...]:
    """All different labels in order. Raises InputError for a single class, or no label at all."""
    names = set(labels)
    if multi:
        names = {name for label in names for name in split_labels(label, separator)}
        if not names:
            raise InputError("the training data has no label in any row")
    elif len(names) < 2:
        what = f"one class only, '{_short(next(iter(names)))}'" if names else "no rows"
        raise InputError(f"the training data has {what}; at least two classes are needed")
    if all(is_number(label) and math.isfinite(float(label)) for label in names):
        return tuple(sorted(names, key=lambda label: (float(label), label)))
    return tuple(sorted(names))


def split_labels(label: str, separator: str) -> list[str]:
    """The labels of one example."""
    return [part for each in label.split(separator) if (part := each.strip())]


def matching_names(known: tuple[str, ...], found: tuple[str, ...]) -> tuple[str, ...]:
    """The known names if the found labels are these: all by name, or each one of them by its number; else the found."""
    index = LabelIndex(known)
    numbers = {index.find(label) for label in found}
    by_name = not any(map(is_number, (*found, *known)))
    return known if None not in numbers and (by_name or len(numbers) == len(known)) else found


@dataclass(frozen=True)
class LabelIndex:
    """Label names in order, and their numbers. Raises InputError for two of the same name.

    Attributes:
        read_as: labels that are no name, and the name that each was found to mean.
    """

    names: tuple[str, ...]
    multi: bool = False
    separator: str = "|"
    read_as: dict[str, str] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(set(self.names)) != len(self.names):
            twice = next(name for name in self.names if self.names.count(name) > 1)
            raise InputError(f"data.labels: '{twice}' is there more than once")

    def __len__(self) -> int:
        return len(self.names)

    def encode(self, label: str, place: str) -> int | np.ndarray:
        """The label's number, or bool [L] if there may be several. Raises InputError for an unknown one."""
        if not self.multi:
            return self._find(label, place)
        flags = np.zeros(len(self.names), dtype=bool)
        flags[[self._find(part, place) for part in split_labels(label, self.separator)]] = True
        return flags

    def encode_all(self, labels: Sequence[str], places: Sequence[str]) -> np.ndarray:
        """int64 [N], or bool [N, L] if there may be several."""
        values = [self.encode(label, place) for label, place in zip(labels, places, strict=True)]
        if self.multi:
            return np.array(values, dtype=bool).reshape(len(values), len(self.names))
        return np.array(values, dtype=np.int64)

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.names)}

    def find(self, label: str) -> int | None:
        """The number of a label: by its name, in any case; where no name is a number, a number itself; else None."""
        if (number := self._numbers.get(self.read_as.get(label, label))) is not None:
            return number
        same = [number for name, number in self._numbers.items() if name.casefold() == label.casefold()]
        counted = None if any(map(is_number, self.names)) else whole_number(label)
        number = same[0] if len(same) == 1 else counted
        return number if number is not None and number < len(self.names) else None

    def notes(self) -> tuple[str, ...]:
        """A note on the labels that are read as names that they are not."""
        read_as = listed([f"{label} as {name}" for label, name in self.read_as.items()], SHOWN_LABELS)
        return (f"labels of the data are read by the model's names: {read_as}",) if read_as else ()

    def _find(self, label: str, place: str) -> int:
        number = self.find(label)
        if number is not None and self.names[number] != label:
            self.read_as[label] = self.names[number]
        if number is None:
            raise InputError(
                f"{place}: unknown label '{_short(label)}', not one of the training data; "
                f"{did_you_mean(label, map(_short, self.names))}"
            )
        return number


def read_label(value: Any, layout: LabelledLayout, *, place: str, errors: Errors = "strict") -> str | None:
    """A label as text, also from a number, a truth value or a list of jsonl and Parquet.

    None if it is missing and not needed. Raises InputError for a label that the layout does not allow.
    """
    if isinstance(value, list):
        label = _join(value, layout, place=place)
    elif isinstance(value, bool):
        label = str(value).lower()
    elif value is None or isinstance(value, str | int | float):
        label = "" if value is None or value != value else str(value).strip()
    else:
        raise InputError(f"{place}: the label should be text or a number, found {kind_of(value)}")
    label = whole_characters(label, place=place, errors=errors)
    if not layout.needs_label:
        return label or None
    if not label and not layout.multi_label:
        raise InputError(f"{place}: the label is {'empty' if value == value else 'NaN'}")
    if layout.numeric_label:
        if not (is_number(label) and math.isfinite(float(label))):
            raise InputError(f"{place}: the label '{_short(label)}' is not a finite number, which a score must be")
        if abs(float(label)) > MAX_SCORE:
            raise InputError(f"{place}: the label '{_short(label)}' is too large for a score, at most {MAX_SCORE:.3g}")
    return label


def _join(values: Sequence[Any], layout: LabelledLayout, *, place: str) -> str:
    for value in values:
        if not isinstance(value, str):
            raise InputError(f"{place}: the labels in a list should be text, found {kind_of(value)}")
        if layout.separator in value:
            raise InputError(
                f"{place}: the label '{value}' holds the separator of labels, '{layout.separator}'",
                hint="choose another with --set data.label_separator=...",
            )
    if len(values) != 1 and not layout.multi_label and layout.needs_label:
        raise InputError(
            f"{place}: expected one label, found {len(values)}", hint="--objective multi_label learns several"
        )
    return layout.separator.join(values)


def _short(label: str) -> str:
    return shortened(label, SHOWN_CHARACTERS)


# -- the held-out part of labelled examples ----------------------------------------------------------------------------

PUNCTUATION = {code: " " for code in range(0x3100) if unicodedata.category(chr(code)).startswith("P")}
MOST_HELD_OUT = 2
"""Maximum of what is held out with equal examples on one side, as a multiple of what is held out otherwise."""


def duplicate_keys(rows: Iterable[Sequence[str | None]]) -> np.ndarray:
    """int64 [N]: equal for rows whose texts differ at most in case, white space and punctuation.

    Only their equality has a meaning: they are others in another process.
    """
    return np.fromiter((hash(tuple(_plain(text or "") for text in row)) for row in rows), np.int64)


def _plain(text: str) -> str:
    return " ".join(text.casefold().translate(PUNCTUATION).split()) or text.strip()


def stratified_split(
    labels: np.ndarray, *, fraction: float, keys: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """(indices kept, indices held out): sorted, always the same for the same labels.

    For classes (int [N]), a share of each class is held out, see `_shares`. For scores and for several labels (bool
    [N, L]), a random share of all examples is; where this leaves a label out, an example counts for its rarest one. At
    least one example of two or more is held out.

    keys: int64 [N]; examples with equal keys are on one side, and count for the class of the first of them. Of a class,
        groups of equal examples are held out as long as they fit into its share; else the smallest one.
    """
    keys = np.arange(len(labels)) if keys is None else keys
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    first_N, firsts = first[inverse], np.sort(first)  # the number of the first example with the same key; all of these
    sizes_N = np.bincount(first_N, minlength=len(labels))
    groups = [firsts]
    if labels.ndim == 2:
        kept, held_out = stratified_split(np.zeros(len(labels)), fraction=fraction, keys=keys)
        if (labels[kept].any(axis=0) & labels[held_out].any(axis=0)).all():
            return kept, held_out
        labels = np.where(labels.any(axis=1), np.where(labels, labels.sum(axis=0), len(labels) + 1).argmin(axis=1), -1)
    if labels.ndim == 1 and np.issubdtype(labels.dtype, np.integer):
        groups = [firsts[labels[firsts] == label] for label in np.unique(labels[firsts])]
    chosen = list[int]()
    counts = _shares(np.array([sizes_N[group].sum() for group in groups], dtype=np.int64), fraction=fraction)
    for number, (group, count) in enumerate(zip(groups, counts.tolist(), strict=True)):
        order = group[permute_by_network(np.arange(len(group)), size=len(group), key=derive_key("held out", 0, number))]
        room = count
        for example, size in zip(order.tolist(), sizes_N[order].tolist(), strict=True):
            if size <= room:
                chosen.append(example)
                room -= size
        if 0 < count == room and len(order) > 1:
            chosen.append(int(order[np.argmin(sizes_N[order])]))
    is_held_out_N = np.isin(first_N, chosen)
    return np.flatnonzero(~is_held_out_N), np.flatnonzero(is_held_out_N)


def _shares(sizes: np.ndarray, *, fraction: float) -> np.ndarray:
    """Number of held-out examples of each class; the last example of a class is never held out.

    The share of every class is rounded down. The examples that are then missing are taken one by one: from classes with
    none held out so far, then from the others, the largest remainder first, equal ones in a random order. With at most
    `FEW_CLASSES` classes, each has at least one example held out, however small the fraction is. With many small
    classes, this would hold out half of all examples.
    """
    share = fraction * sizes
    most = np.maximum(0, sizes - 1)
    counts = np.minimum(share.astype(np.int64), most)
    missing = round(fraction * int(sizes.sum())) - int(counts.sum())
    without = (counts == 0) & (most > 0)
    if np.count_nonzero(most) <= FEW_CLASSES:
        missing = max(missing, int(without.sum()))
    drawn = permute_by_network(np.arange(len(sizes)), size=len(sizes), key=derive_key("held out classes", 0))
    order = np.lexsort((drawn, counts - share, ~without))
    counts[order[counts[order] < most[order]][: max(0, missing)]] += 1
    return counts


def hold_out(
    labels: np.ndarray,
    *,
    fraction: float,
    how: Literal["stratified", "last"],
    name: str,
    keys: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """(indices to train on, indices to validate on), always the same: a share of every label, or the last examples.

    keys: examples with equal keys are on one side; of the last examples, those that occur before are trained on. If
        this would hold out nothing, or more than twice the share, the split ignores the keys.

    Raises InputError if one of the two would be empty.
    """
    total = len(labels)
    if how == "last":
        is_late = np.arange(total) >= (cut := int(total * (1 - fraction)))
        if keys is not None:
            is_late &= ~np.isin(keys, keys[:cut])
        kept, held_out = np.flatnonzero(~is_late), np.flatnonzero(is_late)
    else:
        kept, held_out = stratified_split(labels, fraction=fraction, keys=keys)
    if keys is not None:
        divided = hold_out(labels, fraction=fraction, how=how, name=name)
        if not 0 < len(held_out) <= MOST_HELD_OUT * len(divided[1]):
            return divided
    if not len(kept) or not len(held_out):
        raise InputError(
            f"{name}: {total} examples are too few to keep {fraction:g} of them for validation",
            hint="give more examples, or a separate validation file (--valid)",
        )
    return kept, held_out
