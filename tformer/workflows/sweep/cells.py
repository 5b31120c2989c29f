"""One cell of a sweep: trained in a process of its own, resumed where it stopped, evaluated, and put on file.

OUT/runs/NAME/          the run, as `tformer train` makes it
OUT/cells/NAME.json     its result; of a cell that still has evaluations to come: status `trained`
OUT/cells/NAME.log      what its processes said
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tformer.errors import RunInUseError, StorageError
from tformer.recipe.needs import data_kind
from tformer.recipe.recipe import Recipe
from tformer.workflows.sweep.grid import Cell
from tformer.workflows.sweep.process import Ended, run_child
from tformer.workflows.sweep.resolve import all_sets, base_words
from tformer.workflows.sweep.results import (
    DIVERGED,
    DONE,
    FINAL,
    REFUSED,
    TRAINED,
    Result,
    figure_of,
    load_result,
    read_run,
)

FAILURES = {2: REFUSED, 4: DIVERGED, 5: "out of memory", -9: "killed", 137: "killed"}
STORAGE, IN_USE = 3, 6
"""Exit codes that are not a cell's own failure: they would meet every other cell as well."""

LOG_TAIL_BYTES = 64_000

TEXTS = {"train", "valid", "valid_fraction", "valid_split", "columns", "errors"}
"""What of the data section decides which texts a tokenizer is trained on."""

RUNS, CELLS = "runs", "cells"
"""Folders inside OUT."""


class Stopped(Exception):
    """The cell was asked to stop, and has."""


@dataclass(frozen=True)
class Work:
    """A cell that can be trained: its recipe is sound."""

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
        return json.dumps([data_kind(self.recipe), tokenizer.model_dump(mode="json"), texts], sort_keys=True)


class Sweeper:
    """Runs cells in one folder. `tokenizers`: the flags that name a tokenizer already trained, by `tokenizer_key`."""

    def __init__(self, out: Path, *, should_stop: Callable[[], bool]) -> None:
        self.out, self.should_stop = out, should_stop
        self.tokenizers: dict[str, list[str]] = {}

    def finished(self, work: Work) -> Result | None:
        """The result on file of a cell that needs no more work."""
        result = load_result(self._file(work.cell))
        if result is None or result.status not in FINAL:
            return None
        self._remember_tokenizer(work)
        return result

    def run(self, work: Work) -> Result:
        """Train and evaluate what is left of the cell.

        Errors: `Stopped` once it has saved; `StorageError` and `RunInUseError`, which would meet every cell.
        """
        cell, file = work.cell, self._file(work.cell)
        on_file = load_result(file)
        if on_file is not None and on_file.status == TRAINED:
            result = on_file
            self._remember_tokenizer(work)
        else:
            result = self._train(work)
            result.save(file)
        if result.status == TRAINED:
            for label, flags in cell.variant.task.evaluate.items():
                if label not in result.evaluate or "failure" in result.evaluate[label]:
                    result.evaluate[label] = self._evaluate(work, flags)
                    result.save(file)
            result.status = DONE
            result.save(file)
        return result

    def _train(self, work: Work) -> Result:
        cell, run = work.cell, self._run(work.cell)
        words = ["train", *train_words(work)]
        key = work.tokenizer_key
        if key is not None:
            words += self.tokenizers.get(key, [])
        words += ["--out", str(run), "--json"]
        if (run / "recipe.yaml").is_file():
            words.append("--resume")
        ended = self._child(words, cell)
        self._remember_tokenizer(work)
        result = Result(
            cell=cell.name,
            task=cell.variant.task.name,
            choices=dict(cell.variant.choices),
            seed=cell.seed,
            command=[["tformer", *words]],
            status=TRAINED if ended.code == 0 else FAILURES.get(ended.code, "failed"),
            message="" if ended.code == 0 else self._last_error(cell),
            metric=work.recipe.training.best_metric,
            peak_memory_bytes=ended.peak_bytes,
        )
        if run.is_dir():
            read_run(result, run)
        if ended.code == 0:
            summary = json.loads(ended.out)
            result.parameters, result.flops_per_token = summary["parameters"], summary["flops_per_token"]
            result.peak_device_bytes = summary["peak_device_bytes"]
        return result

    def _evaluate(self, work: Work, flags: tuple[str, ...]) -> dict[str, Any]:
        ended = self._child(["evaluate", str(self._run(work.cell)), *flags, "--json"], work.cell)
        if ended.code != 0:
            return {"failure": FAILURES.get(ended.code, "failed"), "message": self._last_error(work.cell)}
        figures = json.loads(ended.out)
        name, value = figure_of(figures, work.recipe.training.best_metric)
        numbers = {key: figure for key, figure in figures.items() if isinstance(figure, int | float | str)}
        return {"metric": name, "value": value, "figures": numbers}

    def _child(self, words: list[str], cell: Cell) -> Ended:
        if self.should_stop():
            raise Stopped
        ended = run_child(words, log=self.log(cell), should_stop=self.should_stop)
        if ended.stopped and ended.code != 0:
            raise Stopped
        if ended.code == STORAGE:
            raise StorageError(f"{cell.name}: {self._last_error(cell)}", hint="nothing that is finished was lost")
        if ended.code == IN_USE:
            raise RunInUseError(f"{cell.name}: {self._last_error(cell)}")
        return ended

    def _remember_tokenizer(self, work: Work) -> None:
        """The tokenizer that this cell trained serves all that would train the same."""
        key, run = work.tokenizer_key, self._run(work.cell)
        one, source, target = (run / f"tokenizer{side}.json" for side in ("", ".source", ".target"))
        if key is None or key in self.tokenizers:
            return
        if target.is_file():
            first = source if source.is_file() else one
            self.tokenizers[key] = ["--source-tokenizer", str(first), "--target-tokenizer", str(target)]
        elif one.is_file():
            self.tokenizers[key] = ["--tokenizer", str(one)]

    def _last_error(self, cell: Cell) -> str:
        """What the child said last of what went wrong, in one line."""
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
    """The flags of `tformer train` that make this cell, but for its folder and a tokenizer trained before."""
    cell, task = work.cell, work.cell.variant.task
    words = [*base_words(task), *task.train]
    for text in all_sets(task, cell.variant.sets, max_steps=work.max_steps, seed=cell.seed):
        words += ["--set", text]
    return words
