"""Everything that is said of a model that gives each example any number of labels.

Shapes: N examples, L labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from tformer.errors import InputError
from tformer.metrics import bootstrap_interval, micro_scores, multi_label_f1_macro, per_label, subset_accuracy
from tformer.metrics.bootstrap import mean_rows


def multi_label_report(
    labels: np.ndarray, scores: np.ndarray, names: Sequence[str], *, intervals: bool = True
) -> dict[str, Any]:
    """What `scores` [N, L] (before sigmoid; a label is given above 0) are worth against `labels` bool [N, L].

    - loss: mean binary cross-entropy per decision, in nats;
    - accuracy: share of examples whose labels are all right (subset accuracy);
    - f1, precision, recall: over all decisions together (micro); f1_macro: mean over the labels that occur;
    - per_class: {name: {precision, recall, f1, support}};
    - intervals: {accuracy, f1: [low, high]}, 95 % by bootstrap over the examples; left out when not asked for.

    Raises InputError for no examples.
    """
    if not len(labels):
        raise InputError("there is nothing to evaluate: 0 examples")
    true_NL, guess_NL = np.asarray(labels, dtype=bool), scores > 0
    wide_NL = scores.astype(np.float64)
    micro = micro_scores(true_NL, guess_NL)
    report: dict[str, Any] = {
        "examples": len(true_NL),
        "loss": float(np.logaddexp(0.0, np.where(true_NL, -wide_NL, wide_NL)).mean()),
        "accuracy": subset_accuracy(true_NL, guess_NL),
        "f1": micro.f1,
        "f1_macro": multi_label_f1_macro(true_NL, guess_NL),
        "precision": micro.precision,
        "recall": micro.recall,
        "per_class": {name: asdict(score) for name, score in zip(names, per_label(true_NL, guess_NL), strict=True)},
    }
    if intervals:
        hits_N = (true_NL & guess_NL).sum(axis=1)
        given_N = true_NL.sum(axis=1) + guess_NL.sum(axis=1)
        report["intervals"] = {
            "accuracy": list(bootstrap_interval(mean_rows, (true_NL == guess_NL).all(axis=1))),
            "f1": list(bootstrap_interval(_micro_f1_rows, hits_N, given_N)),
        }
    return report


def _micro_f1_rows(hits_SN: np.ndarray, given_SN: np.ndarray) -> np.ndarray:
    hits_S, given_S = hits_SN.sum(axis=1), given_SN.sum(axis=1)
    return np.divide(2 * hits_S, given_S, out=np.zeros(len(hits_S)), where=given_S > 0)
