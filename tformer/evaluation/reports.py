"""Evaluation reports of labelled examples: classification, multi-label classification and regression.

Shapes: N examples, L classes or labels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np

from tformer.evaluation.scored import Scored, Thresholds
from tformer.metrics.classification import (
    accuracy,
    confusion_matrix,
    expected_calibration_error,
    f1_macro,
    mcc,
    micro_scores,
    per_class,
    per_label,
    subset_accuracy,
    top_k_accuracy,
)
from tformer.metrics.statistics import (
    bootstrap_interval,
    distinct_places,
    f1_macro_rows,
    mean_rows,
    pearson,
    spearman,
)
from tformer.nn.classification_heads import LabelKind
from tformer.recipe.recipe import Recipe
from tformer.support.errors import InputError, visible
from tformer.support.formatting import aligned, as_cell, fitted

TOP = 5

Resampled = dict[str, tuple[Any, ...]]
"""{metric: (its statistic of resamples, what is resampled)}, the arguments of `bootstrap_interval`."""


def report_of(scored: Scored, *, intervals: bool = True) -> dict[str, Any]:
    """The metrics of labelled examples as plain numbers for JSON; the thresholds too, if there are any.

    Of classes:
    - loss: mean negative log-likelihood in nats; accuracy; mcc; ece: expected calibration error;
    - accuracy_top5: share of labels among the five most probable classes; only of more than five;
    - f1_binary, positive: F1 of the last class, and its name; only of two classes;
    - precision_macro, recall_macro, f1_macro: means over the classes that occur among labels or predictions;
    - per_class: {name: {precision, recall, f1, support}}; confusion: rows are labels, columns predictions.

    Of several labels for each example:
    - loss: mean binary cross-entropy per decision, in nats;
    - accuracy: share of examples with all labels correct (subset accuracy);
    - f1_micro, precision_micro, recall_micro: over all decisions together;
    - f1_macro: mean over all labels, 0 for an absent one; per_class as above.

    Of scores: loss: mean squared error; mae: mean absolute error; pearson, spearman: correlations.

    intervals: add {metric: [low, high]} of two metrics, 95 % by bootstrap over the examples.

    Raises InputError for fewer than two scores.
    """
    if scored.kind == "score" and len(scored) < 2:
        raise InputError(f"a correlation needs at least 2 examples, found {len(scored)}")
    metrics, resampled = METRICS[scored.kind](scored)
    report: dict[str, Any] = {"examples": len(scored), **metrics}
    if intervals:
        report["intervals"] = {name: list(bootstrap_interval(*each)) for name, each in resampled.items()}
    return report if scored.thresholds is None else report | {"thresholds": asdict(scored.thresholds)}


def _of_classes(scored: Scored) -> tuple[dict[str, Any], Resampled]:
    labels, guesses, names, values_NL = scored.labels, scored.guesses, scored.names, scored.values
    count = len(names)
    confusion = confusion_matrix(labels, guesses, num_classes=count)
    classes = per_class(labels, guesses, num_classes=count)
    occurs_L = (confusion.sum(axis=0) + confusion.sum(axis=1)) > 0
    metrics: dict[str, Any] = {
        "loss": float(-log_softmax(scored.scores)[np.arange(len(labels)), labels].mean()),
        "accuracy": accuracy(labels, guesses),
        **({f"accuracy_top{TOP}": top_k_accuracy(labels, scored.scores, TOP)} if count > TOP else {}),
        **({"f1_binary": classes[1].f1, "positive": names[1]} if count == 2 else {}),
        "f1_macro": f1_macro(labels, guesses, num_classes=count),
        "precision_macro": float(np.mean([score.precision for score in classes], where=occurs_L)),
        "recall_macro": float(np.mean([score.recall for score in classes], where=occurs_L)),
        "mcc": mcc(labels, guesses),
        "ece": expected_calibration_error(values_NL.max(axis=1), labels == values_NL.argmax(axis=1)),
        "per_class": {name: asdict(score) for name, score in zip(names, classes, strict=True)},
        "confusion": confusion.tolist(),
    }
    f1_rows = partial(f1_macro_rows, num_classes=count)
    return metrics, {"accuracy": (mean_rows, labels == guesses), "f1_macro": (f1_rows, labels, guesses)}


def log_softmax(scores: np.ndarray) -> np.ndarray:
    """fp64 [N, L]: log probabilities of scores."""
    shifted = scores.astype(np.float64) - scores.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def _of_labels(scored: Scored) -> tuple[dict[str, Any], Resampled]:
    true_NL, guess_NL, scores_NL = scored.truth, scored.guesses, scored.scores.astype(np.float64)
    labels, micro = per_label(true_NL, guess_NL), micro_scores(true_NL, guess_NL)
    metrics: dict[str, Any] = {
        "loss": float(np.logaddexp(0.0, np.where(true_NL, -scores_NL, scores_NL)).mean()),
        "accuracy": subset_accuracy(true_NL, guess_NL),
        "f1_micro": micro.f1,
        "f1_macro": float(np.mean([score.f1 for score in labels])),
        "precision_micro": micro.precision,
        "recall_micro": micro.recall,
        "per_class": {name: asdict(score) for name, score in zip(scored.names, labels, strict=True)},
    }
    hits_N, given_N = (true_NL & guess_NL).sum(axis=1), true_NL.sum(axis=1) + guess_NL.sum(axis=1)

    right_N = (true_NL == guess_NL).all(axis=1)
    return metrics, {"accuracy": (mean_rows, right_N), "f1_micro": (micro_f1_rows, hits_N, given_N)}


def micro_f1_rows(hits_SN: np.ndarray, given_SN: np.ndarray) -> np.ndarray:
    """[S]: micro F1 of each resample; what was right, and the number of labels and predictions together."""
    hits_S, given_S = hits_SN.sum(axis=1), given_SN.sum(axis=1)
    return np.divide(2 * hits_S, given_S, out=np.zeros(len(hits_S)), where=given_S > 0)


def _of_scores(scored: Scored) -> tuple[dict[str, Any], Resampled]:
    true_N, guess_N = scored.labels.astype(np.float64), scored.guesses
    places = distinct_places(true_N), distinct_places(guess_N)
    metrics = {
        "loss": float(np.mean((guess_N - true_N) ** 2)),
        "mae": float(np.mean(np.abs(guess_N - true_N))),
        "pearson": float(pearson(true_N, guess_N)),
        "spearman": float(spearman(*places)),
    }
    return metrics, {"pearson": (pearson, true_N, guess_N), "spearman": (spearman, *places)}


METRICS: dict[LabelKind, Callable[[Scored], tuple[dict[str, Any], Resampled]]] = {
    "classes": _of_classes,
    "labels": _of_labels,
    "score": _of_scores,
}
# Of a validation during training.
VALIDATION_METRICS = (
    *("loss", "accuracy", "f1_binary", "f1_macro", "f1_micro", "mcc", "ece", "pearson", "spearman", "mae", "examples"),
)


def label_kind_of(recipe: Recipe) -> LabelKind:
    """Kind of label of an example, by the recipe's objective."""
    kind = recipe.objectives[0].objective.head.label_kind
    assert kind is not None, "an objective without labels"
    return kind


# Reports as text.

SHOWN_METRICS = (
    *("accuracy", "f1_binary", "f1_macro", "f1_micro", "precision_macro", "precision_micro", "recall_macro"),
    *("recall_micro", "mcc", "ece", "pearson", "spearman", "mae", "loss"),
)
NAME_WIDTH, HEADING_WIDTH = 24, 12  # characters of a label at the start of a line and above a column
MAX_CLASSES = 20  # in a confusion matrix; with more, the most frequent confusions are listed
MAX_CONFUSIONS = 20


def report_lines(report: dict[str, Any]) -> Iterator[str]:
    """One metric per line with its 95 % interval where there is one, then one line per class, then the confusions."""
    intervals = report.get("intervals", {})
    for name in SHOWN_METRICS:
        if name in report:
            between = " [{:.4f}, {:.4f}]".format(*intervals[name]) if name in intervals else ""
            of_class = f" of '{_label(report['positive'], NAME_WIDTH)}'" if name == "f1_binary" else ""
            yield f"{name} {report[name]:.4f}{between}{of_class}"
    yield f"examples {report['examples']}"
    if "thresholds" in report:
        yield Thresholds(**report["thresholds"]).describe()
    if "per_class" in report:
        yield ""
        rows = [
            [
                _label(name, NAME_WIDTH),
                *(f"{scores[key]:.4f}" for key in ("precision", "recall", "f1")),
                str(scores["support"]),
            ]
            for name, scores in report["per_class"].items()
        ]
        heading = ["class", "precision", "recall", "f1", "support"]
        yield from aligned([heading, *rows], right=heading[1:])
    if "confusion" in report:
        yield ""
        yield from _confusion_lines(list(report["per_class"]), report["confusion"])


def breakdown_lines(by: dict[str, Any]) -> Iterator[str]:
    """The table of `--by`: from and to which position or length, how many predictions, and the metrics there."""
    names = list(dict.fromkeys(name for row in by["rows"] for name in row if name not in ("from", "to")))
    yield ""
    rows = [
        [
            str(row["from"]) if row["from"] == row["to"] else f"{row['from']}-{row['to']}",
            *(f"{row[name]:.4f}" if isinstance(row[name], float) else str(row[name]) for name in names),
        ]
        for row in by["rows"]
    ]
    yield from aligned([[by["axis"], *names], *rows], right=names)


def _confusion_lines(names: Sequence[str], counts: Sequence[Sequence[int]]) -> Iterator[str]:
    if len(names) <= MAX_CLASSES:
        yield "confusion (line: label, column: prediction)"
        heading = ["", *(_label(name, HEADING_WIDTH) for name in names)]
        rows = [[_label(name, NAME_WIDTH), *map(str, row)] for name, row in zip(names, counts, strict=True)]
        yield from aligned([heading, *rows], right=heading[1:])
        return
    wrong = [
        (count, label, guess)
        for label, row in enumerate(counts)
        for guess, count in enumerate(row)
        if count and label != guess
    ]
    wrong.sort(key=lambda error: (-error[0], error[1:]))
    yield f"most frequent confusions of {len(wrong):,}"
    cells = [[_label(names[label], NAME_WIDTH), _label(names[guess], NAME_WIDTH), str(n)] for n, label, guess in wrong]
    yield from aligned([["label", "prediction", "count"], *cells[:MAX_CONFUSIONS]], right=["count"])


def _label(name: str, width: int) -> str:
    return fitted(visible(as_cell(name)), width, "…")
