"""One cell of a sweep: trained and evaluated in child processes, resumed where it stopped, its result stored as a file.

OUT/runs/NAME/          the run, as `tformer train` writes it
OUT/cells/NAME.json     its result; status `trained` while evaluations are missing
OUT/cells/NAME.log      output of its processes
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from tformer.checkpoint.run import RunDirectory
from tformer.support.bounds import mistake_of
from tformer.support.errors import InputError, RunInUseError, StorageError
from tformer.support.files import read_object, write_text
from tformer.support.formatting import json_text
from tformer.support.processes import Child, python_command
from tformer.tasks.table import task_of
from tformer.workers.work import ShouldStop
from tformer.workflows.runs.summary import logged_in
from tformer.workflows.sweep.grid import Cell

MAX_RESULT_BYTES = 16 << 20
MAX_POINTS = 400
"""Most points of a stored curve; longer curves are thinned evenly."""

DONE, TRAINED, DIVERGED, INVALID, REFUSED = "done", "trained", "diverged", "left out", "refused"
FINAL = (DONE, DIVERGED)
"""States that the same command would not change."""

NOT_METRICS = ("split", "step", "is_best")


@dataclass
class Result:
    """The result of one training. Times in seconds, memory in bytes.

    status: done, trained (evaluations are missing), left out (the recipe refuses it), or how it failed.
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
    curve: list[list[float]] = field(default_factory=list)
    training_curve: list[list[float]] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        """Whether the training or an evaluation of it failed. One that diverged or was left out did not."""
        ended = (DONE, TRAINED, DIVERGED, INVALID)
        return self.status not in ended or any("failure" in entry for entry in self.evaluate.values())

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        write_text(path, json_text(asdict(self), indent=1))


STORED = TypeAdapter(Result)


def load_result(path: Path) -> Result | None:
    """The stored result; None where there is none. Raises InputError for a damaged file."""
    if not path.is_file():
        return None
    document = read_object(path, max_bytes=MAX_RESULT_BYTES)
    text = json.dumps({each.name: document[each.name] for each in fields(Result) if each.name in document})
    try:
        return STORED.validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        message = f"{path} is damaged: {key}: {mistake_of(first)}"
        raise InputError(message, hint="delete it: its run is read again") from None


def read_run(result: Result, run: Path) -> None:
    """Add the best validation, costs and curves from the run's metrics.jsonl."""
    records = list(RunDirectory(run).metrics())
    logged = logged_in(records)
    if last := logged.record("train", "last"):
        result.steps, result.tokens, result.seconds = last["step"], last["tokens"], last["seconds"]
        result.tokens_per_second = last["tokens"] / last["seconds"] if last["seconds"] else None
    if best := logged.best:
        result.best, result.best_step = best.get(result.metric), best["step"]
        result.validation = {key: value for key, value in best.items() if key not in NOT_METRICS}
    result.curve = _curve(records, "valid", result.metric)
    result.training_curve = _curve(records, "train", "loss")


def _curve(records: Sequence[Mapping[str, Any]], split: str, key: str) -> list[list[float]]:
    own = (record for record in records if record.get("split") == split)
    points = [[record["step"], record[key]] for record in own if isinstance(record.get(key), int | float)]
    stride = -(-len(points) // MAX_POINTS)
    return points if stride <= 1 else [*points[:-1:stride], points[-1]]


FAILURES = {2: REFUSED, 4: DIVERGED, 5: "out of memory"}
OUT_OF_MEMORY = "out of memory?"
"""The usual cause of SIGKILL: the system's out-of-memory killer."""

STORAGE, IN_USE = 3, 6
"""Exit codes that would end every other cell too."""

POLL_SECONDS = 0.05

TEXTS = {"train", "valid", "valid_fraction", "valid_split", "folds", "fold", "columns", "errors"}
"""Fields of the data section that decide which texts a tokenizer is trained on."""

OWN_RUN = "{run}"
"""In a flag of an evaluation: the folder of the run that is evaluated."""

Slot = Mapping[str, str]
"""Variables of the environment that give a training, one of several at the same time, its GPU or number of threads."""

ONE_SLOT: Slot = {}

RUNS, CELLS = "runs", "cells"
"""Folders inside OUT."""


class Stopped(Exception):
    """The cell was interrupted, and has saved."""


@dataclass(frozen=True)
class Ended:
    """End of a child process.

    code: its exit code; -N when signal N killed it. out: its standard output. error: its last error.
    peak_bytes: its largest resident set, without a GPU's memory. stopped: whether it was interrupted.
    """

    code: int
    out: str
    error: str
    peak_bytes: int
    stopped: bool = False


def run_child(words: Sequence[str], log: Path, should_stop: ShouldStop, slot: Slot = ONE_SLOT) -> Ended:
    """Run `tformer WORDS` to its end, in a slot; its stderr is appended to `log`.

    An interrupt reaches the child once: from here, when `should_stop` returns True. It then gets all the time that it
    needs to save. It never outlives this call, nor this process.
    """
    stopped = False
    with tempfile.TemporaryFile() as out, log.open("a+b") as messages:
        messages.write(os.fsencode(f"$ {subprocess.list2cmdline(['tformer', *words])}\n"))
        messages.flush()
        command, env = python_command("tformer", *words), os.environ | slot
        child = Child(command, messages=messages, stdin=subprocess.DEVNULL, stdout=out, env=env)
        try:
            while (code := child.poll()) is None:
                if should_stop() and not stopped:
                    stopped = True
                    child.process.send_signal(signal.SIGINT)
                time.sleep(POLL_SECONDS)
        finally:
            child.end()
        out.seek(0)
        return Ended(code, out.read().decode("utf-8", "replace"), child.last_error(), child.peak_bytes, stopped)


def tokenizer_key(cell: Cell) -> str | None:
    """Key that is equal for cells that train the same tokenizer; None for cells that train none."""
    tokenizer, data = cell.recipe.tokenizer, cell.recipe.data
    given = tokenizer.path is not None or tokenizer.source_path is not None
    if given or cell.recipe.model.patches is not None or "--init-from" in cell.variant.task.train:
        return None
    texts = data.model_dump(mode="json", include=TEXTS)
    kind = task_of(cell.recipe).tokenizer_texts
    return json.dumps([kind, tokenizer.model_dump(mode="json"), texts], sort_keys=True)


class Sweeper:
    """Runs cells in one folder. `tokenizers`: flags that name a tokenizer trained before, by `tokenizer_key`."""

    def __init__(self, out: Path, should_stop: ShouldStop, slot: Slot = ONE_SLOT) -> None:
        self.out, self.should_stop, self.slot = out, should_stop, slot
        self.tokenizers: dict[str, list[str]] = {}

    def log(self, cell: Cell) -> Path:
        return self.out / CELLS / f"{cell.name}.log"

    def finished(self, cell: Cell) -> Result | None:
        """The stored result of a cell that needs no more work."""
        result = load_result(self._file(cell))
        if result is None or result.status not in FINAL:
            return None
        self._remember_tokenizer(cell)
        return result

    def run(self, cell: Cell) -> Result:
        """Train and evaluate the unfinished part of the cell.

        Raises Stopped once it has saved; StorageError and RunInUseError, which would end every cell.
        """
        file = self._file(cell)
        result = load_result(file)
        if result is not None and result.status == TRAINED:
            self._remember_tokenizer(cell)
        else:
            result = self._train(cell)
            result.save(file)
        if result.status == TRAINED:
            for label, flags in cell.variant.task.evaluate.items():
                if label not in result.evaluate or "failure" in result.evaluate[label]:
                    result.evaluate[label] = self._evaluate(cell, flags)
                    result.save(file)
            result.status = DONE
            result.save(file)
        return result

    def _train(self, cell: Cell) -> Result:
        run, key = self.out / RUNS / cell.name, tokenizer_key(cell)
        words = ["train", *train_words(cell)]
        if key is not None:
            words += self.tokenizers.get(key, [])
        words += ["--out", str(run), "--json"]
        if (run / "recipe.yaml").is_file():
            words.append("--resume")
        ended = self._child(words, cell)
        status, message = _outcome(ended, TRAINED)
        self._remember_tokenizer(cell)
        result = Result(
            cell=cell.name,
            task=cell.variant.task.name,
            choices=dict(cell.variant.choices),
            seed=cell.seed,
            command=[["tformer", *words]],
            status=status,
            message=message,
            metric=cell.recipe.training.best_metric,
            peak_memory_bytes=ended.peak_bytes,
        )
        if run.is_dir():
            read_run(result, run)
        if ended.code == 0:
            summary = json.loads(ended.out)
            result.parameters, result.flops_per_token = summary["parameters"], summary["flops_per_token"]
            result.peak_device_bytes = summary["peak_device_bytes"]
        return result

    def _evaluate(self, cell: Cell, flags: tuple[str, ...]) -> dict[str, Any]:
        run = str(self.out / RUNS / cell.name)
        ended = self._child(["evaluate", run, *(flag.replace(OWN_RUN, run) for flag in flags), "--json"], cell)
        if ended.code != 0:
            failure, message = _outcome(ended, DONE)
            return {"failure": failure, "message": message}
        figures, metric = json.loads(ended.out), cell.recipe.training.best_metric
        name = metric if isinstance(figures.get(metric), int | float) else "loss"  # the table shows this one
        numbers = {key: figure for key, figure in figures.items() if isinstance(figure, int | float | str)}
        by = {"by": figures["by"]} if "by" in figures else {}
        return {"metric": name, "value": figures.get(name), "figures": numbers} | by

    def _child(self, words: list[str], cell: Cell) -> Ended:
        if self.should_stop():
            raise Stopped
        ended = run_child(words, self.log(cell), self.should_stop, self.slot)
        if ended.stopped and ended.code != 0:
            raise Stopped
        if ended.code == STORAGE:
            raise StorageError(f"{cell.name}: {ended.error}", hint="nothing that is finished was lost")
        if ended.code == IN_USE:
            raise RunInUseError(f"{cell.name}: {ended.error}")
        return ended

    def _remember_tokenizer(self, cell: Cell) -> None:
        """Use this cell's tokenizer for all cells that would train the same one."""
        key, run = tokenizer_key(cell), self.out / RUNS / cell.name
        joint, source, target = (run / f"tokenizer{side}.json" for side in ("", ".source", ".target"))
        if key is None or key in self.tokenizers:
            return
        if target.is_file():
            first = source if source.is_file() else joint
            self.tokenizers[key] = ["--source-tokenizer", str(first), "--target-tokenizer", str(target)]
        elif joint.is_file():
            self.tokenizers[key] = ["--tokenizer", str(joint)]

    def _file(self, cell: Cell) -> Path:
        return self.out / CELLS / f"{cell.name}.json"


def _outcome(ended: Ended, success: str) -> tuple[str, str]:
    """(status, message) of a child that has ended; the message of a success is empty."""
    if ended.code == 0:
        return success, ""
    if ended.code < 0 or ended.code == 128 + signal.SIGKILL:
        number = -ended.code if ended.code < 0 else signal.SIGKILL
        reason = OUT_OF_MEMORY if number == signal.SIGKILL else signal.strsignal(number)
        return "killed", f"killed by signal {number:d} ({reason})"
    return FAILURES.get(ended.code, "failed"), ended.error


def train_words(cell: Cell) -> list[str]:
    """The flags of `tformer train` for this cell, without its folder and a tokenizer trained before."""
    task = cell.variant.task
    named = (("--config", task.config), ("--arch", task.arch), ("--preset", task.preset))
    recipe = [word for flag, value in named if value is not None for word in (flag, value)]
    return [*recipe, *task.train, *(word for text in cell.sets for word in ("--set", text))]
