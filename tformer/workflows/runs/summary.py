"""Runs on disk: find them, summarize each (state, steps, best validation, size), and sort them.

A run may be damaged, half written, or in use by another process: each part is read on its own, and what cannot be
read is listed in `problems` instead of raising.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tformer.build import count_parameters
from tformer.checkpoint.logs import MAX_SHOWN_BYTES, read_metrics
from tformer.checkpoint.read import Checkpoint, read_checkpoint
from tformer.checkpoint.resolve import is_imported, newest_checkpoint, resolve_checkpoint
from tformer.checkpoint.run import CHECKPOINTS, RunDirectory, writer
from tformer.loading import embedding_rows
from tformer.metrics import lower_is_better
from tformer.recipe.recipe import Recipe
from tformer.support.errors import InputError
from tformer.support.files import MANIFEST, RUNS
from tformer.support.formatting import finite_number

FINISHED, STOPPED, IN_USE, EMPTY, DAMAGED = "finished", "stopped", "in use", "no checkpoint", "damaged"
IMPORTED = "imported"
SPLITS = ("train", "valid", "final")

T = TypeVar("T")


@dataclass(frozen=True)
class Best:
    """The best validation so far: the value of `training.best_metric`, and the step that it was measured at."""

    metric: str
    value: float
    step: int


@dataclass(frozen=True)
class RunSummary:
    """Summary of a run; None: unknown.

    Attributes:
        state: finished (all steps, or stopped early), stopped, in use (another process trains in it), no checkpoint,
            damaged (see `problems`), imported (a model of another library).
        step: of the latest checkpoint; while in use, of the last line of the metrics.
        parameters: tied ones once.
        seconds, tokens: of training, without validation and saving.
        size_bytes: of all its files.
        updated: time of the last change, in seconds since 1970.
        logged: the records of its metrics.jsonl that a summary needs.
    """

    path: Path
    state: str
    problems: list[str]
    recipe: Recipe | None
    parameters: int | None
    step: int | None
    best: Best | None
    seconds: float | None
    tokens: int | None
    size_bytes: int
    updated: float
    logged: Logged

    @property
    def max_steps(self) -> int | None:
        return None if self.recipe is None or self.state == IMPORTED else self.recipe.training.max_steps

    @property
    def kind(self) -> str | None:
        """ARCH/PRESET."""
        if self.recipe is None:
            return None
        return self.recipe.arch if self.recipe.preset is None else f"{self.recipe.arch}/{self.recipe.preset}"

    @property
    def tokens_per_second(self) -> float | None:
        return self.tokens / self.seconds if self.tokens and self.seconds else None

    def to_json(self) -> dict[str, Any]:
        of_recipe = {name: self.recipe and getattr(self.recipe, name) for name in ("arch", "preset")}
        names = ("parameters", "step", "max_steps", "best", "seconds", "tokens", "tokens_per_second", "size_bytes")
        own = {name: getattr(self, name) for name in (*names, "updated")} | {"best": self.best and asdict(self.best)}
        return {"run": str(self.path), "state": self.state, "problems": self.problems, **of_recipe, **own}


def summarize_run(path: str | Path) -> RunSummary:
    """Summary of a run or an imported model; what cannot be read is listed in its problems."""
    folder, reader = Path(path), RunReader([])
    run, imported = RunDirectory(folder), is_imported(folder)
    if not (imported or os.path.isdir(folder / CHECKPOINTS)):
        reader.problems.append(f"{folder} has no {CHECKPOINTS}/")
    entries = reader.read(run.checkpoints) or []
    checkpoints = [reader.read(partial(_checked, entry.path)) for entry in entries]
    latest = next((checkpoint for checkpoint in reversed(checkpoints) if checkpoint is not None), None)
    if imported:
        latest = reader.read(lambda: _checked(folder))
    has_own = os.path.lexists(folder / "recipe.yaml")
    recipe = reader.read(lambda: run.recipe() if has_own else latest.recipe if latest is not None else None)
    logged = reader.read(lambda: read_logged(run)) or Logged()
    reader.read(run.environment)
    statuses = list(_statuses(folder))
    locked = reader.read(lambda: writer(folder)) is not None
    trained = logged.record("train", "last")
    step = entries[-1].step if entries else None
    if locked:
        step = max(step or 0, logged.step)
    parameters = None
    if recipe is not None and latest is not None:
        # Of the model, built on the meta device with the vocabularies of the stored embeddings.
        labels = len(recipe.data.labels) or None
        parameters = reader.read(lambda: count_parameters(recipe.model, num_labels=labels, **embedding_rows(latest)))
    return RunSummary(
        path=folder,
        state=IMPORTED if imported else _state(recipe, latest, step, locked=locked, problems=reader.problems),
        problems=reader.problems,
        recipe=recipe,
        parameters=parameters,
        step=step,
        best=best_of(logged, recipe),
        seconds=number(trained, "seconds"),
        tokens=None if (tokens := number(trained, "tokens")) is None else int(tokens),
        size_bytes=sum(status.st_size for status in statuses),
        updated=max((status.st_mtime for status in statuses), default=0.0),
        logged=logged,
    )


Record = dict[str, Any]


@dataclass(frozen=True)
class Logged:
    """Records of a run's metrics: of each split the first, the best and the last, and the highest step of all."""

    splits: dict[str, dict[str, Record]] = field(default_factory=dict)
    step: int = 0

    def record(self, split: str, which: str) -> Record:
        """One of the records; empty where there is none."""
        return self.splits.get(split, {}).get(which, {})

    @property
    def best(self) -> Record:
        """The best validation: on all held-out data, if its checkpoint was measured on them at the end."""
        best, final = self.record("valid", "best"), self.record("final", "last")
        return final if final.get("step") == best.get("step") and best.keys() <= final.keys() else best


def read_logged(run: RunDirectory) -> Logged:
    """The records that a summary needs. Raises InputError for a file of more than `MAX_SHOWN_BYTES`."""
    return logged_in(read_metrics(run.path / "metrics.jsonl", max_bytes=MAX_SHOWN_BYTES))


def logged_in(records: Iterable[Record]) -> Logged:
    """The records that a summary needs of all, in memory that does not grow with their number."""
    splits: dict[str, dict[str, Record]] = {}
    step = 0
    for record in records:
        step = max(step, int(number(record, "step") or 0))
        split = record.get("split")
        if split not in SPLITS:
            continue
        kept = splits.setdefault(split, {} if split == "final" else {"first": record})
        if split == "valid" and record.get("is_best") is True:
            kept["best"] = record
        kept["last"] = record
    kinds = ("first", "best", "last")
    found = {split: splits[split] for split in SPLITS if split in splits}
    return Logged({split: {kind: kept[kind] for kind in kinds if kind in kept} for split, kept in found.items()}, step)


def best_of(logged: Logged, recipe: Recipe | None) -> Best | None:
    """The best validation, by the recipe's best_metric."""
    metric = "loss" if recipe is None else recipe.training.best_metric
    record = logged.best
    value, step = number(record, metric), number(record, "step")
    return None if value is None or step is None else Best(metric, value, int(step))


def number(record: Record, key: str) -> float | None:
    """A number in a record; None where it is missing, not finite, too large for a float or no number."""
    return finite_number(record.get(key))


class RunReader:
    """Reads the parts of a run; an error is added to `problems` and reading goes on."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems

    def read(self, action: Callable[[], T]) -> T | None:
        try:
            return action()
        except InputError as error:
            self.problems.append(error.message)
        except OSError as error:
            self.problems.append(f"cannot read {error.filename}: {error.strerror}")
        return None


def _checked(path: Path) -> Checkpoint:
    """The checkpoint, with its files checked for presence and size only: hashing would take long."""
    checkpoint = read_checkpoint(path, verify=False)
    checkpoint.specs("weights")
    return checkpoint


def _state(
    recipe: Recipe | None, latest: Checkpoint | None, step: int | None, *, locked: bool, problems: Sequence[str]
) -> str:
    if locked:
        return IN_USE
    if problems:
        return DAMAGED
    if latest is None or step is None:
        return EMPTY
    done = recipe is not None and step >= recipe.training.max_steps
    return FINISHED if done or latest.trainer.get("finished") is True else STOPPED


def _statuses(folder: Path) -> Iterator[os.stat_result]:
    """Status of every file in the folder; files that disappear meanwhile are skipped."""
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                yield os.lstat(os.path.join(place, name))
            except OSError:
                continue


MAX_DEPTH = 6
"""Greatest depth of folders in which runs are searched."""

TRACES = ("metrics.jsonl", "environment.json")
"""A folder with a recipe and one of these is a run, even without checkpoints."""


def find_runs(folders: Iterable[str | Path] = (RUNS,)) -> list[Path]:
    """Every run and imported model at or under the folders, each once, by path.

    Links are followed to runs but not through folders of runs, so that no cycle is followed.

    Raises:
        InputError: a folder that is not there, or cannot be read.
    """
    found: dict[str, Path] = {}
    for name in folders:
        folder = Path(name)
        if not folder.is_dir():
            kind = "is a file, expected a folder of runs" if folder.exists() else "does not exist"
            raise InputError(f"{folder} {kind}", hint="list those under runs/ with: tformer runs list")
        try:
            os.listdir(folder)
        except OSError as error:
            raise InputError(f"cannot read {folder}: {error.strerror}") from error
        for run in _runs_in(folder, MAX_DEPTH):
            found.setdefault(os.path.realpath(run), run)
    return sorted(found.values())


def find_run(name: str | Path | None = None, *, runs_dir: str | Path = RUNS) -> Path:
    """The run or imported model with this folder, this name under `runs_dir`, or this path in it; None: the newest run.

    Raises:
        InputError: nothing there, or no run.
    """
    if name is None:
        return newest_checkpoint(runs_dir).parents[1]
    folder = Path(name)
    for place in (folder, *(() if folder.exists() else (Path(runs_dir) / folder,))):
        if looks_like_run(place) or is_imported(place):
            return place
    checkpoint = resolve_checkpoint(folder, runs_dir=runs_dir)  # or InputError
    if checkpoint.parent.name == CHECKPOINTS:
        return checkpoint.parents[1]
    raise InputError(f"{folder} is a checkpoint on its own, expected a run (a folder with {CHECKPOINTS}/)")


def looks_like_run(folder: Path) -> bool:
    """Whether the folder is a run, or the rest of one."""
    if os.path.isdir(folder / CHECKPOINTS):
        return True
    return os.path.isfile(folder / "recipe.yaml") and any(os.path.isfile(folder / trace) for trace in TRACES)


def _runs_in(folder: Path, depth: int) -> Iterator[Path]:
    if looks_like_run(folder) or is_imported(folder):
        yield folder
        return
    if depth == 0 or os.path.isfile(folder / MANIFEST):
        return
    try:
        names = sorted(os.listdir(folder))
    except OSError:  # a folder without permission
        return
    for name in names:
        inner = folder / name
        if name.startswith(".") or not inner.is_dir():
            continue
        if looks_like_run(inner):
            yield inner
        elif not inner.is_symlink():
            yield from _runs_in(inner, depth - 1)


def _largest(value: float | None) -> float | None:
    return None if value is None else -value


ORDERS: dict[str, Callable[[RunSummary], Any]] = {
    "newest": lambda run: -run.updated,
    "name": lambda run: str(run.path),
    "metric": lambda run: run.best and (run.best.metric, lower_is_better(run.best.metric, run.best.value)),
    "parameters": lambda run: _largest(run.parameters),
    "step": lambda run: _largest(run.step),
    "seconds": lambda run: _largest(run.seconds),
    "size": lambda run: -run.size_bytes,
}


def in_order(runs: Iterable[RunSummary], order: str = "newest") -> list[RunSummary]:
    """Runs sorted by a key of `ORDERS`; runs without that value come last, equal ones by path."""
    key = ORDERS[order]
    return sorted(runs, key=lambda run: ((value := key(run)) is None, value if value is not None else 0, str(run.path)))
