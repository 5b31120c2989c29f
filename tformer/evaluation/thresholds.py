"""Thresholds of a classifier: above which probability it gives a label. They are stored with its checkpoint.

A model of several labels has one for each label; one of two classes has one for the second class, which is given above
it, and the first otherwise. Without them a label is given above 0.5, and of classes the most probable one.

Shapes: N examples, L labels.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter, ValidationError

from tformer.metrics.thresholds import choose_threshold, parse_rule
from tformer.nn.classification_heads import LabelKind
from tformer.support.errors import InputError, visible
from tformer.support.files import read_bounded, write_text
from tformer.support.formatting import listed

FILE = "thresholds.json"
MAX_FILE_BYTES = 16 << 20
MAX_LISTED = 20
DEFAULT = 0.5


@dataclass(frozen=True)
class Thresholds:
    """The threshold of each label that has one, by its name, and the rule that chose them."""

    rule: str
    values: dict[str, float]

    @classmethod
    def load(cls, checkpoint: Path, kind: LabelKind, names: Sequence[str]) -> Thresholds | None:
        """Those stored with a checkpoint, or None. Raises InputError for a damaged file, and for other labels."""
        file = checkpoint / FILE
        if not file.is_file():
            return None
        try:
            found = TypeAdapter(cls).validate_json(read_bounded(file, max_bytes=MAX_FILE_BYTES), strict=True)
        except ValidationError as error:
            raise _damaged(file, error.errors()[0]["msg"]) from None
        own = decided_labels(kind, names)
        if list(found.values) != list(own) or not all(0 <= value <= 1 for value in found.values.values()):
            raise _damaged(file, f"expected a number from 0 to 1 for {listed(own, MAX_LISTED)}")
        return found

    def save(self, checkpoint: Path) -> Path:
        """Store them with a checkpoint."""
        write_text(checkpoint / FILE, json.dumps(asdict(self), ensure_ascii=False, indent=1) + "\n")
        return checkpoint / FILE

    def describe(self) -> str:
        """`threshold 0.3712 of 'spam' (best-f1)`."""
        shown = [f"{value:.4f} of '{visible(name)}'" for name, value in self.values.items()]
        return f"threshold{'s' * (len(shown) > 1)} {listed(shown, MAX_LISTED)} ({self.rule})"


def _damaged(file: Path, why: str) -> InputError:
    return InputError(
        f"{file} is damaged: {why}", hint="delete it, or choose again: tformer evaluate --threshold best-f1"
    )


def decided_labels(kind: LabelKind, names: Sequence[str]) -> Sequence[str]:
    """The labels that have a threshold. Raises InputError for a model that decides otherwise."""
    if kind == "labels":
        return names
    if kind == "score" or len(names) != 2:
        found = "a score" if kind == "score" else f"{len(names)} classes"
        raise InputError(f"--threshold is for two classes or several labels per example, the model has {found}")
    return names[1:]


def choose_thresholds(
    rule: str, kind: LabelKind, names: Sequence[str], labels: np.ndarray, values_NL: np.ndarray
) -> tuple[Thresholds, Sequence[str]]:
    """The thresholds of a rule on labelled examples, and the labels that keep 0.5; of a number that one for all.

    labels: classes [N] or bool [N, L]; values_NL: probabilities.
    """
    own = decided_labels(kind, names)
    truth_NL = labels.astype(bool) if kind == "labels" else labels[:, None] == 1
    name, least = parse_rule(rule)
    if not name:
        return Thresholds("as given", dict.fromkeys(own, least)), []
    columns = zip(own, truth_NL.T, values_NL.T[-len(own) :], strict=True)
    found = {label: choose_threshold(truth_N, value_N, name, least) for label, truth_N, value_N in columns}
    kept = [label for label, value in found.items() if value is None]
    return Thresholds(rule, {label: DEFAULT if value is None else value for label, value in found.items()}), kept


def decide(kind: LabelKind, values_NL: np.ndarray, thresholds: Thresholds | float | None) -> np.ndarray:
    """The classes, int [N], or labels, bool [N, L], that are given for these probabilities."""
    limits = list(thresholds.values.values()) if isinstance(thresholds, Thresholds) else thresholds
    if kind == "labels":
        return values_NL > (DEFAULT if limits is None else np.array(limits))
    return values_NL.argmax(axis=1) if limits is None else (values_NL[:, 1:] > np.array(limits))[:, 0].astype(np.int64)
