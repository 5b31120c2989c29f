"""Labelled examples with a model's scores: the one value that reports, curves, thresholds and mistakes are read from.

Thresholds say above which probability a label is given; they are stored with a checkpoint. A model of several labels
has one for each label; one of two classes has one for the second class, which is given above it, and the first
otherwise. Without them a label is given above 0.5, and of classes the most probable one.

Shapes: N examples, L classes or labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from tformer.metrics.classification import calibration_curve
from tformer.metrics.thresholds import Curve, choose_threshold, parse_rule
from tformer.nn.classification_heads import LabelKind
from tformer.support.bounds import mistake_of
from tformer.support.errors import InputError, visible
from tformer.support.files import read_bounded, write_text
from tformer.support.formatting import json_text, listed

FILE = "thresholds.json"
MAX_FILE_BYTES = 16 << 20
MAX_LISTED = 20
DEFAULT = 0.5
MAX_CURVES = 10  # precision-recall curves of classes; with more there is one of all decisions
CALIBRATION_BINS = 10


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
            raise _damaged(file, mistake_of(error.errors()[0])) from None
        own = decided_labels(kind, names)
        if list(found.values) != list(own) or not all(0 <= value <= 1 for value in found.values.values()):
            raise _damaged(file, f"expected a number from 0 to 1 for {listed(own, MAX_LISTED)}")
        return found

    def save(self, checkpoint: Path) -> Path:
        """Store them with a checkpoint, and return their file."""
        write_text(checkpoint / FILE, json_text(asdict(self), indent=1))
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


def decide(kind: LabelKind, values_NL: np.ndarray, thresholds: Thresholds | float | None) -> np.ndarray:
    """The classes, int [N], or labels, bool [N, L], that are given for these probabilities."""
    limits = list(thresholds.values.values()) if isinstance(thresholds, Thresholds) else thresholds
    if kind == "labels":
        return values_NL > (DEFAULT if limits is None else np.array(limits))
    return values_NL.argmax(axis=1) if limits is None else (values_NL[:, 1:] > np.array(limits))[:, 0].astype(np.int64)


def probabilities(kind: LabelKind, scores_NL: np.ndarray) -> np.ndarray:
    """fp64 [N, L]: probabilities of classes (with sum 1) or of each label; scores of a regression unchanged."""
    scores_NL = scores_NL.astype(np.float64)
    if kind == "score":
        return scores_NL
    if kind == "labels":
        return np.exp(-np.logaddexp(0.0, -scores_NL))
    shifted_NL = np.exp(scores_NL - scores_NL.max(axis=1, keepdims=True))
    return shifted_NL / shifted_NL.sum(axis=1, keepdims=True)


@dataclass(frozen=True)
class Scored:
    """Labelled examples with a model's scores.

    Attributes:
        names: of the classes or labels; () of a regression.
        labels: classes int [N], bool [N, L] for several labels, or scores [N].
        scores: [N, L] before softmax or sigmoid; of a regression [N, 1].
        thresholds: a label, or the second of two classes, is given above them; None: as `decide` says.
    """

    kind: LabelKind
    names: Sequence[str]
    labels: np.ndarray
    scores: np.ndarray
    thresholds: Thresholds | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @cached_property
    def values(self) -> np.ndarray:
        """fp64 [N, L]: `probabilities` of the scores."""
        return probabilities(self.kind, self.scores)

    @cached_property
    def guesses(self) -> np.ndarray:
        """The model's answers in the form of the labels."""
        return self.values[:, 0] if self.kind == "score" else decide(self.kind, self.values, self.thresholds)

    @cached_property
    def truth(self) -> np.ndarray:
        """bool [N, L]: the classes or labels of each example."""
        return self.labels.astype(bool) if self.kind == "labels" else self.labels[:, None] == np.arange(len(self.names))

    @property
    def decisions(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """{name: (truth bool [N], probability [N])} of the second of two classes, of every class, or of every label."""
        shown = slice(1 if self.has_two_classes else 0, None)
        return dict(zip(self.names[shown], zip(self.truth.T[shown], self.values.T[shown], strict=True), strict=True))

    @property
    def has_two_classes(self) -> bool:
        return self.kind == "classes" and len(self.names) == 2

    def in_words(self, label: Any) -> str | float | list[str]:
        """One of `labels` or `guesses` by name: a class, a list of labels, or a score."""
        if self.kind == "score":
            return float(label)
        return (
            self.names[int(label)]
            if self.kind == "classes"
            else [self.names[n] for n in np.flatnonzero(label).tolist()]
        )


def choose_thresholds(rule: str, scored: Scored) -> tuple[Thresholds, list[str]]:
    """Thresholds of a rule on these examples, and the labels that keep 0.5. A number is the threshold of all labels.

    Raises InputError for another rule, and for a model that decides otherwise.
    """
    own = decided_labels(scored.kind, scored.names)
    name, least = parse_rule(rule)
    if not name:
        return Thresholds("as given", dict.fromkeys(own, least)), []
    found = {label: choose_threshold(*decision, name, least) for label, decision in scored.decisions.items()}
    values = {label: DEFAULT if value is None else value for label, value in found.items()}
    return Thresholds(rule, values), [label for label, value in found.items() if value is None]


def curves_of(scored: Scored) -> dict[str, Any]:
    """Curves of the probabilities of classes or labels, as scikit-learn draws them.

    - precision_recall: {name: {precision, recall, average_precision}} of each of the `decisions`; of more than
      `MAX_CURVES` names one curve of all decisions together;
    - calibration: {confidence, accuracy, examples} of ten bins: the probability of the second of two classes and its
      share, of the predicted class and its accuracy, or of all decisions about labels.
    """
    truth_NL, values_NL, decisions = scored.truth, scored.values, scored.decisions
    if len(scored.names) > MAX_CURVES:
        decisions = {"all decisions": (truth_NL.ravel(), values_NL.ravel())}
    curves = {name: Curve.of(*decision) for name, decision in decisions.items()}
    if scored.kind == "labels":
        right, confident = truth_NL.ravel(), values_NL.ravel()
    elif scored.has_two_classes:
        right, confident = truth_NL[:, 1], values_NL[:, 1]
    else:
        right, confident = scored.labels == values_NL.argmax(axis=1), values_NL.max(axis=1)
    bins = calibration_curve(confident, right, num_bins=CALIBRATION_BINS)
    return {
        "precision_recall": {
            name: {
                "precision": curve.precision.tolist(),
                "recall": curve.recall.tolist(),
                "average_precision": curve.average_precision,
            }
            for name, curve in curves.items()
        },
        "calibration": dict(zip(("confidence", "accuracy", "examples"), map(np.ndarray.tolist, bins), strict=True)),
    }
