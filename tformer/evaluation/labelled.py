"""How well a model labels examples: scores of all of them, then the report of its head's kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tformer.evaluation.classification import classification_report
from tformer.evaluation.multi_label import multi_label_report
from tformer.evaluation.predict import predict_scores
from tformer.evaluation.regression import regression_report
from tformer.objectives.base import Objective
from tformer.recipe.recipe import Recipe

REPORTS: dict[str, Callable[..., dict[str, Any]]] = {
    "classification": classification_report,
    "multi_label": multi_label_report,
    "regression": lambda labels, scores, names, **options: regression_report(labels, scores[:, 0], **options),
}
BRIEF = ("loss", "accuracy", "f1", "f1_macro", "mcc", "ece", "pearson", "spearman", "mae", "examples")


def evaluate_labelled(
    model: Any, objective: Objective, samples: Any, recipe: Recipe, *, should_stop: Callable[[], bool]
) -> dict[str, Any]:
    """The figures of a validation during training: one number each, without intervals and tables.

    Errors: InputError from the reports; an interruption gives an empty mapping.
    """
    kind = recipe.objectives[0].kind
    head = "regression" if kind == "regression" else "classifier"
    scores = predict_scores(model, samples, objective.collate, head=head, should_stop=should_stop)
    if should_stop():
        return {}
    report = REPORTS[kind](np.asarray(samples.labels), scores, recipe.data.labels, intervals=False)
    return {name: report[name] for name in BRIEF if name in report}
