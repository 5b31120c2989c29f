"""Output of every command: messages and progress on stderr; data, JSON and tables on stdout."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from tformer.errors import visible
from tformer.formatting import finite_or_none

if TYPE_CHECKING:
    from tformer.output_files import Write

Progress = Callable[..., None]

PIPE_WIDTH = 100
"""Columns of text that is laid out, in a pipe or a file."""

console = Console(stderr=True, soft_wrap=True, highlight=False)
"""Messages go to stderr through this console; stdout carries data only."""

# --- messages on stderr -----------------------------------------------------------------------------------------------


def show_notes(notes: Iterable[str], *, dim: bool = False) -> None:
    """Write messages to stderr, one a line, without markup."""
    for note in notes:
        console.print(visible(note), style="dim" if dim else None, markup=False)


def message_width() -> int:
    """Columns of messages that are laid out: those of the terminal; PIPE_WIDTH in a pipe."""
    return console.width if console.is_terminal else PIPE_WIDTH


@contextmanager
def progress_reporter(description: str, total: float | None = None) -> Iterator[Progress]:
    """A callable `progress(done, total=None)`: a bar on a terminal, a line every ten seconds when piped."""
    if console.is_terminal:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
        with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
            task = bar.add_task(description, total=total)

            def show(done: float, total: float | None = total) -> None:
                bar.update(task, completed=done, total=total)

            yield show
        return

    last = time.monotonic()

    def show_line(done: float, total: float | None = total) -> None:
        nonlocal last
        if time.monotonic() - last >= 10:
            last = time.monotonic()
            share = f"{100 * done / total:.0f} %" if total else f"{done:,.0f}"
            console.print(f"{description}: {share}", markup=False)

    yield show_line


# --- data on stdout ---------------------------------------------------------------------------------------------------


def emit(text: str) -> None:
    """Write one line of data to stdout."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def emit_lines(lines: Iterable[str]) -> None:
    """Write lines of data to stdout, control characters spelled out."""
    for line in lines:
        emit(visible(line))


def emit_json(document: Any) -> None:
    """Write one JSON document, on one line, to stdout. NaN and infinity, which JSON lacks, become null."""
    emit(json.dumps(finite_or_none(document), ensure_ascii=False, allow_nan=False))


def report_result(lines: Iterable[str], path: Path, document: Any | None) -> None:
    """Report the result of a command: lines on stderr; on stdout the document of `--json`, else the path."""
    show_notes(lines)
    if document is None:
        emit(str(path))
    else:
        emit_json(document)


class DataOutput:
    """Where a command writes its data: stdout or a file. On a terminal control characters are spelled out."""

    def __init__(self, write: Write, *, on_terminal: bool) -> None:
        self._write, self.on_terminal = write, on_terminal

    def text(self, text: str) -> None:
        """Write text as it is, line ends included."""
        self._write(visible(text) if self.on_terminal else text)

    def documents(self, documents: Iterable[Any]) -> None:
        """Write JSON documents, one a line; NaN and infinity become null."""
        # ASCII only on a terminal: JSON leaves some control characters unescaped.
        ascii_only = self.on_terminal
        self._write(
            "".join(json.dumps(finite_or_none(x), ensure_ascii=ascii_only, allow_nan=False) + "\n" for x in documents)
        )


@contextmanager
def data_output(path: Path | None) -> Iterator[DataOutput]:
    """The output of a command: stdout (None), or a file that appears when the work is done (`open_output`)."""
    from tformer.output_files import open_output

    with open_output(path) as write:
        yield DataOutput(write, on_terminal=path is None and sys.stdout.isatty())


# --- tables -----------------------------------------------------------------------------------------------------------


def terminal_width() -> int | None:
    """Columns of the terminal that stdout is; None in a pipe or a file, where a line may have any length."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def aligned(rows: Sequence[Sequence[str]], *, right: Collection[str] = ()) -> list[str]:
    """Rows of text with columns two spaces apart; columns with a heading (first row) in `right` are right-justified."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if heading in right else cell.ljust(width)
            for heading, cell, width in zip(rows[0], row, widths, strict=True)
        ).rstrip()
        for row in rows
    ]


def print_table(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    title: str,
    markdown: str,
    text_columns: int = 1,
    bold: Collection[tuple[int, int]] = (),
    section_starts: Collection[int] = (),
) -> None:
    """Write a table to stdout: drawn on a terminal (a block for each row where it is too narrow), else as Markdown.

    Args:
        markdown: the same table for a pipe or a file.
        text_columns: so many first columns are left-justified, the others, numbers, right-justified.
        bold: (row, column) of cells that stand out.
        section_starts: rows with a rule above them.
    """
    if not sys.stdout.isatty():
        emit(markdown.rstrip("\n"))
        return
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column, heading in enumerate(headings):
        table.add_column(visible(heading), justify="left" if column < text_columns else "right", no_wrap=True)
    for number, row in enumerate(rows):
        if number in section_starts:
            table.add_section()
        cells = [escape(visible(cell)) for cell in row]
        table.add_row(*(f"[bold]{cell}[/]" if (number, column) in bold else cell for column, cell in enumerate(cells)))
    stdout = Console(highlight=False)
    if stdout.measure(table, options=stdout.options.update(max_width=10_000)).maximum <= stdout.width:
        stdout.print(table)
        return
    for row in rows:
        emit_lines(f"{heading}: {cell}" for heading, cell in zip(headings, row, strict=True))
        emit("")
