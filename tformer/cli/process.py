"""The process of a command: when it started, its signals, and garbage collection."""

from __future__ import annotations

import gc
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, TextIO

from tformer.support.errors import Interrupted, OutOfMemoryError
from tformer.support.formatting import decimal_bytes

STARTED = time.monotonic()
"Start time of this process, taken as early as possible; `--max-minutes` counts from here."

RESERVED_CPU_SECONDS = 10
"""CPU time kept for saving a checkpoint before the limit of the process."""

ROOM = 128 * 2**20
"""Address space that starting PyTorch takes beside its libraries, as measured."""


class DroppableStream:
    """A text stream whose reader may go away: output is dropped once the pipe is closed, the disk full, the tty gone.

    A training must not end because its messages are no longer read.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with self._dropping():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._dropping():
            self._stream.flush()

    @contextmanager
    def _dropping(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())  # what is still buffered goes there

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class BeforeTorch:
    """An import hook that raises before `import torch` if torch's libraries would end the process."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """FileNotFoundError for a current folder that is gone, OutOfMemoryError for too little room (`ulimit -v`)."""
        if name != "torch":
            return
        os.getcwd()
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        found = PathFinder.find_spec(name, path)
        if limit == resource.RLIM_INFINITY or sys.platform != "linux" or found is None or found.origin is None:
            return
        held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        packages = Path(found.origin).parent.parent
        files = (*packages.glob("torch/lib/*.so*"), *packages.glob("nvidia/**/lib/*.so*"))  # CUDA's are beside it
        libraries = sum(file.stat().st_size for file in files)
        if (needed := held + libraries + ROOM) > limit:
            message = f"PyTorch needs {decimal_bytes(needed)} of address space, the limit is {decimal_bytes(limit)}"
            raise OutOfMemoryError(f"out of memory: {message}", hint="raise the limit (ulimit -v)")


@contextmanager
def uncollected() -> Iterator[None]:
    """Context manager that turns garbage collection off: importing torch and matplotlib gets a fifth faster."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _reserve_cpu_seconds() -> None:
    """Let SIGXCPU come some seconds before the limit of CPU time (`ulimit -t`), where the system kills the process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_CPU)
    if soft == hard != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_CPU, (max(1, hard - min(RESERVED_CPU_SECONDS, hard // 4 + 1)), hard))


class StopFlag:
    """Turns SIGINT, SIGTERM, SIGHUP and SIGXCPU into a flag that long work polls; a second signal stops at once.

    Work that has not polled `GRACE_SECONDS` after the signal is blocked in a call that never returns (an open FIFO, a
    terminal) and is interrupted there, unless `be_patient` was called: then a poll may take as long as a training step.
    Used as a context manager, which restores the previous handlers at its end.

    Attributes:
        signal_number: the signal that has arrived, if any.
        echo_seconds: a signal within this time after the first counts as the same.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGXCPU)
    GRACE_SECONDS = 3.0

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self.echo_seconds = 0.0
        self._arrived = 0.0
        self._patient = not hasattr(signal, "setitimer")
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopFlag:
        _reserve_cpu_seconds()
        for number, handler in self.handlers().items():
            self._previous[number] = signal.signal(number, handler)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.be_patient()
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if isinstance(error, Interrupted) and self.signal_number is not None:
            error.exit_code = 128 + self.signal_number  # the code that polled sees only the flag, not the signal

    def handlers(self) -> dict[signal.Signals, Callable[[int, FrameType | None], None]]:
        """The signals that become a flag, each with its handler."""
        ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # nohup: the work goes on when the terminal closes
        return {number: self._handle for number in self.SIGNALS if number != signal.SIGHUP or not ignored}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal_number is not None:
            if time.monotonic() - self._arrived < self.echo_seconds:
                return
            raise self.interrupted("interrupted at once")
        self.signal_number, self._arrived = number, time.monotonic()
        if number == signal.SIGXCPU:
            _, hard = resource.getrlimit(resource.RLIMIT_CPU)
            resource.setrlimit(resource.RLIMIT_CPU, (hard, hard))  # otherwise the system sends it again every second
        if not self._patient:
            self._previous.setdefault(signal.SIGALRM, signal.signal(signal.SIGALRM, self._overdue))
            signal.setitimer(signal.ITIMER_REAL, self.GRACE_SECONDS)

    def _overdue(self, number: int, frame: FrameType | None) -> None:
        raise self.interrupted("interrupted")

    def be_patient(self) -> None:
        """Stop interrupting blocked calls: from now on a signal takes effect at the next poll."""
        if not self._patient:
            signal.setitimer(signal.ITIMER_REAL, 0)
        self._patient = True

    def should_stop(self) -> bool:
        """Whether a signal has arrived."""
        if self.signal_number is None:
            return False
        self.be_patient()
        return True

    def interrupted(self, message: str) -> Interrupted:
        """The error that ends the command with the exit code of the signal received."""
        return Interrupted(message, signal_number=self.signal_number or signal.SIGINT)
