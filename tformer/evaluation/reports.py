"""Evaluation reports of labelled examples: classification, multi-label classification and regression.

Shapes: N examples, L classes or labels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np

from tformer.evaluation.thresholds import Thresholds, decide
from tformer.metrics.classification import (
    accuracy,
    calibration_curve,
    confusion_matrix,
    expected_calibration_error,
    f1_macro,
    mcc,
    micro_scores,
    multi_label_f1_macro,
    per_class,
    per_label,
    subset_accuracy,
    top_k_accuracy,
)
from tformer.metrics.statistics import (
    bootstrap_interval,
    f1_macro_rows,
    mean_rows,
    pearson,
    pearson_rows,
    spearman,
    spearman_rows,
)
from tformer.metrics.thresholds import Curve
from tformer.nn.classification_heads import LabelKind
from tformer.recipe.recipe import Recipe
from tformer.support.errors import InputError, visible
from tformer.support.formatting import as_cell, fitted

TOP = 5


def classification_report(
    labels: np.ndarray,
    scores: np.ndarray,
    names: Sequence[str],
    *,
    intervals: bool = True,
    thresholds: Thresholds | None = None,
) -> dict[str, Any]:
    """Metrics of `scores` [N, L] (before softmax) against `labels` [N], as plain numbers for JSON.

    - loss: mean negative log-likelihood in nats; accuracy; mcc; ece: expected calibration error;
    - accuracy_top5: share of labels among the five most probable classes; only of more than five;
    - f1_binary, positive: F1 of the last class, and its name; only of two classes;
    - precision_macro, recall_macro, f1_macro: means over the classes that occur among labels or predictions;
    - per_class: {name: {precision, recall, f1, support}}; confusion: rows are labels, columns predictions;
    - intervals: {accuracy, f1_macro: [low, high]}, 95 % by bootstrap over the examples; only with `intervals`.

    Raises InputError for no examples.
    """
    if not len(labels):
        raise InputError("there is nothing to evaluate: 0 examples")
    labels = np.asarray(labels, dtype=np.int64)
    count = len(names)
    log_p_NL = log_softmax(scores)
    guesses = decide("classes", np.exp(log_p_NL), thresholds) if thresholds else scores.argmax(axis=1)
    confusion = confusion_matrix(labels, guesses, num_classes=count)
    classes = per_class(labels, guesses, num_classes=count)
    occurs_L = (confusion.sum(axis=0) + confusion.sum(axis=1)) > 0
    report: dict[str, Any] = {
        "examples": len(labels),
        "loss": float(-log_p_NL[np.arange(len(labels)), labels].mean()),
        "accuracy": accuracy(labels, guesses),
        **({f"accuracy_top{TOP}": top_k_accuracy(labels, scores, TOP)} if count > TOP else {}),
        **({"f1_binary": classes[1].f1, "positive": names[1]} if count == 2 else {}),
        "f1_macro": f1_macro(labels, guesses, num_classes=count),
        "precision_macro": float(np.mean([score.precision for score in classes], where=occurs_L)),
        "recall_macro": float(np.mean([score.recall for score in classes], where=occurs_L)),
        "mcc": mcc(labels, guesses),
        "ece": expected_calibration_error(np.exp(log_p_NL.max(axis=1)), labels == scores.argmax(axis=1)),
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


def multi_label_report(
    labels: np.ndarray,
    scores: np.ndarray,
    names: Sequence[str],
    *,
    intervals: bool = True,
    thresholds: Thresholds | None = None,
) -> dict[str, Any]:
    """Metrics of `scores` [N, L] (before sigmoid; without thresholds a label is predicted above 0) against bool [N, L].

    - loss: mean binary cross-entropy per decision, in nats;
    - accuracy: share of examples with all labels correct (subset accuracy);
    - f1_micro, precision_micro, recall_micro: over all decisions together;
    - f1_macro: mean over all labels, 0 for an absent one;
    - per_class: {name: {precision, recall, f1, support}};
    - intervals: {accuracy, f1_micro: [low, high]}, 95 % by bootstrap over the examples; only with `intervals`.

    Raises InputError for no examples.
    """
    if not len(labels):
        raise InputError("there is nothing to evaluate: 0 examples")
    true_NL, wide_NL = np.asarray(labels, dtype=bool), scores.astype(np.float64)
    guess_NL = decide("labels", np.exp(-np.logaddexp(0.0, -wide_NL)), thresholds) if thresholds else scores > 0
    micro = micro_scores(true_NL, guess_NL)
    report: dict[str, Any] = {
        "examples": len(true_NL),
        "loss": float(np.logaddexp(0.0, np.where(true_NL, -wide_NL, wide_NL)).mean()),
        "accuracy": subset_accuracy(true_NL, guess_NL),
        "f1_micro": micro.f1,
        "f1_macro": multi_label_f1_macro(true_NL, guess_NL),
        "precision_micro": micro.precision,
        "recall_micro": micro.recall,
        "per_class": {name: asdict(score) for name, score in zip(names, per_label(true_NL, guess_NL), strict=True)},
    }
    if intervals:
        hits_N = (true_NL & guess_NL).sum(axis=1)
        given_N = true_NL.sum(axis=1) + guess_NL.sum(axis=1)

        def micro_f1_rows(hits_SN: np.ndarray, given_SN: np.ndarray) -> np.ndarray:
            hits_S, given_S = hits_SN.sum(axis=1), given_SN.sum(axis=1)
            return np.divide(2 * hits_S, given_S, out=np.zeros(len(hits_S)), where=given_S > 0)

        report["intervals"] = {
            "accuracy": list(bootstrap_interval(mean_rows, (true_NL == guess_NL).all(axis=1))),
            "f1_micro": list(bootstrap_interval(micro_f1_rows, hits_N, given_N)),
        }
    return report


def regression_report(labels: np.ndarray, scores: np.ndarray, *, intervals: bool = True) -> dict[str, Any]:
    """Metrics of predicted `scores` [N] against `labels` [N], as plain numbers for JSON.

    - loss: mean squared error; mae: mean absolute error; pearson, spearman: correlations;
    - intervals: {pearson, spearman: [low, high]}, 95 % by bootstrap over the examples; only with `intervals`.

    Raises InputError for fewer than 2 examples.
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


REPORTS: dict[LabelKind, Callable[..., dict[str, Any]]] = {
    "classes": classification_report,
    "labels": multi_label_report,
    "score": lambda labels, scores, names, **options: regression_report(labels, scores[:, 0], **options),
}
# Of a validation during training.
VALIDATION_METRICS = (
    *("loss", "accuracy", "f1_binary", "f1_macro", "f1_micro", "mcc", "ece", "pearson", "spearman", "mae", "examples"),
)


MAX_CURVES = 10  # precision-recall curves of classes; with more there is one of all decisions
CALIBRATION_BINS = 10


def curves_of(kind: LabelKind, labels: np.ndarray, values_NL: np.ndarray, names: Sequence[str]) -> dict[str, Any]:
    """Curves of probabilities [N, L] against the labels, as scikit-learn draws them.

    - precision_recall: {name: {precision, recall, average_precision}}: of the second of two classes, of every class
      against the rest, or of every label; of more than `MAX_CURVES` one curve of all decisions together;
    - calibration: {confidence, accuracy, examples} of ten bins: the probability of the second of two classes and its
      share, of the predicted class and its accuracy, or of all decisions about labels.
    """
    true_NL = labels.astype(bool) if kind == "labels" else labels[:, None] == np.arange(len(names))
    two = kind == "classes" and len(names) == 2
    if len(names) > MAX_CURVES:
        decisions = {"all decisions": (true_NL.ravel(), values_NL.ravel())}
    else:
        shown = range(1, 2) if two else range(len(names))
        decisions = {names[label]: (true_NL[:, label], values_NL[:, label]) for label in shown}
    curves = {name: Curve.of(*pair) for name, pair in decisions.items()}
    if kind == "labels":
        confident, right = values_NL.ravel(), true_NL.ravel()
    else:
        best_N = np.ones(len(labels), dtype=np.int64) if two else values_NL.argmax(axis=1)
        confident, right = values_NL[np.arange(len(labels)), best_N], labels == best_N
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
        yield from _aligned([["class", "precision", "recall", "f1", "support"], *rows])
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
    yield from _aligned([[by["axis"], *names], *rows])


def _confusion_lines(names: Sequence[str], counts: Sequence[Sequence[int]]) -> Iterator[str]:
    if len(names) <= MAX_CLASSES:
        yield "confusion (line: label, column: prediction)"
        heading = ["", *(_label(name, HEADING_WIDTH) for name in names)]
        rows = [[_label(name, NAME_WIDTH), *map(str, row)] for name, row in zip(names, counts, strict=True)]
        yield from _aligned([heading, *rows])
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
    yield from _aligned([["label", "prediction", "count"], *cells[:MAX_CONFUSIONS]], text_columns=2)


def _aligned(rows: Sequence[Sequence[str]], *, text_columns: int = 1) -> Iterator[str]:
    """Columns two spaces apart: texts are aligned left, numbers right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.ljust(width) if index < text_columns else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def _label(name: str, width: int) -> str:
    return fitted(visible(as_cell(name)), width, "…")
