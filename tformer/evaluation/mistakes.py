"""The examples that a model predicts wrongly, sorted by confidence, and the files that list them.

- one class: another class is predicted; confidence is its probability.
- several labels: at least one is decided wrongly; confidence is the highest probability of a wrong decision.
- a score: every example, by the distance between score and prediction.
"""

# Shapes: N examples, L labels.

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tformer.evaluation.classifier import Classifier
from tformer.evaluation.thresholds import Thresholds, decide
from tformer.nn.classification_heads import LabelKind
from tformer.support.files import open_output
from tformer.support.formatting import as_cell


@dataclass(frozen=True)
class Mistake:
    """The wrong prediction of the example `index`.

    `sureness` is the probability of the wrong decision, or the distance to the score. `probabilities` has all
    labels, the highest first; it is empty for a score.
    """

    index: int
    label: str | float | list[str]
    prediction: str | float | list[str]
    sureness: float
    probabilities: dict[str, float]


def find_mistakes(
    kind: LabelKind,
    labels: np.ndarray,
    values_NL: np.ndarray,
    names: Sequence[str],
    thresholds: Thresholds | None = None,
) -> list[Mistake]:
    """The mistakes among predictions, the most confident first.

    Args:
        labels: classes [N], zeros and ones [N, L], or scores [N].
        values_NL: probabilities, or predicted scores [N, 1].
        names: of the labels.
    """
    guesses = values_NL if kind == "score" else decide(kind, values_NL, thresholds)
    find = {"classes": _wrong_classes, "labels": _wrong_labels, "score": _distances}[kind]
    return sorted(find(labels, values_NL, guesses, names), key=lambda mistake: (-mistake.sureness, mistake.index))


def _wrong_classes(
    labels_N: np.ndarray, values_NL: np.ndarray, guess_N: np.ndarray, names: Sequence[str]
) -> list[Mistake]:
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


def _wrong_labels(
    labels_NL: np.ndarray, values_NL: np.ndarray, guess_NL: np.ndarray, names: Sequence[str]
) -> list[Mistake]:
    truth_NL = labels_NL.astype(bool)
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


def _distances(
    labels_N: np.ndarray, values_N1: np.ndarray, guess_N1: np.ndarray, names: Sequence[str]
) -> list[Mistake]:
    pairs = zip(labels_N.tolist(), guess_N1[:, 0].tolist(), strict=True)
    return [Mistake(index, label, guess, abs(guess - label), {}) for index, (label, guess) in enumerate(pairs)]


def _by_name(values_L: np.ndarray, names: Sequence[str]) -> dict[str, float]:
    return {names[label]: float(values_L[label]) for label in np.argsort(-values_L, kind="stable")}


def write_mistakes(path: Path, classifier: Classifier, samples: Any, scores_NL: np.ndarray) -> int:
    """Write the mistakes on labelled examples with their inputs, and return their number."""
    values_NL = classifier.probabilities(scores_NL)
    mistakes = find_mistakes(classifier.kind, samples.labels, values_NL, classifier.labels, classifier.thresholds)
    sureness = "error" if classifier.kind == "score" else "probability"
    inputs = ("image",) if classifier.reads_images else ("text",) if samples.row(0).text2 is None else ("text", "text2")

    def document(mistake: Mistake) -> dict[str, Any]:
        found: dict[str, Any] = {"label": mistake.label, "prediction": mistake.prediction, sureness: mistake.sureness}
        if classifier.reads_images:
            found["image"] = samples.places[mistake.index]
        else:
            found |= {name: getattr(samples.row(mistake.index), name) or "" for name in inputs}
        return found | ({"probabilities": mistake.probabilities} if mistake.probabilities else {})

    columns = ("label", "prediction", sureness, *inputs)
    write_examples(path, columns, map(document, mistakes), formats={sureness: ".4f"})
    return len(mistakes)


def write_examples(
    path: Path, columns: Sequence[str], documents: Iterable[dict[str, Any]], *, formats: Mapping[str, str]
) -> None:
    """Write documents as JSON lines (.jsonl), else their `columns` as a table. The file appears whole.

    formats: of the table's numbers by column; others have six digits. Several labels are joined with commas.
    """

    def cell(name: str, value: Any) -> str:
        if isinstance(value, float):
            return format(value, formats.get(name, ".6g"))
        return as_cell(",".join(value) if isinstance(value, list) else value)

    with open_output(path) as write:
        if path.suffix.lower() == ".jsonl":
            for document in documents:
                write(json.dumps(document, ensure_ascii=False, allow_nan=False) + "\n")
            return
        write("\t".join(columns) + "\n")
        for document in documents:
            write("\t".join(cell(name, document[name]) for name in columns) + "\n")
