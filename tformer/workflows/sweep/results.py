"""The result of one cell, as its file holds it and as it is read from a finished run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from tformer.checkpoint.atomic import write_text
from tformer.checkpoint.bounded_json import parse_object, read_bounded
from tformer.checkpoint.logs import finite
from tformer.checkpoint.run import RunDirectory
from tformer.errors import InputError

MAX_RESULT_BYTES = 16 << 20
MAX_POINTS = 400
"""Of a curve that is kept; longer ones are thinned evenly."""

DONE, TRAINED, DIVERGED, INVALID, REFUSED = "done", "trained", "diverged", "left out", "refused"
FINAL = (DONE, DIVERGED)
"""States that no further run of the same command would change."""

NOT_METRICS = ("split", "step", "is_best")


@dataclass
class Result:
    """What one training came to. Times in seconds, memory in bytes.

    status: done, trained (its evaluations are still to come), left out (the recipe refuses it), or how it failed.
    metric: the recipe's best_metric; best: its best value over the validations, at `best_step`; validation: everything
    that was measured then. evaluate: for each label, all figures, and under `value` the one that the table shows.
    """

    cell: str
    task: str
    choices: dict[str, str]
    seed: int
    command: list[list[str]] = field(default_factory=list)
    status: str = TRAINED
    message: str = ""
    metric: str = "loss"
    best: float | None = None
    best_step: int | None = None
    validation: dict[str, Any] = field(default_factory=dict)
    parameters: int | None = None
    flops_per_token: float | None = None
    steps: int | None = None
    tokens: int | None = None
    seconds: float | None = None
    tokens_per_second: float | None = None
    peak_memory_bytes: int | None = None
    peak_device_bytes: int | None = None
    evaluate: dict[str, dict[str, Any]] = field(default_factory=dict)
    curve: list[list[float]] = field(default_factory=list)
    training_curve: list[list[float]] = field(default_factory=list)

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        write_text(path, json.dumps(finite(asdict(self)), ensure_ascii=False, allow_nan=False, indent=1) + "\n")


STORED = TypeAdapter(Result)


def load_result(path: Path) -> Result | None:
    """The result on file; None where there is none. Errors: `InputError` for a damaged file."""
    if not path.is_file():
        return None
    document = parse_object(read_bounded(path, max_bytes=MAX_RESULT_BYTES), name=str(path))
    known = {entry.name for entry in fields(Result)}
    text = json.dumps({key: value for key, value in document.items() if key in known})
    try:
        return STORED.validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise InputError(f"{path} is damaged: {key}: {first['msg']}", hint="delete it: its run is read again") from None


def read_run(result: Result, run: Path) -> None:
    """Fill in what the run's metrics.jsonl tells: the best validation, costs and curves."""
    records = list(RunDirectory(run).metrics())
    logged = [record for record in records if record.get("split") == "train"]
    validated = [record for record in records if record.get("split") == "valid"]
    if logged:
        last = logged[-1]
        result.steps, result.tokens, result.seconds = last["step"], last["tokens"], last["seconds"]
        result.tokens_per_second = last["tokens"] / last["seconds"] if last["seconds"] else None
    best = next((record for record in reversed(validated) if record.get("is_best")), None)
    if best is not None:
        result.best, result.best_step = best.get(result.metric), best["step"]
        result.validation = {key: value for key, value in best.items() if key not in NOT_METRICS}
    result.curve = _curve(validated, result.metric)
    result.training_curve = _curve(logged, "loss")


def figure_of(figures: Mapping[str, Any], metric: str) -> tuple[str, float | None]:
    """Of an evaluation the figure that the table shows: the metric of the task, or else the loss."""
    name = metric if isinstance(figures.get(metric), int | float) else "loss"
    return name, figures.get(name)


def _curve(records: Sequence[Mapping[str, Any]], key: str) -> list[list[float]]:
    points = [[record["step"], record[key]] for record in records if isinstance(record.get(key), int | float)]
    stride = -(-len(points) // MAX_POINTS)
    return points if stride <= 1 else [*points[:-1:stride], points[-1]]
