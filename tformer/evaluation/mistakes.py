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

from tformer.data.sources.tables import LabelledRow, PairRow, row_facts
from tformer.decoding.answer_table import as_text, delimited_lines
from tformer.evaluation.classifier import Classifier
from tformer.evaluation.thresholds import Thresholds, decide
from tformer.nn.classification_heads import LabelKind
from tformer.support.files import open_output


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

    rows = [] if classifier.reads_images else [samples.row(mistake.index) for mistake in mistakes]
    columns, named = names_of_rows(rows)

    def document(number: int, mistake: Mistake) -> dict[str, Any]:
        found: dict[str, Any] = {"label": mistake.label, "prediction": mistake.prediction, sureness: mistake.sureness}
        if classifier.reads_images:
            found["image"] = samples.places[mistake.index]
        else:
            found = named[number] | found | {name: getattr(rows[number], name) or "" for name in inputs}
        return found | ({"probabilities": mistake.probabilities} if mistake.probabilities else {})

    documents = (document(number, mistake) for number, mistake in enumerate(mistakes))
    write_examples(path, (*columns, "label", "prediction", sureness, *inputs), documents, formats={sureness: ".4f"})
    return len(mistakes)


def names_of_rows(rows: Sequence[LabelledRow | PairRow]) -> tuple[list[str], list[dict[str, Any]]]:
    """(columns, values) that name rows in a listing: the file where there are several, number from 0, id."""
    facts = [{"file": row.place.rpartition(":")[0], **row_facts(row)} for row in rows]
    several = len({fact["file"] for fact in facts}) > 1
    columns = [
        key for key in ("file", "row", "id") if any(key in fact for fact in facts) and (several or key != "file")
    ]
    return columns, [{key: fact.get(key) for key in columns} for fact in facts]


def write_examples(
    path: Path, columns: Sequence[str], documents: Iterable[dict[str, Any]], *, formats: Mapping[str, str]
) -> None:
    """Write documents as JSON lines (.jsonl), else their `columns` as csv or tsv. The file appears whole.

    formats: of the table's numbers by column; others have six digits. Several labels are joined with commas.
    """

    def cell(name: str, value: Any) -> str:
        if isinstance(value, float):
            return format(value, formats.get(name, ".6g"))
        return ",".join(value) if isinstance(value, list) else as_text(value)

    ending = path.suffix.lower()
    with open_output(path) as write:
        if ending == ".jsonl":
            for document in documents:
                write(json.dumps(document, ensure_ascii=False, allow_nan=False) + "\n")
            return
        rows = ([cell(name, document[name]) for name in columns] for document in documents)
        write(delimited_lines([columns, *rows], ending))
