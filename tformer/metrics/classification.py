"""Classification metrics: accuracy, precision, recall, F1, Matthews correlation, calibration error; multi-label F1.

Labels and predictions are integers 0 ... K - 1; for several labels per example, bool [N, L]. A ratio with a
denominator of 0 is 0, as in scikit-learn.

Shapes: N examples, K classes, L labels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

DEFAULT_BINS = 15


def accuracy(labels: ArrayLike, predictions: ArrayLike) -> float:
    """The share of correct predictions."""
    true_N, guess_N = _same_length(labels, predictions)
    return float((true_N == guess_N).mean())


def confusion_matrix(labels: ArrayLike, predictions: ArrayLike, *, num_classes: int) -> np.ndarray:
    """[K, K] counts: row = label, column = prediction. Raises ValueError for a class outside 0 ... K - 1."""
    true_N, guess_N = _same_length(labels, predictions)
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


def per_class(labels: ArrayLike, predictions: ArrayLike, *, num_classes: int) -> list[ClassScores]:
    """The scores of every class, absent ones included."""
    counts_KK = confusion_matrix(labels, predictions, num_classes=num_classes)
    scores = []
    for index in range(num_classes):
        hits, found, there = counts_KK[index, index], counts_KK[:, index].sum(), counts_KK[index].sum()
        scores.append(_scores(int(hits), int(found), int(there)))
    return scores


def f1_binary(labels: ArrayLike, predictions: ArrayLike, *, positive: int = 1) -> float:
    """F1 of one class against the rest, 2 PR / (P + R)."""
    true_N, guess_N = _same_length(labels, predictions)
    true_N, guess_N = true_N == positive, guess_N == positive
    return _scores(int((true_N & guess_N).sum()), int(guess_N.sum()), int(true_N.sum())).f1


def f1_macro(labels: ArrayLike, predictions: ArrayLike, *, num_classes: int) -> float:
    """The unweighted mean of the classes' F1 over the classes that occur among labels or predictions."""
    counts_KK = confusion_matrix(labels, predictions, num_classes=num_classes)
    scores = per_class(labels, predictions, num_classes=num_classes)
    occurs_K = (counts_KK.sum(0) + counts_KK.sum(1)) > 0
    return float(np.mean([score.f1 for score, occurs in zip(scores, occurs_K, strict=True) if occurs]))


def top_k_accuracy(labels_N: np.ndarray, scores_NL: np.ndarray, k: int) -> float:
    """The share of examples whose label is among the k classes with the highest scores; of equal ones the last."""
    order_NL = np.argsort(scores_NL, axis=1, kind="stable")
    return float((order_NL[:, -k:] == labels_N[:, None]).any(axis=1).mean())


def mcc(labels: ArrayLike, predictions: ArrayLike) -> float:
    """Matthews' correlation for any number of classes (Gorodkin 2004): 1 perfect, 0 chance or undefined.

    With c right of s, t_k true and p_k predicted counts: (c s - t.p) / sqrt((s^2 - p.p)(s^2 - t.t)).
    """
    true_N, guess_N = _same_length(labels, predictions)
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
    confidence_N, correct_N = np.asarray(confidences, dtype=np.float64), np.asarray(correct, dtype=np.float64)
    if confidence_N.shape != correct_N.shape or confidence_N.size == 0:
        raise ValueError(f"expected equal, non-empty lists, found shapes {confidence_N.shape} and {correct_N.shape}")
    edges = np.linspace(0.0, 1.0, num_bins + 1)
    bin_N = np.clip(np.searchsorted(edges, confidence_N, side="left") - 1, 0, num_bins - 1)
    count_M = np.bincount(bin_N, minlength=num_bins)
    there = count_M > 0
    means = [np.bincount(bin_N, of, minlength=num_bins)[there] / count_M[there] for of in (confidence_N, correct_N)]
    return means[0], means[1], count_M[there]


def _same_length(labels: ArrayLike, predictions: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    true_N, guess_N = np.asarray(labels, dtype=np.int64), np.asarray(predictions, dtype=np.int64)
    if true_N.shape != guess_N.shape or true_N.ndim != 1 or true_N.size == 0:
        raise ValueError(f"expected equal, non-empty lists, found shapes {true_N.shape} and {guess_N.shape}")
    return true_N, guess_N


def per_label(labels: ArrayLike, predictions: ArrayLike) -> list[ClassScores]:
    """Precision, recall, F1 and number of examples of every label."""
    true_NL, guess_NL = _tables(labels, predictions)
    counts = (np.sum(table, axis=0).tolist() for table in (true_NL & guess_NL, guess_NL, true_NL))
    return [_scores(*column) for column in zip(*counts, strict=True)]


def micro_scores(labels: ArrayLike, predictions: ArrayLike) -> ClassScores:
    """The scores over all decisions (micro average); `support` is the number of true labels."""
    true_NL, guess_NL = _tables(labels, predictions)
    return _scores(int((true_NL & guess_NL).sum()), int(guess_NL.sum()), int(true_NL.sum()))


def multi_label_f1_macro(labels: ArrayLike, predictions: ArrayLike) -> float:
    """Mean F1 of all labels (macro average); 0 for one that neither occurs nor is predicted, as in scikit-learn."""
    return float(np.mean([score.f1 for score in per_label(*_tables(labels, predictions))]))


def subset_accuracy(labels: ArrayLike, predictions: ArrayLike) -> float:
    """The share of examples with all labels correct."""
    true_NL, guess_NL = _tables(labels, predictions)
    return float((true_NL == guess_NL).all(axis=1).mean())


def _scores(hits: int, found: int, there: int) -> ClassScores:
    precision, recall = (hits / whole if whole else 0.0 for whole in (found, there))
    return ClassScores(precision, recall, 2 * hits / (found + there) if found + there else 0.0, there)


def _tables(labels: ArrayLike, predictions: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    true_NL, guess_NL = np.asarray(labels, dtype=bool), np.asarray(predictions, dtype=bool)
    if true_NL.shape != guess_NL.shape or true_NL.ndim != 2 or len(true_NL) == 0:
        raise ValueError(f"expected equal, non-empty tables, found shapes {true_NL.shape} and {guess_NL.shape}")
    return true_NL, guess_NL
