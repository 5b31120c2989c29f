"""One cell of a sweep: trained and evaluated in child processes, resumed where it stopped, its result stored as a file.

OUT/runs/NAME/          the run, as `tformer train` writes it
OUT/cells/NAME.json     its result; status `trained` while evaluations are missing
OUT/cells/NAME.log      output of its processes
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from tformer.checkpoint.run import RunDirectory
from tformer.recipe.recipe import Recipe
from tformer.support.errors import InputError, RunInUseError, StorageError
from tformer.support.files import parse_object, read_bounded, write_text
from tformer.support.formatting import finite_or_none
from tformer.tasks import task_of
from tformer.workflows.sweep.children import Ended, Start, run_child
from tformer.workflows.sweep.grid import Cell, all_sets, base_words
from tformer.workflows.sweep.halving import Rung

MAX_RESULT_BYTES = 16 << 20
MAX_POINTS = 400
"""Most points of a stored curve; longer curves are thinned evenly."""

DONE, TRAINED, DROPPED, DIVERGED, INVALID, REFUSED = "done", "trained", "dropped", "diverged", "left out", "refused"
FINAL = (DONE, DIVERGED)
"""States that the same command would not change."""

NOT_METRICS = ("split", "step", "is_best")


@dataclass
class Result:
    """The result of one training. Times in seconds, memory in bytes.

    status: done, trained (evaluations are missing), dropped (it stopped at a rung of successive halving), left out (the
    recipe refuses it), or how it failed.
    rungs: of successive halving, (step, best value until there) of each that it reached.
    metric: the recipe's best_metric; best: its best value over the validations, at `best_step`; validation: all metrics
    of that validation. evaluate: for each label all figures, and under `value` the one that the table shows.
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
    rungs: list[tuple[int, float]] = field(default_factory=list)
    curve: list[list[float]] = field(default_factory=list)
    training_curve: list[list[float]] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        """Whether the training or an evaluation of it failed. One that diverged, was dropped or left out did not."""
        ended = (DONE, TRAINED, DROPPED, DIVERGED, INVALID)
        return self.status not in ended or any("failure" in entry for entry in self.evaluate.values())

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        write_text(path, json.dumps(finite_or_none(asdict(self)), ensure_ascii=False, allow_nan=False, indent=1) + "\n")


STORED = TypeAdapter(Result)


def load_result(path: Path) -> Result | None:
    """The stored result; None where there is none. Raises InputError for a damaged file."""
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
    """Add the best validation, costs and curves from the run's metrics.jsonl."""
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
    """Name and value of an evaluation that the table shows: the task's metric, or else the loss."""
    name = metric if isinstance(figures.get(metric), int | float) else "loss"
    return name, figures.get(name)


def _curve(records: Sequence[Mapping[str, Any]], key: str) -> list[list[float]]:
    points = [[record["step"], record[key]] for record in records if isinstance(record.get(key), int | float)]
    stride = -(-len(points) // MAX_POINTS)
    return points if stride <= 1 else [*points[:-1:stride], points[-1]]


FAILURES = {2: REFUSED, 4: DIVERGED, 5: "out of memory"}
OUT_OF_MEMORY = "out of memory?"
"""The usual cause of SIGKILL: the system's out-of-memory killer."""

STORAGE, IN_USE = 3, 6
"""Exit codes that would end every other cell too."""

LOG_TAIL_BYTES = 64_000

TEXTS = {"train", "valid", "valid_fraction", "valid_split", "columns", "errors"}
"""Fields of the data section that decide which texts a tokenizer is trained on."""

RUNS, CELLS = "runs", "cells"
"""Folders inside OUT."""


class Stopped(Exception):
    """The cell was interrupted, and has saved."""


@dataclass(frozen=True)
class Work:
    """A cell with its resolved recipe."""

    cell: Cell
    recipe: Recipe
    max_steps: int | None

    @property
    def tokenizer_key(self) -> str | None:
        """Equal for cells that would train the same tokenizer; None for those that train none."""
        tokenizer, data = self.recipe.tokenizer, self.recipe.data
        given = tokenizer.path is not None or tokenizer.source_path is not None
        if given or self.recipe.model.patches is not None or "--init-from" in self.cell.variant.task.train:
            return None
        texts = data.model_dump(mode="json", include=TEXTS)
        kind = task_of(self.recipe).tokenizer_texts
        return json.dumps([kind, tokenizer.model_dump(mode="json"), texts], sort_keys=True)


class Sweeper:
    """Runs cells in one folder. `tokenizers`: flags that name a tokenizer trained before, by `tokenizer_key`."""

    def __init__(self, out: Path, *, should_stop: Callable[[], bool], start: Start) -> None:
        self.out, self.should_stop, self.start = out, should_stop, start
        self.tokenizers: dict[str, list[str]] = {}

    def finished(self, work: Work, rung: Rung | None = None) -> Result | None:
        """The stored result of a cell that needs no more work, or none for this rung."""
        result = load_result(self._file(work.cell))
        if result is None:
            return None
        reached = rung is not None and not rung.last and rung.steps in dict(result.rungs)
        if not reached and result.status not in FINAL:
            return None
        self._remember_tokenizer(work)
        return result

    def run(self, work: Work, rung: Rung | None = None) -> Result:
        """Train and evaluate what is left of the cell; up to a rung that is not the last: train only.

        Raises Stopped once it has saved; StorageError and RunInUseError, which would end every cell.
        """
        cell, file = work.cell, self._file(work.cell)
        stored = load_result(file)
        if stored is not None and stored.status == TRAINED:
            result = stored
            self._remember_tokenizer(work)
        else:
            result = self._train(work, rung, [] if stored is None else stored.rungs)
            result.save(file)
        if result.status == TRAINED:
            for label, flags in cell.variant.task.evaluate.items():
                if label not in result.evaluate or "failure" in result.evaluate[label]:
                    result.evaluate[label] = self._evaluate(work, flags)
                    result.save(file)
            result.status = DONE
            result.save(file)
        return result

    def _train(self, work: Work, rung: Rung | None, rungs: list[tuple[int, float]]) -> Result:
        """Train the cell, to the step of a rung; `rungs`: that it reached before."""
        cell, run = work.cell, self._run(work.cell)
        words = ["train", *train_words(work)]
        key = work.tokenizer_key
        if key is not None:
            words += self.tokenizers.get(key, [])
        if rung is not None and not rung.last:
            words += ["--stop-at-step", str(rung.steps)]
        words += ["--out", str(run), "--json"]
        if (run / "recipe.yaml").is_file():
            words.append("--resume")
        trained = TRAINED if rung is None or rung.last else DROPPED
        ended = self._child(words, cell)
        status, message = self._outcome(ended, cell, trained)
        self._remember_tokenizer(work)
        result = Result(
            cell=cell.name,
            task=cell.variant.task.name,
            choices=dict(cell.variant.choices),
            seed=cell.seed,
            command=[["tformer", *words]],
            status=status,
            message=message,
            metric=work.recipe.training.best_metric,
            peak_memory_bytes=ended.peak_bytes,
            rungs=list(rungs),
        )
        if run.is_dir():
            read_run(result, run)
        if ended.code == 0:
            summary = json.loads(ended.out)
            result.parameters, result.flops_per_token = summary["parameters"], summary["flops_per_token"]
            result.peak_device_bytes = summary["peak_device_bytes"]
            if rung is not None and result.best is not None:
                result.rungs.append((rung.steps, result.best))
        return result

    def _evaluate(self, work: Work, flags: tuple[str, ...]) -> dict[str, Any]:
        ended = self._child(["evaluate", str(self._run(work.cell)), *flags, "--json"], work.cell)
        if ended.code != 0:
            failure, message = self._outcome(ended, work.cell, DONE)
            return {"failure": failure, "message": message}
        figures = json.loads(ended.out)
        name, value = figure_of(figures, work.recipe.training.best_metric)
        numbers = {key: figure for key, figure in figures.items() if isinstance(figure, int | float | str)}
        return {"metric": name, "value": value, "figures": numbers}

    def _child(self, words: list[str], cell: Cell) -> Ended:
        if self.should_stop():
            raise Stopped
        ended = run_child(words, log=self.log(cell), should_stop=self.should_stop, start=self.start)
        if ended.stopped and ended.code != 0:
            raise Stopped
        if ended.code == STORAGE:
            raise StorageError(f"{cell.name}: {self._last_error(cell)}", hint="nothing that is finished was lost")
        if ended.code == IN_USE:
            raise RunInUseError(f"{cell.name}: {self._last_error(cell)}")
        return ended

    def _outcome(self, ended: Ended, cell: Cell, success: str) -> tuple[str, str]:
        """(status, message) of a child that has ended; the message of a success is empty."""
        if ended.code == 0:
            return success, ""
        if ended.code < 0 or ended.code == 128 + signal.SIGKILL:
            number = -ended.code if ended.code < 0 else signal.SIGKILL
            reason = OUT_OF_MEMORY if number == signal.SIGKILL else signal.strsignal(number)
            return "killed", f"killed by signal {number:d} ({reason})"
        return FAILURES.get(ended.code, "failed"), self._last_error(cell)

    def _remember_tokenizer(self, work: Work) -> None:
        """Use this cell's tokenizer for all cells that would train the same one."""
        key, run = work.tokenizer_key, self._run(work.cell)
        joint, source, target = (run / f"tokenizer{side}.json" for side in ("", ".source", ".target"))
        if key is None or key in self.tokenizers:
            return
        if target.is_file():
            first = source if source.is_file() else joint
            self.tokenizers[key] = ["--source-tokenizer", str(first), "--target-tokenizer", str(target)]
        elif joint.is_file():
            self.tokenizers[key] = ["--tokenizer", str(joint)]

    def _last_error(self, cell: Cell) -> str:
        """The last error in the child's log, else its last line."""
        with self.log(cell).open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - LOG_TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
        errors = [line.removeprefix("error:").strip() for line in lines if line.startswith("error:")]
        return (errors or lines or [""])[-1]

    def _run(self, cell: Cell) -> Path:
        return self.out / RUNS / cell.name

    def _file(self, cell: Cell) -> Path:
        return self.out / CELLS / f"{cell.name}.json"

    def log(self, cell: Cell) -> Path:
        return self.out / CELLS / f"{cell.name}.log"


def train_words(work: Work) -> list[str]:
    """The flags of `tformer train` for this cell, without its folder and a tokenizer trained before."""
    cell, task = work.cell, work.cell.variant.task
    words = [*base_words(task), *task.train]
    for text in all_sets(task, cell.variant.sets, max_steps=work.max_steps, seed=cell.seed):
        words += ["--set", text]
    return words
