"""Everything that is said of a classifier: accuracy, F1, Matthews' correlation, calibration, confusion, intervals.

Shapes: N examples, L classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np

from tformer.errors import InputError
from tformer.metrics import (
    accuracy,
    bootstrap_interval,
    confusion_matrix,
    expected_calibration_error,
    f1_binary,
    f1_macro,
    mcc,
    per_class,
)
from tformer.metrics.bootstrap import f1_macro_rows, mean_rows


def classification_report(
    labels: np.ndarray, scores: np.ndarray, names: Sequence[str], *, intervals: bool = True
) -> dict[str, Any]:
    """What `scores` [N, L] (before softmax) are worth against `labels` [N]; plain numbers, fit for JSON.

    - loss: mean negative log-likelihood in nats; accuracy; mcc; ece: expected calibration error;
    - f1: of the last class when there are two, else f1_macro;
    - precision_macro, recall_macro, f1_macro: means over the classes that occur among labels or predictions;
    - per_class: {name: {precision, recall, f1, support}}; confusion: rows are labels, columns predictions;
    - intervals: {accuracy, f1_macro: [low, high]}, 95 % by bootstrap over the examples; left out when not asked for.

    Raises InputError for no examples.
    """
    if not len(labels):
        raise InputError("there is nothing to evaluate: 0 examples")
    labels = np.asarray(labels, dtype=np.int64)
    count = len(names)
    log_p_NL = log_softmax(scores)
    guesses = scores.argmax(axis=1)
    confusion = confusion_matrix(labels, guesses, num_classes=count)
    classes = per_class(labels, guesses, num_classes=count)
    occurs_L = (confusion.sum(axis=0) + confusion.sum(axis=1)) > 0
    macro = f1_macro(labels, guesses, num_classes=count)
    report: dict[str, Any] = {
        "examples": len(labels),
        "loss": float(-log_p_NL[np.arange(len(labels)), labels].mean()),
        "accuracy": accuracy(labels, guesses),
        "f1": f1_binary(labels, guesses, positive=1) if count == 2 else macro,
        "f1_macro": macro,
        "precision_macro": float(np.mean([score.precision for score in classes], where=occurs_L)),
        "recall_macro": float(np.mean([score.recall for score in classes], where=occurs_L)),
        "mcc": mcc(labels, guesses),
        "ece": expected_calibration_error(np.exp(log_p_NL.max(axis=1)), labels == guesses),
        "per_class": {name: asdict(score) for name, score in zip(names, classes, strict=True)},
        "confusion": confusion.tolist(),
    }
    if intervals:
        f1_rows = partial(f1_macro_rows, num_classes=count)
        report["intervals"] = {
            "accuracy": list(bootstrap_interval(mean_rows, labels == guesses)),
            "f1_macro": list(bootstrap_interval(f1_rows, labels, guesses)),
        }
    return report


def log_softmax(scores: np.ndarray) -> np.ndarray:
    """fp64 [N, L]: log probabilities of scores."""
    shifted = scores.astype(np.float64) - scores.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
