"""Many trainings of one command: what a sweep and a cross-validation show while they run, and their table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tformer.cli.process import StopFlag
from tformer.cli.report import emit, emit_json, print_table, progress_reporter, show_notes

if TYPE_CHECKING:
    from tformer.workflows.sweep.cells import Result
    from tformer.workflows.sweep.grid import Cell
    from tformer.workflows.sweep.plan import Plan
    from tformer.workflows.sweep.run import Grid
    from tformer.workflows.sweep.table import Table


def list_trainings(grid: Grid, *, as_json: bool) -> None:
    """Write the trainings of a dry run."""
    from tformer.workflows.sweep.cells import train_words

    cells = [
        {
            "cell": cell.name,
            "choices": dict(cell.variant.choices),
            "command": ["tformer", "train", *train_words(cell)],
        }
        for cell in grid.cells
    ]
    if as_json:
        left_out = [{"cell": result.cell, "message": result.message} for result in grid.invalid]
        ladders = {"halving": [ladder.to_json() for ladder in grid.ladders]} if grid.ladders else {}
        emit_json({"cells": cells, "left_out": left_out, **ladders})
        return
    for cell in grid.cells:
        emit("\t".join([cell.name, *(f"{key}={value}" for key, value in cell.variant.choices.items())]))
    show_notes([f"{grid.trainings} trainings"])


def run(
    plan: Plan,
    grid: Grid,
    out: Path,
    stop: StopFlag,
    *,
    tolerant: bool = False,
    as_json: bool,
    finish: Callable[[Sequence[Result]], str] = lambda results: "",
    **how: Any,
) -> None:
    """Train what is not finished, and show the table. Raises TformerError where a training failed.

    finish: writes more files, and returns their names. how: further arguments of `run_sweep`.
    """
    from tformer.workers.work import Work
    from tformer.workflows.sweep.run import require_success, run_sweep
    from tformer.workflows.sweep.table import document

    stop.be_patient()
    work = Work(should_stop=stop.should_stop)
    with Reporter() as reporter:
        table, results = run_sweep(plan, grid, out, observer=reporter, tolerant=tolerant, work=work, **how)
    more = finish(results)
    if as_json:
        emit_json(document(plan, table, results))
    else:
        show_table(table)
    show_notes([f"{out}: {more}table.md, table.tex, table.csv, table.json, cells.csv and curves"])
    require_success(results, out, tolerant=tolerant)


class Reporter:
    """Progress of a sweep on stderr: the trainings that run, and a line for each that ended."""

    def __init__(self) -> None:
        self._running = ExitStack()
        self._shown: dict[str, str] = {}  # of each training that runs

    def __enter__(self) -> Reporter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._running.close()

    def begins(self, cell: Cell, number: int, total: int, log: Path) -> None:
        self._shown[cell.name] = f"{number} of {total}  {cell.name}  (its log: {log})"
        self._show()

    def _show(self) -> None:
        self._running.close()
        if self._shown:
            self._running.enter_context(progress_reporter(", ".join(self._shown.values())))

    def ended(self, result: Result, number: int, total: int, *, seconds: float | None) -> None:
        from tformer.workflows.sweep.table import ended_line

        self._running.close()
        self._shown.pop(result.cell, None)
        show_notes([ended_line(result, number, total, seconds)])
        self._show()


def show_table(table: Table) -> None:
    """Write the table to stdout, the best ones of each task in bold, and what that means to stderr."""
    from tformer.workflows.sweep.table import markdown

    rows = [table.cells(row) for row in table.rows]
    marked = [table.cells(row, mark=lambda text: f"*{text}") for row in table.rows]
    print_table(
        table.headings,
        rows,
        title=table.name,
        markdown=markdown(table),
        text_columns=len(table.headings) - len(table.columns),
        bold={
            (number, column)
            for number, (plain, best) in enumerate(zip(rows, marked, strict=True))
            for column, (cell, other) in enumerate(zip(plain, best, strict=True))
            if cell != other
        },
        section_starts={
            number for number in range(1, len(rows)) if table.rows[number].task != table.rows[number - 1].task
        },
    )
    show_notes(table.remarks())
