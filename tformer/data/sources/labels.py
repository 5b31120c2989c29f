"""Labels: reading, collecting, encoding as numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from tformer.data.sources.files import Errors
from tformer.data.sources.labelled_columns import is_number
from tformer.data.sources.tables import whole_characters
from tformer.errors import InputError, did_you_mean

SHOWN_CHARACTERS = 60  # of a label in a message
MAX_SCORE = float(np.finfo(np.float32).max)  # what a model computes with


@dataclass(frozen=True)
class LabelRule:
    """What a label may be."""

    needed: bool = True
    numeric: bool = False  # a finite number, also in float32
    multi: bool = False  # any number of labels, also none
    separator: str = "|"


def collect_labels(labels: Iterable[str], *, multi: bool = False, separator: str = "|") -> tuple[str, ...]:
    """All different labels in order. InputError when there is nothing to learn: one class only, or no label."""
    found = set(labels)
    if multi:
        found = {part for label in found for part in split_labels(label, separator)}
        if not found:
            raise InputError("the training data has no label in any row")
    elif len(found) < 2:
        one = f"one class only, '{_shown(next(iter(found)))}'" if found else "no rows"
        raise InputError(f"the training data has {one}; at least two classes are needed")
    if all(is_number(label) and math.isfinite(float(label)) for label in found):
        return tuple(sorted(found, key=lambda label: (float(label), label)))
    return tuple(sorted(found))


def split_labels(label: str, separator: str) -> list[str]:
    """The labels of one example."""
    return [part for each in label.split(separator) if (part := each.strip())]


@dataclass(frozen=True)
class LabelIndex:
    """Label names in order. InputError for two of the same name."""

    names: tuple[str, ...]
    multi: bool = False
    separator: str = "|"

    def __post_init__(self) -> None:
        if len(set(self.names)) != len(self.names):
            twice = next(name for name in self.names if self.names.count(name) > 1)
            raise InputError(f"data.labels: '{twice}' is there more than once")

    def __len__(self) -> int:
        return len(self.names)

    def encode(self, label: str, place: str) -> int | np.ndarray:
        """The label's number, or bool [L] when there may be several; InputError for an unknown one."""
        if not self.multi:
            return self._find(label, place)
        flags = np.zeros(len(self.names), dtype=bool)
        flags[[self._find(part, place) for part in split_labels(label, self.separator)]] = True
        return flags

    def encode_all(self, labels: Sequence[str], places: Sequence[str]) -> np.ndarray:
        """int64 [N], or bool [N, L] when there may be several."""
        values = [self.encode(label, place) for label, place in zip(labels, places, strict=True)]
        if self.multi:
            return np.array(values, dtype=bool).reshape(len(values), len(self.names))
        return np.array(values, dtype=np.int64)

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.names)}

    def _find(self, label: str, place: str) -> int:
        number = self._numbers.get(label)
        if number is None:
            raise InputError(
                f"{place}: unknown label '{_shown(label)}', not one of the training data; "
                f"{did_you_mean(label, map(_shown, self.names))}"
            )
        return number


def read_label(value: Any, rule: LabelRule, *, place: str, errors: Errors = "strict") -> str | None:
    """A label as text: what json and Parquet hold as numbers, truth values or lists included.

    None for one that is not there and not needed. InputError when it is not what the rule says.
    """
    if isinstance(value, list):
        label = _join(value, rule, place=place)
    elif isinstance(value, bool):
        label = str(value).lower()
    elif value is None or isinstance(value, str | int | float):
        label = "" if value is None or value != value else str(value).strip()
    else:
        raise InputError(f"{place}: the label should be text or a number, found {type(value).__name__}")
    label = whole_characters(label, place=place, errors=errors)
    if not rule.needed:
        return label or None
    if not label and not rule.multi:
        raise InputError(f"{place}: the label is {'empty' if value == value else 'NaN'}")
    if rule.numeric:
        _require_score(label, place=place)
    return label


def _require_score(label: str, *, place: str) -> None:
    if not (is_number(label) and math.isfinite(float(label))):
        raise InputError(f"{place}: the label '{_shown(label)}' is not a finite number, which a score must be")
    if abs(float(label)) > MAX_SCORE:
        raise InputError(f"{place}: the label '{_shown(label)}' is too large for a score, at most {MAX_SCORE:.3g}")


def _join(values: Sequence[Any], rule: LabelRule, *, place: str) -> str:
    for value in values:
        if not isinstance(value, str):
            raise InputError(f"{place}: the labels in a list should be text, found {type(value).__name__}")
        if rule.separator in value:
            raise InputError(
                f"{place}: the label '{value}' holds the separator of labels, '{rule.separator}'",
                hint="choose another with --set data.label_separator=...",
            )
    if len(values) != 1 and not rule.multi and rule.needed:
        raise InputError(
            f"{place}: expected one label, found {len(values)}", hint="several are learned by --objective multi_label"
        )
    return rule.separator.join(values)


def _shown(label: str) -> str:
    return label if len(label) <= SHOWN_CHARACTERS else f"{label[:SHOWN_CHARACTERS]}..."
