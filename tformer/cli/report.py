"""Output of every command: messages and progress on stderr; data, JSON and tables on stdout."""

from __future__ import annotations

import _thread
import os
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tformer.support.errors import visible
from tformer.support.formatting import counted, duration, json_text

if TYPE_CHECKING:
    from rich.console import Console

    from tformer.cli.process import StopFlag
    from tformer.decoding.answer_table import AnswerTable
    from tformer.support.files import Write
    from tformer.viz.output import OutputTarget
    from tformer.workers.worker import Worker

Item = TypeVar("Item")
Progress = Callable[..., None]

PIPE_WIDTH = 100
"""Columns of text that is laid out, in a pipe or a file."""


class Messages:
    """A console that remembers when something was last printed on it. It imports rich when it is first used.

    Attributes:
        printed_at: the time of the last line, as `time.monotonic()` has it.
    """

    printed_at = 0.0

    def __init__(self, **options: Any) -> None:
        self._options = options

    @cached_property
    def rich(self) -> Console:
        """The console itself."""
        from rich.console import Console

        class Noting(Console):
            def print(console, *objects: Any, **options: Any) -> None:
                self.printed_at = time.monotonic()
                super().print(*objects, **options)

        return Noting(**self._options)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print as a console of rich does."""
        self.rich.print(*objects, **options)

    @property
    def is_terminal(self) -> bool:
        return self.rich.is_terminal

    @property
    def width(self) -> int:
        return self.rich.width


def in_notebook(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a notebook's kernel runs this command (`!tformer ...`): its terminal keeps every state of a spinner."""
    inline = "inline" in environment.get("MPLBACKEND", "")  # a kernel without JPY_PARENT_PID, as that of VS Code
    return inline or "JPY_PARENT_PID" in environment or any(name.startswith("COLAB_") for name in environment)


console = Messages(stderr=True, soft_wrap=True, highlight=False, force_terminal=False if in_notebook() else None)
"""Messages go to stderr through this console; stdout carries data only."""

# --- messages on stderr -----------------------------------------------------------------------------------------------


def show_notes(notes: Iterable[str], *, dim: bool = False) -> None:
    """Write messages to stderr, one a line, without markup."""
    for note in notes:
        console.print(visible(note), style="dim" if dim else None, markup=False)


def message_width() -> int:
    """Width of messages with a layout: the terminal's; PIPE_WIDTH in a pipe."""
    return console.width if console.is_terminal else PIPE_WIDTH


# --- progress on stderr -----------------------------------------------------------------------------------------------

FIRST_LINE_SECONDS, LINE_SECONDS, MOST_LINE_SECONDS = 2.0, 10.0, 60.0
"""Without a terminal: silence before the first line about work that goes on, and before each further one, which grows
with a tenth of the time that it takes."""

SPINNER_SECONDS = 1.0
"""On a terminal: silence before the spinner appears."""


@contextmanager
def progress_reporter(description: str, total: float | None = None, unit: str = "") -> Iterator[Progress]:
    """A callable `progress(done, total=None)`: a bar on a terminal, now and then a line when piped.

    unit: what is counted, for example `pairs`; `B` for bytes. The lines come also while nothing is reported.
    """
    with spinner.hidden(), (_bar if console.is_terminal else _lines)(description, total, unit) as progress:
        yield progress


@contextmanager
def _bar(description: str, total: float | None, unit: str) -> Iterator[Progress]:
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.table import Column

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20 if console.width >= 80 else 5),
    )
    counts = TextColumn("{task.fields[counts]}", table_column=Column(overflow="fold"))  # wraps where it is narrow
    bar = Progress(*columns, counts, TimeElapsedColumn(), console=console.rich, transient=True, redirect_stdout=False)
    with bar:
        task = bar.add_task(description, total=total, counts="")

        def show(done: float, total: float | None = total) -> None:
            bar.update(task, completed=done, total=total, counts=_counts(done, total, unit))

        yield show


_stages: list[object] = []
"""The work that lines may report on, the innermost last; only that one writes lines."""


@contextmanager
def _lines(
    description: str, total: float | None = None, unit: str = "", *, wanted: Callable[[], bool] = lambda: True
) -> Iterator[Progress]:
    state: tuple[float, float | None] = (0, total)
    ended, writing, began = threading.Event(), threading.Lock(), time.monotonic()

    def note(done: float, total: float | None = total) -> None:
        nonlocal state
        state = (done, total)

    def write_lines() -> None:
        limit, since = FIRST_LINE_SECONDS if unit else LINE_SECONDS, began
        while not ended.wait(max(0.05, limit - (time.monotonic() - max(since, console.printed_at)))):
            silence = time.monotonic() - max(since, console.printed_at)
            with writing:
                if silence >= limit and not ended.is_set() and _stages[-1] is ended and wanted():
                    since = time.monotonic()
                    limit = max(LINE_SECONDS, min(MOST_LINE_SECONDS, (since - began) / 10))
                    parts = [description, _counts(*state, unit), duration(since - began)]
                    console.print(": ".join(filter(None, parts)), markup=False)

    _stages.append(ended)
    try:
        # `Thread.start` would wait for ever for a thread that ends at once because no memory is left.
        _thread.start_new_thread(write_lines, ())
        yield note
    finally:
        with writing:
            ended.set()
        _stages.remove(ended)


def _counts(done: float, total: float | None, unit: str) -> str:
    """`12 of 40 steps, 30 %`; "" without a count."""
    share = f", {100 * done / total:.0f} %" if total else ""
    return counted(done, total, unit) + share if done or total else ""


class Spinner:
    """A spinner on a terminal while a command is silent: before its first data, and outside `progress_reporter`."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._hidden = 1  # by default, and by every bar
        self._due = 0.0
        self._live: Any = None

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show it in this context until `end`, after a first second. A pipe gets a line every ten seconds."""
        if not console.is_terminal:
            self._due = time.monotonic()
            with _lines("working", wanted=lambda: self._due > 0):
                yield
            return
        timer = threading.Timer(SPINNER_SECONDS, self._show)
        timer.daemon = True
        self._due, self._hidden = time.monotonic() + SPINNER_SECONDS, 0
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            self.end()

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Hide it in this context: something else is shown."""
        with self._lock:
            self._hidden += 1
            self._stop()
        try:
            yield
        finally:
            with self._lock:
                self._hidden -= 1
            if time.monotonic() >= self._due:
                self._show()

    def end(self) -> None:
        """Hide it for good: data follows, or a live line."""
        if self._due:
            with self._lock:
                self._due, self._hidden = 0.0, self._hidden + 1
                self._stop()

    def _show(self) -> None:
        with self._lock:
            if not self._hidden and self._live is None:
                from rich.live import Live
                from rich.spinner import Spinner as Dots

                dots = Dots("dots", text="working")
                self._live = Live(
                    dots, console=console.rich, transient=True, refresh_per_second=4, redirect_stdout=False
                )
                self._live.start()

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


spinner = Spinner()


# --- data on stdout ---------------------------------------------------------------------------------------------------


def emit(text: str) -> None:
    """Write one line of data to stdout."""
    spinner.end()
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def emit_lines(lines: Iterable[str]) -> None:
    """Write lines of data to stdout, control characters spelled out."""
    for line in lines:
        emit(visible(line))


def emit_json(document: Any) -> None:
    """Write one JSON document, on one line, to stdout. NaN and infinity, which JSON lacks, become null."""
    emit(json_text(document).rstrip("\n"))


def report_result(lines: Iterable[str], path: Path, document: Any | None) -> None:
    """Report the result of a command: lines on stderr; on stdout the document of `--json`, else the path."""
    show_notes(lines)
    if document is None:
        emit(str(path))
    else:
        emit_json(document)


def emit_document(output: OutputTarget, content: str | bytes, *, says: bool = True) -> None:
    """Write a page, a picture or a drawing to its file, which a note names if `says`, or to stdout."""
    from tformer.viz.output import write_output

    if output.path is None:
        spinner.end()
    write_output(output, content)
    if output.path is not None and says:
        show_notes([f"wrote {output.path}"], dim=True)


class DataOutput:
    """Where a command writes its data: stdout or a file. On a terminal control characters are spelled out.

    Of several processes only the leader writes; the others send it what they would write, see `take_turns`.
    """

    def __init__(self, write: Write, *, on_terminal: bool, worker: Worker | None = None) -> None:
        self._write, self.on_terminal, self._worker = write, on_terminal, worker

    def take_turns(self, items: Iterable[Item], stop: StopFlag) -> Iterator[Item]:
        """The items that this process answers, of all; answers and messages appear in the order of the items.

        The body of the loop over them writes the answer of an item. Raises Interrupted where the leader was waiting for
        the answer of another process.
        """
        worker = self._worker
        if worker is None or worker.world_size == 1:
            yield from items
            return
        for index, item in enumerate(items):
            if index % worker.world_size != worker.rank:
                if worker.leads:
                    answer = worker.receive(index, stop.should_stop)
                    if answer is None:
                        raise stop.interrupted("interrupted: what was done before is written")
                    self._write(answer["data"])
                    console.rich.file.write(answer["messages"])
            elif worker.leads:
                yield item
            else:
                written: list[str] = []
                self._write, console.rich.quiet = written.append, False
                with console.rich.capture() as messages:
                    yield item
                console.rich.quiet = True
                worker.send(index, {"data": "".join(written), "messages": messages.get()})

    @contextmanager
    def answering(self, table: AnswerTable | None) -> Iterator[None]:
        """In this context the documents are the answers to the rows of a table, which the leader writes."""
        if table is None or not self.leads:
            yield
            return
        plain = self._write
        with table.writing(lambda text: plain(visible(text) if self.on_terminal else text)) as self._write:
            yield

    @property
    def leads(self) -> bool:
        """Whether this process writes the answers of all."""
        return self._worker is None or self._worker.leads

    def total(self, number: int) -> int:
        """The sum of a number over all processes, in the leader. The results in other processes are not shown."""
        return number if self._worker is None else self._worker.total(number)

    def text(self, text: str, *, is_painted: bool = False) -> None:
        """Write text with its own line ends. is_painted: its control characters are colours."""
        self._end_spinner()
        self._write(visible(text) if self.on_terminal and not is_painted else text)

    def documents(self, documents: Iterable[Any]) -> None:
        """Write JSON documents, one a line; NaN and infinity become null."""
        self._end_spinner()
        # ASCII only on a terminal: JSON leaves some control characters unescaped.
        self._write("".join(json_text(document, ensure_ascii=self.on_terminal) for document in documents))

    def _end_spinner(self) -> None:
        if self.on_terminal:
            spinner.end()


@contextmanager
def data_output(path: Path | None, worker: Worker) -> Iterator[DataOutput]:
    """The output of a command: stdout (None), or a file that appears when the work is done (`open_output`)."""
    from tformer.support.files import open_output

    on_terminal = path is None and sys.stdout.isatty()
    with open_output(path) if worker.leads else nullcontext(lambda text: None) as write:
        yield DataOutput(write, on_terminal=on_terminal, worker=worker)


# --- tables -----------------------------------------------------------------------------------------------------------


def terminal_width() -> int | None:
    """Columns of the terminal that stdout is; None in a pipe or a file, where a line may have any length."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


LABEL = 10  # columns


def in_columns(label: str, text: str) -> str:
    """A label and a text beside it, or below it where the label is long; wrapped on a terminal."""
    start = f"{label:<{LABEL}}" if len(label) < LABEL else f"{label}\n{'':<{LABEL}}"
    if not text:
        return label
    width = terminal_width()
    body = [text] if width is None else textwrap.wrap(text, max(width - LABEL, LABEL), break_on_hyphens=False)
    return start + f"\n{'':<{LABEL}}".join(body)


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
        text_columns: number of first columns that are left-justified; the others, numbers, are right-justified.
        bold: (row, column) of cells that stand out.
        section_starts: rows with a rule above them.
    """
    if not sys.stdout.isatty():
        emit(markdown.rstrip("\n"))
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    spinner.end()
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
