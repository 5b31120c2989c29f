"""Several labels per example: F1 over all decisions (micro), F1 of the labels (macro), examples entirely right.

Shapes: N examples, L labels; both sides bool [N, L].
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from tformer.metrics.classification import ClassScores


def per_label(labels: ArrayLike, predictions: ArrayLike) -> list[ClassScores]:
    """Precision, recall, F1 and number of examples of every label."""
    true_NL, guess_NL = _tables(labels, predictions)
    counts = (np.sum(table, axis=0).tolist() for table in (true_NL & guess_NL, guess_NL, true_NL))
    return [_scores(*column) for column in zip(*counts, strict=True)]


def micro_scores(labels: ArrayLike, predictions: ArrayLike) -> ClassScores:
    """The same over all decisions together; `support` counts the labels that there are."""
    true_NL, guess_NL = _tables(labels, predictions)
    return _scores(int((true_NL & guess_NL).sum()), int(guess_NL.sum()), int(true_NL.sum()))


def multi_label_f1_macro(labels: ArrayLike, predictions: ArrayLike) -> float:
    """The unweighted mean F1 of the labels that occur on either side; 0 when none does."""
    true_NL, guess_NL = _tables(labels, predictions)
    occurs_L = (true_NL | guess_NL).any(axis=0)
    scores = [score.f1 for score, occurs in zip(per_label(true_NL, guess_NL), occurs_L, strict=True) if occurs]
    return float(np.mean(scores)) if scores else 0.0


def subset_accuracy(labels: ArrayLike, predictions: ArrayLike) -> float:
    """The share of examples whose labels are all right."""
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
