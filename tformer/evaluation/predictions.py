"""A classifier's predictions as JSON lines, and the table of the files of all folds of a data set.

    {"example": 17, "truth": "spam", "text": "...", "label": "spam", "probabilities": {"spam": 0.9, "ham": 0.1}}

`example` counts the examples of the whole data set from 0; images have `image` in place of `text`; models of several
labels have `labels`, of a score `score`, as in `tformer classify --json`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tformer.evaluation.answers import AnswerFormat
from tformer.evaluation.classifier import Classifier
from tformer.support.files import open_output
from tformer.support.formatting import json_text


def write_predictions(path: Path, classifier: Classifier, samples: Any, scores_NL: np.ndarray) -> None:
    """Write a line for each example. The file appears whole."""
    form = AnswerFormat(classifier.kind, classifier.labels, threshold=classifier.thresholds)
    numbers = np.arange(len(samples)) if samples.numbers is None else samples.numbers
    with open_output(path) as write:
        for index, values_L in enumerate(classifier.probabilities(scores_NL)):
            document = {"example": int(numbers[index]), "truth": _truth(classifier, samples.labels[index])}
            if classifier.reads_images:
                document["image"] = samples.places[index]
            else:
                row = samples.row(index)
                document |= {"text": row.text} | ({} if row.text2 is None else {"text2": row.text2})
            write(json_text(document | form.document(values_L)))


def _truth(classifier: Classifier, label: Any) -> str | float | list[str]:
    if classifier.kind == "score":
        return float(label)
    names = classifier.labels
    return names[int(label)] if classifier.kind == "classes" else [names[n] for n in np.flatnonzero(label).tolist()]


def read_predictions(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a file that `write_predictions` wrote."""
    with path.open(encoding="utf-8") as file:
        yield from map(json.loads, file)
