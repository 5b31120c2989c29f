"""`tformer evaluate --errors FILE`: the examples that the model gets wrong, as a table or as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tformer.errors import InputError
from tformer.formatting import as_cell

if TYPE_CHECKING:
    import numpy as np

    from tformer.evaluation.classifier import Classifier
    from tformer.evaluation.mistakes import Mistake

ENDINGS = (".tsv", ".jsonl")


def check_errors_file(path: Path) -> None:
    """Refuse before the evaluation what would be refused after it. Raises InputError, StorageError."""
    from tformer.decoding.output import require_writable

    if path.suffix.lower() not in ENDINGS:
        hint = "invalid UTF-8 is accepted with --invalid-utf8 replace" if str(path) in ("strict", "replace") else None
        raise InputError(f"--errors writes a file that ends in {' or '.join(ENDINGS)}, found '{path}'", hint=hint)
    require_writable(path, option="--errors")


def write_mistakes(path: Path, classifier: Classifier, samples: Any, scores_NL: np.ndarray) -> int:
    """Write them, the surest first, and return how many there are. The file appears whole."""
    from tformer.decoding.output import open_output
    from tformer.evaluation.mistakes import find_mistakes

    mistakes = find_mistakes(classifier.kind, samples.labels, classifier.probabilities(scores_NL), classifier.labels)
    lines = _json_lines if path.suffix.lower() == ".jsonl" else _table_lines
    with open_output(path) as write:
        for line in lines(classifier, samples, mistakes):
            write(line + "\n")
    return len(mistakes)


def _inputs(classifier: Classifier, samples: Any, index: int) -> dict[str, str]:
    """What the example was, by the name of its column."""
    if classifier.reads_images:
        return {"image": samples.places[index]}
    row = samples.row(index)
    return {"text": row.text, **({"text2": row.text2 or ""} if classifier.reads_pairs else {})}


def _sureness(classifier: Classifier) -> str:
    return "error" if classifier.kind == "score" else "probability"


def _json_lines(classifier: Classifier, samples: Any, mistakes: list[Mistake]) -> Iterator[str]:
    for mistake in mistakes:
        document: dict[str, Any] = {
            "label": mistake.label,
            "prediction": mistake.prediction,
            _sureness(classifier): mistake.sureness,
            **_inputs(classifier, samples, mistake.index),
        }
        if mistake.probabilities:
            document["probabilities"] = mistake.probabilities
        yield json.dumps(document, ensure_ascii=False, allow_nan=False)


def _table_lines(classifier: Classifier, samples: Any, mistakes: list[Mistake]) -> Iterator[str]:
    inputs = ["image"] if classifier.reads_images else ["text", "text2"] if classifier.reads_pairs else ["text"]
    yield "\t".join(["label", "prediction", _sureness(classifier), *inputs])
    for mistake in mistakes:
        cells = [_cell(mistake.label), _cell(mistake.prediction), f"{mistake.sureness:.4f}"]
        yield "\t".join([*cells, *map(_cell, _inputs(classifier, samples, mistake.index).values())])


def _cell(value: str | float | list[str]) -> str:
    """One cell of the table; several labels are parted by commas."""
    if isinstance(value, float):
        return f"{value:.6g}"
    return as_cell(",".join(value) if isinstance(value, list) else value)
