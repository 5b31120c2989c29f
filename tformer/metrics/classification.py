"""Classification metrics: accuracy, precision, recall, F1, Matthews correlation, calibration error; multi-label F1.

Labels and predictions are integers 0 ... K - 1; for several labels per example, bool [N, L]. A ratio with a
denominator of 0 is 0, as in scikit-learn.

Shapes: N examples, K classes, L labels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

DEFAULT_BINS = 15


def accuracy(labels: ArrayLike, predictions: ArrayLike) -> float:
    """The share of correct predictions."""
    true_N, guess_N = _classes(labels, predictions)
    return float((true_N == guess_N).mean())


def confusion_matrix(labels: ArrayLike, predictions: ArrayLike, *, num_classes: int) -> np.ndarray:
    """[K, K] counts: row = label, column = prediction. Raises ValueError for a class outside 0 ... K - 1."""
    true_N, guess_N = _classes(labels, predictions)
    for name, values in (("label", true_N), ("prediction", guess_N)):
        if values.min() < 0 or values.max() >= num_classes:
            wrong = values[(values < 0) | (values >= num_classes)][0]
            raise ValueError(f"{name} {wrong} is not one of the {num_classes} classes")
    return np.bincount(true_N * num_classes + guess_N, minlength=num_classes**2).reshape(num_classes, num_classes)


@dataclass(frozen=True)
class ClassScores:
    """Precision, recall, F1 and number of examples of one class."""

    precision: float
    recall: float
    f1: float
    support: int

    @classmethod
    def of(cls, hits: int, found: int, there: int) -> ClassScores:
        """hits: correct predictions of the class; found: all predictions of it; there: its examples."""
        precision, recall = (hits / whole if whole else 0.0 for whole in (found, there))
        return cls(precision, recall, 2 * hits / (found + there) if found + there else 0.0, there)


def per_class(labels: ArrayLike, predictions: ArrayLike, *, num_classes: int) -> list[ClassScores]:
    """The scores of every class, absent ones included."""
    counts_KK = confusion_matrix(labels, predictions, num_classes=num_classes)
    columns = (counts_KK.diagonal().tolist(), counts_KK.sum(axis=0).tolist(), counts_KK.sum(axis=1).tolist())
    return [ClassScores.of(*counts) for counts in zip(*columns, strict=True)]


def per_label(labels: ArrayLike, predictions: ArrayLike) -> list[ClassScores]:
    """The scores of every label."""
    true_NL, guess_NL = _same_shape(labels, predictions, bool, dimensions=2)
    columns = (table.sum(axis=0).tolist() for table in (true_NL & guess_NL, guess_NL, true_NL))
    return [ClassScores.of(*counts) for counts in zip(*columns, strict=True)]


def micro_scores(labels: ArrayLike, predictions: ArrayLike) -> ClassScores:
    """The scores over all decisions about labels (micro average); `support` is the number of true labels."""
    [scores] = per_label(*(table.reshape(-1, 1) for table in _same_shape(labels, predictions, bool, dimensions=2)))
    return scores


def f1_binary(labels: ArrayLike, predictions: ArrayLike, *, positive: int = 1) -> float:
    """F1 of one class against the rest, 2 PR / (P + R)."""
    [scores] = per_label(*((side == positive)[:, None] for side in _classes(labels, predictions)))
    return scores.f1


def f1_macro(labels: ArrayLike, predictions: ArrayLike, *, num_classes: int) -> float:
    """The unweighted mean of the classes' F1 over the classes that occur among labels or predictions."""
    sides = _classes(labels, predictions)
    occurring = np.unique(np.concatenate(sides))
    scores = per_class(*sides, num_classes=num_classes)
    return float(np.mean([scores[index].f1 for index in occurring]))


def subset_accuracy(labels: ArrayLike, predictions: ArrayLike) -> float:
    """The share of examples with all labels correct."""
    true_NL, guess_NL = _same_shape(labels, predictions, bool, dimensions=2)
    return float((true_NL == guess_NL).all(axis=1).mean())


def top_k_accuracy(labels_N: np.ndarray, scores_NL: np.ndarray, k: int) -> float:
    """The share of examples whose label is among the k highest scores; it comes last among equal scores."""
    order_NL = np.argsort(scores_NL, axis=1, kind="stable")
    return float((order_NL[:, -k:] == labels_N[:, None]).any(axis=1).mean())


def mcc(labels: ArrayLike, predictions: ArrayLike) -> float:
    """Matthews' correlation for any number of classes (Gorodkin 2004): 1 perfect, 0 chance or undefined.

    With c right of s, t_k true and p_k predicted counts: (c s - t.p) / sqrt((s^2 - p.p)(s^2 - t.t)).
    """
    true_N, guess_N = _classes(labels, predictions)
    num_classes = int(max(true_N.max(), guess_N.max())) + 1
    counts_KK = confusion_matrix(true_N, guess_N, num_classes=num_classes)
    # Python's integers: products of large counts would overflow.
    true_K, guess_K = counts_KK.sum(1).tolist(), counts_KK.sum(0).tolist()
    right, total = int(np.trace(counts_KK)), int(counts_KK.sum())
    covariance = right * total - sum(t * p for t, p in zip(true_K, guess_K, strict=True))
    spread = (total**2 - sum(p * p for p in guess_K)) * (total**2 - sum(t * t for t in true_K))
    return covariance / math.sqrt(spread) if spread else 0.0


def expected_calibration_error(confidences: ArrayLike, correct: ArrayLike, *, num_bins: int = DEFAULT_BINS) -> float:
    """Mean gap between confidence and accuracy over equal bins of confidence, weighted by their sizes (1706.04599).

    `confidences` are the probabilities of the predicted classes, `correct` whether they were right. Bins are
    (0, 1/M], (1/M, 2/M], ..., the first includes 0.
    """
    confident_M, correct_M, count_M = calibration_curve(confidences, correct, num_bins=num_bins)
    return float((np.abs(confident_M - correct_M) * count_M).sum() / count_M.sum())


def calibration_curve(
    confidences: ArrayLike, correct: ArrayLike, *, num_bins: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(mean confidence, share that is correct, number of examples) of each bin [M] that is not empty.

    Bins as in `expected_calibration_error`.
    """
    confidence_N, correct_N = _same_shape(confidences, correct, np.float64)
    edges = np.linspace(0.0, 1.0, num_bins + 1)
    bin_N = np.clip(np.searchsorted(edges, confidence_N, side="left") - 1, 0, num_bins - 1)
    count_M = np.bincount(bin_N, minlength=num_bins)
    there = count_M > 0
    means = [np.bincount(bin_N, of, minlength=num_bins)[there] / count_M[there] for of in (confidence_N, correct_N)]
    return means[0], means[1], count_M[there]


def _classes(labels: ArrayLike, predictions: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    return _same_shape(labels, predictions, np.int64)


def _same_shape(one: ArrayLike, other: ArrayLike, dtype: Any, *, dimensions: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Both as arrays of this type. Raises ValueError for unequal or empty ones."""
    first, second = np.asarray(one, dtype=dtype), np.asarray(other, dtype=dtype)
    if first.shape != second.shape or first.ndim != dimensions or not len(first):
        raise ValueError(f"expected equal, non-empty lists, found shapes {first.shape} and {second.shape}")
    return first, second
