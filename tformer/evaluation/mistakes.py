"""The examples that a model predicts wrongly, sorted by confidence, and the files that list them.

- one class: another class is predicted; confidence is its probability.
- several labels: at least one is decided wrongly; confidence is the highest probability of a wrong decision.
- a score: every example, by the distance between score and prediction.
"""

# Shapes: N examples, L labels.

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tformer.data.sources.images import ImageSet
from tformer.data.sources.tables import LabelledRow, PairRow, row_facts
from tformer.decoding.answer_table import as_text, delimited_lines
from tformer.evaluation.scored import Scored
from tformer.support.files import open_output
from tformer.support.formatting import json_text


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


def find_mistakes(scored: Scored) -> list[Mistake]:
    """The mistakes among predictions, the most confident first."""
    labels, guesses, values_NL = scored.labels, scored.guesses, scored.values
    if scored.kind == "score":
        wrong_N, sure_N = np.ones(len(scored), dtype=bool), np.abs(guesses - labels)
    elif scored.kind == "classes":
        wrong_N, sure_N = guesses != labels, values_NL[np.arange(len(scored)), guesses]
    else:
        wrong_NL = guesses != scored.truth
        wrong_N, sure_N = wrong_NL.any(axis=1), np.where(wrong_NL, np.maximum(values_NL, 1 - values_NL), 0).max(axis=1)
    mistakes = [
        Mistake(
            index=index,
            label=scored.in_words(labels[index]),
            prediction=scored.in_words(guesses[index]),
            sureness=float(sure_N[index]),
            probabilities=dict(sorted(zip(scored.names, values_L, strict=False), key=lambda pair: -pair[1])),
        )
        for index, values_L in zip(np.flatnonzero(wrong_N).tolist(), values_NL[wrong_N].tolist(), strict=True)
    ]
    return sorted(mistakes, key=lambda mistake: (-mistake.sureness, mistake.index))


def write_mistakes(path: Path, scored: Scored, samples: Any) -> int:
    """Write the mistakes on labelled examples with their inputs, and return their number."""
    mistakes = find_mistakes(scored)
    sureness = "error" if scored.kind == "score" else "probability"
    columns, named = list[str](), [dict[str, Any]() for _ in mistakes]
    if isinstance(samples, ImageSet):
        inputs = [{"image": samples.places[mistake.index]} for mistake in mistakes]
        given = ["image"]
    else:
        given = ["text"] if samples.row(0).text2 is None else ["text", "text2"]
        rows = [samples.row(mistake.index) for mistake in mistakes]
        columns, named = names_of_rows(rows)
        inputs = [{name: getattr(row, name) or "" for name in given} for row in rows]
    documents = (
        {**names, "label": mistake.label, "prediction": mistake.prediction, sureness: mistake.sureness, **texts}
        | ({"probabilities": mistake.probabilities} if mistake.probabilities else {})
        for mistake, names, texts in zip(mistakes, named, inputs, strict=True)
    )
    write_examples(path, [*columns, "label", "prediction", sureness, *given], documents, formats={sureness: ".4f"})
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
        if name in formats:
            return format(value, formats[name])
        return ",".join(value) if isinstance(value, list) else as_text(value, digits=6)

    ending = path.suffix.lower()
    with open_output(path) as write:
        if ending == ".jsonl":
            for document in documents:
                write(json_text(document))
            return
        rows = ([cell(name, document[name]) for name in columns] for document in documents)
        write(delimited_lines([columns, *rows], ending))
