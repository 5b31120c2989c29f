"""Everything that is said of a model that predicts a score: its errors, and how it orders the examples.

Shapes: N examples.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tformer.errors import InputError
from tformer.metrics import bootstrap_interval, pearson, spearman
from tformer.metrics.bootstrap import pearson_rows, spearman_rows


def regression_report(labels: np.ndarray, scores: np.ndarray, *, intervals: bool = True) -> dict[str, Any]:
    """What predicted `scores` [N] are worth against `labels` [N]; plain numbers, fit for JSON.

    - loss: mean squared error; mae: mean absolute error; pearson, spearman: correlations;
    - intervals: {pearson, spearman: [low, high]}, 95 % by bootstrap over the examples; left out when not asked for.

    Raises InputError for fewer than 2 examples, of which there is no correlation.
    """
    if len(labels) < 2:
        raise InputError(f"a correlation needs at least 2 examples, found {len(labels)}")
    true_N, guess_N = labels.astype(np.float64), scores.astype(np.float64)
    error_N = guess_N - true_N
    report: dict[str, Any] = {
        "examples": len(labels),
        "loss": float(np.mean(error_N**2)),
        "mae": float(np.mean(np.abs(error_N))),
        "pearson": pearson(true_N, guess_N),
        "spearman": spearman(true_N, guess_N),
    }
    if intervals:
        places = (np.unique(values, return_inverse=True)[1] for values in (true_N, guess_N))
        report["intervals"] = {
            "pearson": list(bootstrap_interval(pearson_rows, true_N, guess_N)),
            "spearman": list(bootstrap_interval(spearman_rows, *places)),
        }
    return report
