"""Output of every command: messages on stderr, data, JSON and tables on stdout, progress."""

from __future__ import annotations

import gc
import glob
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from rich.console import Console

from tformer.errors import InputError, Interrupted, visible
from tformer.formatting import finite_or_none

Progress = Callable[..., None]

STARTED = time.monotonic()
"""When this process began, as nearly as Python code can tell: `--max-minutes` counts from here."""

console = Console(stderr=True, soft_wrap=True, highlight=False)
"""Talk goes to stderr through this console; stdout carries data only."""


def emit(text: str) -> None:
    """Write one line of data to stdout."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def emit_json(document: Any) -> None:
    """Write one JSON document, on one line, to stdout. NaN and infinity, which JSON lacks, become null."""
    emit(json.dumps(finite_or_none(document), ensure_ascii=False, allow_nan=False))


def report_result(lines: Iterable[str], path: Path, document: Any | None) -> None:
    """What a command made: in words on stderr; on stdout its path, or with --json the document."""
    for line in lines:
        console.print(visible(line), markup=False)
    if document is None:
        emit(str(path))
    else:
        emit_json(document)


@contextmanager
def uncollected() -> Iterator[None]:
    """No search for garbage meanwhile: imports leave none, and those of torch and matplotlib take a fifth less time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class StopFlag:
    """Turns SIGINT, SIGTERM and SIGHUP into a flag that long work polls; a second signal stops at once.

    Work that has not polled `GRACE_SECONDS` after the signal is stuck in a call that never will (an open FIFO, a
    terminal): it is interrupted there, unless `be_patient` said that a poll may take as long as a training step.
    Used as a context manager; the previous handlers come back at its end.
    """

    SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
    GRACE_SECONDS = 3.0

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self._patient = not hasattr(signal, "setitimer")
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopFlag:
        for number in self.SIGNALS:
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.be_patient()
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if isinstance(error, Interrupted) and self.signal_number is not None:
            error.exit_code = 128 + self.signal_number  # whoever polled cannot know which signal it was

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal_number is not None:
            raise self.interrupted("interrupted at once")
        self.signal_number = number
        if not self._patient:
            self._previous.setdefault(signal.SIGALRM, signal.signal(signal.SIGALRM, self._overdue))
            signal.setitimer(signal.ITIMER_REAL, self.GRACE_SECONDS)

    def _overdue(self, number: int, frame: FrameType | None) -> None:
        raise self.interrupted("interrupted")

    def be_patient(self) -> None:
        """From now on a signal waits for the next poll, however long that takes."""
        if not self._patient:
            signal.setitimer(signal.ITIMER_REAL, 0)
        self._patient = True

    def should_stop(self) -> bool:
        if self.signal_number is None:
            return False
        self.be_patient()  # the signal has been heard
        return True

    def interrupted(self, message: str, *, hint: str | None = None) -> Interrupted:
        """The error that ends the command with the exit code of the signal received."""
        return Interrupted(message, signal_number=self.signal_number or signal.SIGINT, hint=hint)


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

    def tell(done: float, total: float | None = total) -> None:
        nonlocal last
        if time.monotonic() - last >= 10:
            last = time.monotonic()
            share = f"{100 * done / total:.0f} %" if total else f"{done:,.0f}"
            console.print(f"{description}: {share}", markup=False)

    yield tell


def refuse_to_replace(output: Path | None, inputs: Iterable[str | Path], *, option: str = "--output") -> None:
    """Raise InputError when the file to write is one of those to read, by whatever name.

    Args:
        output: None: nothing is written.
        inputs: files, folders, patterns, or `-` for standard input, which may come from a file too.
    """
    if output is None or not output.is_file():
        return
    for name in map(str, inputs):
        if _reads(name, output):
            raise InputError(
                f"{option} {output} would replace what is read{'' if name == str(output) else f': {name}'}",
                hint="write to another file",
            )


def _reads(name: str, file: Path) -> bool:
    if name == "-":
        with suppress(OSError):  # a standard input that is no file
            return os.path.samestat(os.fstat(sys.stdin.fileno()), file.stat())
        return False
    place = os.path.expanduser(name)
    if os.path.isdir(place):
        return Path(os.path.realpath(file)).is_relative_to(os.path.realpath(place))
    places = [place] if os.path.exists(place) else glob.glob(place, recursive=True)
    return any(os.path.samefile(one, file) for one in places if os.path.exists(one))


def examples(*lines: str) -> str:
    """The epilog of a command's help: its examples, a paragraph each so that they keep their lines."""
    return "\n\n".join(("Examples:", *lines))
