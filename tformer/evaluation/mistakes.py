"""The examples that a model gets wrong, its surest mistakes first: what a person reads to understand it.

- one class: the predicted class is another; sure is who gives it a high probability.
- several labels: any of them is decided wrongly; sure is whose surest wrong decision is.
- a score: every example, by the distance between score and prediction.
"""

# Shapes: N examples, L labels.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tformer.nn.classification_heads import LabelKind

THRESHOLD = 0.5


@dataclass(frozen=True)
class Mistake:
    """What was wrong about the example `index`.

    `sureness` is the probability of the wrong decision, or the distance to the score. `probabilities` are those of all
    labels, the highest first; none for a score.
    """

    index: int
    label: str | float | list[str]
    prediction: str | float | list[str]
    sureness: float
    probabilities: dict[str, float]


def find_mistakes(kind: LabelKind, labels: np.ndarray, values_NL: np.ndarray, names: Sequence[str]) -> list[Mistake]:
    """The mistakes of predictions.

    Args:
        labels: classes [N], zeros and ones [N, L], or scores [N].
        values_NL: probabilities, or predicted scores [N, 1].
        names: of the labels.
    """
    find = {"classes": _wrong_classes, "labels": _wrong_labels, "score": _distances}[kind]
    return sorted(find(labels, values_NL, names), key=lambda mistake: (-mistake.sureness, mistake.index))


def _wrong_classes(labels_N: np.ndarray, values_NL: np.ndarray, names: Sequence[str]) -> list[Mistake]:
    guess_N = values_NL.argmax(axis=1)
    return [
        Mistake(
            index=index,
            label=names[labels_N[index]],
            prediction=names[guess_N[index]],
            sureness=float(values_NL[index, guess_N[index]]),
            probabilities=_by_name(values_NL[index], names),
        )
        for index in map(int, np.flatnonzero(guess_N != labels_N))
    ]


def _wrong_labels(labels_NL: np.ndarray, values_NL: np.ndarray, names: Sequence[str]) -> list[Mistake]:
    truth_NL, guess_NL = labels_NL.astype(bool), values_NL > THRESHOLD
    sure_NL = np.where(truth_NL != guess_NL, np.maximum(values_NL, 1 - values_NL), 0.0)
    return [
        Mistake(
            index=index,
            label=[names[label] for label in np.flatnonzero(truth_NL[index]).tolist()],
            prediction=[names[label] for label in np.flatnonzero(guess_NL[index]).tolist()],
            sureness=float(sure_NL[index].max()),
            probabilities=_by_name(values_NL[index], names),
        )
        for index in map(int, np.flatnonzero((truth_NL != guess_NL).any(axis=1)))
    ]


def _distances(labels_N: np.ndarray, values_N1: np.ndarray, names: Sequence[str]) -> list[Mistake]:
    pairs = zip(labels_N.tolist(), values_N1[:, 0].tolist(), strict=True)
    return [Mistake(index, label, guess, abs(guess - label), {}) for index, (label, guess) in enumerate(pairs)]


def _by_name(values_L: np.ndarray, names: Sequence[str]) -> dict[str, float]:
    return {names[label]: float(values_L[label]) for label in np.argsort(-values_L, kind="stable")}
