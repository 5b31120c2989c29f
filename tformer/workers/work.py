"""Callbacks of long work as one value: what it shows, when it stops, who shares it; and the job of a process."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tformer.support.errors import Interrupted

if TYPE_CHECKING:
    from tformer.workers.worker import Worker

Report = Callable[..., None]
"""Called with the amount done and the total (None: unknown)."""
Progress = Callable[..., AbstractContextManager[Report]]
ShouldStop = Callable[[], bool]


def no_progress(*_: Any, **__: Any) -> AbstractContextManager[Report]:
    """Progress of work that shows none."""
    return nullcontext(lambda *_, **__: None)


def never() -> bool:
    """The `should_stop` of work that is never interrupted."""
    return False


@dataclass(frozen=True)
class Work:
    """Callbacks of long work; by default it shows nothing, is never stopped and belongs to one process.

    Attributes:
        progress: `with progress(description, total=None, unit="") as report: report(done, total)`; the unit names what
            is counted (`pairs`, `B` for bytes). `part` calls it.
        should_stop: polled between batches; True after an interruption.
        note: shows one message to the user.
        report: shows how far the current part of the work is.
        cache_dir: of token files and translations; None: the default cache directory.
        workers: processes that tokenize a text; None: as many as there are processors.
        group: this process as one of several that divide the batches of an evaluation; None: it works alone.
        is_trial: only the time that the work takes is asked: nothing is left out because its result would be poor.
    """

    progress: Progress = no_progress
    should_stop: ShouldStop = never
    note: Callable[[str], None] = lambda text: None
    report: Report = lambda *_: None
    cache_dir: Path | None = None
    workers: int | None = None
    group: Worker | None = None
    is_trial: bool = False

    @property
    def worker(self) -> Worker:
        """This process. All workers of its group get all results."""
        from tformer.workers.worker import ALONE  # imports torch, which commands on text alone do without

        return self.group or ALONE

    @contextmanager
    def part(self, description: str, total: float | None = None, unit: str = "") -> Iterator[Work]:
        """Show the progress of a part of the work, which reports through the yielded value."""
        with self.progress(description, total=total, unit=unit) as report:
            yield replace(self, report=report)

    def piece(self, before: int, total: int) -> Work:
        """The same for one of several pieces of a part: after `before` of all `total`."""
        return replace(self, report=lambda done, _of=None: self.report(before + done, total))

    def note_all(self, *holders: Any) -> None:
        """Show the `notes` of sources and token sets, each text once."""
        for note in dict.fromkeys(note for holder in holders for note in holder.notes):
            self.note(note)

    def raise_if_stopped(self, when: str) -> None:
        """Raise Interrupted after an interruption; `when` goes on "interrupted": "while reading x.txt"."""
        if self.should_stop():
            raise Interrupted(f"interrupted {when}", signal_number=signal.SIGINT)


QUIET = Work()
"""Work that shows nothing and is never stopped."""


@dataclass(frozen=True)
class Job:
    """The work of each process of a command: `run` returns its exit code (None: 0), `tformer WORDS` does the same.

    A forked worker uses only `run`, a worker that is started as a command only `words`.
    """

    run: Callable[[Worker], int | None]
    words: Sequence[str]
