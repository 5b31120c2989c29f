"""Many trainings of one command: progress and table of a sweep or a cross-validation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tformer.cli.process import StopFlag
from tformer.cli.report import emit, emit_json, print_table, progress_reporter, show_notes

if TYPE_CHECKING:
    from tformer.workflows.sweep.cells import Result
    from tformer.workflows.sweep.plan import SweepPlan
    from tformer.workflows.sweep.run import Grid
    from tformer.workflows.sweep.table import SweepTable


def list_trainings(grid: Grid, *, as_json: bool) -> None:
    """Write the trainings of a dry run."""
    from tformer.workflows.sweep.cells import train_words

    if as_json:
        cells = [
            {"cell": cell.name, "choices": cell.variant.choices, "command": ["tformer", "train", *train_words(cell)]}
            for cell in grid.cells
        ]
        left_out = [{"cell": result.cell, "message": result.message} for result in grid.invalid]
        emit_json({"cells": cells, "left_out": left_out})
        return
    for cell in grid.cells:
        emit("\t".join([cell.name, *(f"{key}={value}" for key, value in cell.variant.choices.items())]))
    show_notes([f"{len(grid.cells)} trainings"])


def run(
    plan: SweepPlan,
    grid: Grid,
    out: Path,
    stop: StopFlag,
    *,
    tolerant: bool = False,
    as_json: bool,
    finish: Callable[[Sequence[Result]], str] = lambda results: "",
    **how: Any,
) -> None:
    """Train all unfinished runs, and show the table. Raises TformerError if a training failed.

    finish: writes more files, and returns their names. how: further arguments of `run_sweep`.
    """
    from tformer.workers.work import Work
    from tformer.workflows.sweep.run import require_success, run_sweep
    from tformer.workflows.sweep.table import document

    stop.be_patient()
    how |= {"tolerant": tolerant, "work": Work(should_stop=stop.should_stop)}
    with Reporter() as reporter:
        table, results = run_sweep(plan, grid, out, begins=reporter.begins, ended=reporter.ended, **how)
    more = finish(results)
    if as_json:
        emit_json(document(plan, table, results))
    else:
        show_table(table)
    show_notes([f"{out}: {more}table.md, table.tex, table.csv, table.json, cells.csv and curves"])
    require_success(results, out, tolerant=tolerant)


class Reporter(ExitStack):
    """Progress of a sweep on stderr: the trainings that run, and a line for each that ended."""

    def __init__(self) -> None:
        super().__init__()
        self._shown: dict[str, str] = {}  # of each training that runs

    def begins(self, name: str, line: str) -> None:
        self._shown[name] = line
        self._show()

    def ended(self, result: Result, line: str) -> None:
        self.close()
        self._shown.pop(result.cell, None)
        show_notes([line])
        self._show()

    def _show(self) -> None:
        self.close()
        if self._shown:
            self.enter_context(progress_reporter(", ".join(self._shown.values())))


def show_table(table: SweepTable) -> None:
    """Write the table to stdout, the best ones of each task in bold, and what that means to stderr."""
    from tformer.workflows.sweep.table import markdown

    tasks = [row.task for row in table.rows]
    print_table(
        table.headings,
        list(map(table.cells, table.rows)),
        title=table.name,
        markdown=markdown(table),
        text_columns=len(table.headings) - len(table.columns),
        bold={(number, column) for number, row in enumerate(table.rows) for column in table.best(row)},
        section_starts={number for number in range(1, len(tasks)) if tasks[number] != tasks[number - 1]},
    )
    show_notes(table.remarks())
