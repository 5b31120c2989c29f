"""Measuring processes, as controlled by the parent: one measurement in one process, or contenders whose rounds
alternate. Memory and caches of one measurement cannot disturb a later one. The parent writes JSON requests to
`python -m tformer.bench.worker`, one a line, and reads one JSON answer to each:

    {"measurement", "arguments", "max_seconds"}      call the function "module:name": it returns the result, or a
                                                     `Contender`, which then runs rounds on request
    {"question": "round" | "peak", "max_seconds"}    ask a contender, once it is prepared

The answer {"failed": reason} ends the process. A process that exceeds its time limit is killed, and it ends with its
parent; where memory runs out, the kernel kills the measuring process first.
"""

from __future__ import annotations

import contextlib
import json
import select
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tformer.support.errors import Interrupted
from tformer.support.processes import Child, python_command

POLL_SECONDS = 0.05
EXIT_SECONDS = 10
"""Seconds that a process gets to exit by itself at its end."""

OUT_OF_MEMORY, TOO_LONG = "out of memory", "over"
"""First words of the reason when a measurement had too little memory or time."""

ENOUGH_SECONDS = 0.5
"""Quick rounds are repeated until each contender has run for this long, beyond the number of repeats."""
MOST_REPEATS = 1000
SHARE_FOR_ROUNDS = 0.6
"""Share of the time limit after which no further turn of all contenders begins."""

RacedRow = dict[str, Any]
"""Of one contender: `summarize` of its rounds, `tokens` of a round and peak `memory`; or {"failed": reason}."""


class MeasuringProcess:
    """A `tformer.bench.worker` process. Between requests it is suspended (SIGSTOP).

    Otherwise threads that keep spinning after a round would take time from the next contender's. When its parent dies
    while it is suspended, the kernel ends it: by `end_with_parent` on Linux, elsewhere by SIGHUP, since its process
    group is then orphaned (setpgid(2)).

    Attributes:
        failed: why there is no result; the process has ended by then.
        seconds, tokens: of every timed round of a contender.
    """

    def __init__(self, *, max_seconds: float, should_stop: Callable[[], bool]) -> None:
        """max_seconds: limit of this process's time, with the start of Python, without other contenders' rounds."""
        self.failed: str | None = None
        self.seconds_left = max_seconds
        self.seconds: list[float] = []
        self.tokens: list[int] = []
        self._too_long, self._should_stop = f"{TOO_LONG} {max_seconds:g} s", should_stop
        self._messages = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (closed by `end`)
        self._child = Child(
            python_command("tformer.bench.worker"),
            messages=self._messages,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._process = self._child.process

    def ask(self, **request: Any) -> dict[str, Any]:
        """The answer to one request. Raises Interrupted."""
        self._raise_if_stopped()
        assert self._process.stdin is not None
        began = time.monotonic()
        self._process.send_signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):  # it has ended: `_read_answer` finds out why
            self._process.stdin.write(json.dumps({**request, "max_seconds": self.seconds_left}) + "\n")
            self._process.stdin.flush()
        answer = self._read_answer(deadline=began + self.seconds_left)
        self.seconds_left -= time.monotonic() - began
        self.failed = answer.get("failed")
        if self.failed is None:
            self._process.send_signal(signal.SIGSTOP)
        else:
            self.end()
        return answer

    def run_round(self) -> None:
        """One more round of a contender; the child measures its time."""
        answer = self.ask(question="round")
        if self.failed is None:
            self.seconds.append(answer["seconds"])
            self.tokens.append(answer["tokens"])

    def finish(self) -> RacedRow:
        """The contender's row, with the peak memory since the process began, which then exits."""
        answer = {"failed": self.failed} if self.failed is not None else self.ask(question="peak")
        if self.failed is not None:
            return answer
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.send_signal(signal.SIGCONT)
        with contextlib.suppress(subprocess.TimeoutExpired):  # it ends helpers and deletes temporary files
            self._process.wait(EXIT_SECONDS)
        self.end()
        return {**summarize(self.seconds), "tokens": round(statistics.mean(self.tokens)), "memory": answer}

    def end(self) -> None:
        """Kill the process, whatever it is doing; may be called again."""
        self._child.end()
        for pipe in (self._process.stdin, self._process.stdout, self._messages):
            if pipe is not None:
                with contextlib.suppress(OSError):  # the process did not read its last request
                    pipe.close()

    def _read_answer(self, *, deadline: float) -> dict[str, Any]:
        out = self._process.stdout
        assert out is not None
        while True:
            has_ended = self._child.poll() is not None
            if select.select([out], [], [], 0 if has_ended else POLL_SECONDS)[0]:
                line = out.readline()
                if line:
                    return dict(json.loads(line))
                self._process.wait()
                has_ended = True
            if has_ended:
                return {"failed": self._why_ended()}
            self._raise_if_stopped()
            if time.monotonic() >= deadline:
                return {"failed": self._too_long}

    def _raise_if_stopped(self) -> None:
        if self._should_stop():
            raise Interrupted("interrupted: nothing was written", signal_number=signal.SIGINT)

    def _why_ended(self) -> str:
        """Why the process ended without an answer."""
        code = self._process.returncode
        if code == -signal.SIGKILL:
            return f"{OUT_OF_MEMORY}: the system ended the process"
        if code == -signal.SIGALRM:
            return self._too_long
        return f"the process ended with {code}: {self._child.last_error() or 'no message'}"


def run_isolated(
    measurement: str, arguments: Mapping[str, Any], *, max_seconds: float, should_stop: Callable[[], bool]
) -> dict[str, Any]:
    """Result of one measurement in a new process, or {"failed": reason}. Raises Interrupted."""
    process = MeasuringProcess(max_seconds=max_seconds, should_stop=should_stop)
    try:
        return process.ask(measurement=measurement, arguments=dict(arguments))
    finally:
        process.end()


def race(
    measurement: str,
    contenders: Sequence[Mapping[str, Any]],
    *,
    repeats: int,
    max_seconds: float,
    should_stop: Callable[[], bool],
) -> list[RacedRow]:
    """A row for each contender, in order. Raises Interrupted.

    Every contender runs in its process; all are prepared and warmed up, then their rounds alternate (A B A B), so
    that another program or a hot processor slows all of them equally. A contender that ran out of memory while others
    held some is measured again, alone: its row has {"alone": True}.

    Args:
        contenders: the arguments of `measurement` for each.
        repeats: minimum number of rounds of each; quick rounds go on until each contender has run for `ENOUGH_SECONDS`.
        max_seconds: of each process; a contender that exceeds it fails. One round is always timed.
    """
    limits: dict[str, Any] = {"max_seconds": max_seconds, "should_stop": should_stop}
    rows, crowded = _take_turns(measurement, contenders, repeats=repeats, limits=limits)
    for index in crowded:
        [again], _ = _take_turns(measurement, [contenders[index]], repeats=repeats, limits=limits)
        rows[index] = again if "failed" in again else {**again, "alone": True}
    return rows


def _take_turns(
    measurement: str, contenders: Sequence[Mapping[str, Any]], *, repeats: int, limits: dict[str, Any]
) -> tuple[list[RacedRow], list[int]]:
    """A row for each contender, and the indices of contenders that ran out of memory beside others."""
    running: list[MeasuringProcess] = []
    crowded: list[int] = []

    def able() -> list[MeasuringProcess]:
        return [process for process in running if process.failed is None]

    def note_crowding(process: MeasuringProcess) -> None:
        if process.failed is not None and process.failed.startswith(OUT_OF_MEMORY) and able():
            crowded.append(running.index(process))

    try:
        for arguments in contenders:
            running.append(MeasuringProcess(**limits))
            running[-1].ask(measurement=measurement, arguments=dict(arguments))
            note_crowding(running[-1])
        began = time.monotonic()
        while able() and not _is_enough(able(), repeats):
            for process in able():
                process.run_round()
                note_crowding(process)
            if time.monotonic() - began >= SHARE_FOR_ROUNDS * limits["max_seconds"]:
                break
        rows = []
        for process in running:
            was_able = process.failed is None
            rows.append(process.finish())
            if was_able:
                note_crowding(process)
    finally:
        for process in running:
            process.end()
    return rows, crowded


def _is_enough(able: Sequence[MeasuringProcess], repeats: int) -> bool:
    """Whether the rounds so far are enough, or one contender has no time for another as long as its longest."""
    turns = len(able[0].seconds)
    if turns == 0:
        return False
    long_enough = turns >= repeats and min(sum(process.seconds) for process in able) >= ENOUGH_SECONDS
    has_time = all(process.seconds_left > max(process.seconds) for process in able)
    return long_enough or turns >= max(repeats, MOST_REPEATS) or not has_time


def summarize(seconds: Sequence[float]) -> dict[str, float | int]:
    """Median, minimum and number of durations, and their spread: quartile distance as a share of the median."""
    median = statistics.median(seconds)
    lower, _, upper = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else [median] * 3
    spread = (upper - lower) / median if median else 0.0
    return {"seconds": median, "minimum": min(seconds), "spread": spread, "repeats": len(seconds)}
