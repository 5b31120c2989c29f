"""How a sweep is shown: a line for each training that ends, and the table, also where a terminal is narrow."""

from __future__ import annotations

import sys
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from tformer.cli.common import console, emit
from tformer.errors import visible

if TYPE_CHECKING:
    from tformer.workflows.sweep.grid import Cell
    from tformer.workflows.sweep.results import Result
    from tformer.workflows.sweep.table import Row, Table


class Reporter:
    """Tells of each training on stderr: of the one that runs where it writes, of one that ended what it came to."""

    def __init__(self) -> None:
        self._status = console.status("") if console.is_terminal else None

    def __enter__(self) -> Reporter:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status is not None:
            self._status.stop()

    def begins(self, cell: Cell, number: int, total: int, log: Path) -> None:
        if self._status is not None:
            self._status.update(f"{number} of {total}  {cell.name}  (its log: {log})")

    def ended(self, result: Result, number: int, total: int, *, seconds: float | None) -> None:
        from tformer.workflows.sweep.table import show_metric

        if result.best is not None and result.status == "done":
            told = f"{result.metric} {show_metric(result.best, result.metric)} at step {result.best_step}"
        else:
            told = ": ".join(part for part in (result.status, result.message) if part)
        for label, entry in result.evaluate.items():
            value = entry.get("value")
            told += f", {label} {show_metric(value, entry['metric']) if value is not None else entry.get('failure')}"
        took = "finished before" if seconds is None else _clock(seconds)
        console.print(visible(f"{number} of {total}  {result.cell}  {told}  {took}"), markup=False)


def show_table(table: Table) -> None:
    """On a terminal a table, or a block for each variant where it is too narrow for one; else Markdown."""
    if not sys.stdout.isatty():
        from tformer.workflows.sweep.report import markdown

        emit(markdown(table).rstrip("\n"))
        return
    from rich.table import Table as RichTable

    wide = RichTable(title=table.name, title_justify="left")
    numbers = len(table.headings) - len(table.columns)
    for index, heading in enumerate(table.headings):
        wide.add_column(visible(heading), justify="left" if index < numbers else "right", no_wrap=True)
    previous = None
    for row in table.rows:
        if previous not in (None, row.task):
            wide.add_section()
        previous = row.task
        wide.add_row(*_cells(table, row))
    stdout = Console(highlight=False)
    if stdout.measure(wide, options=stdout.options.update(max_width=10_000)).maximum <= stdout.width:
        stdout.print(wide)
        return
    for row in table.rows:
        for heading, text in zip(table.headings, table.cells(row), strict=True):
            emit(visible(f"{heading}: {text}"))
        emit("")


def _cells(table: Table, row: Row) -> list[str]:
    """With markup around the best alone, whatever the texts hold."""
    plain, marked = table.cells(row), table.cells(row, mark=lambda text: f"*{text}")
    return [
        f"[bold]{escape(visible(text))}[/]" if text != other else escape(visible(text))
        for text, other in zip(plain, marked, strict=True)
    ]


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
