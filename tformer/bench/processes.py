"""Measuring processes, seen from the parent: one measurement in one process, or contenders whose rounds alternate.

The parent writes JSON requests to `python -m tformer.bench.worker`, one a line, and reads one JSON answer to each. A
process that exceeds its time limit is killed; a process whose parent is gone ends itself; where memory runs out, the
kernel kills the measuring process first.
"""

from __future__ import annotations

import contextlib
import json
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import mean
from typing import IO, Any, Protocol


class Contender(Protocol):
    """What its process asks of it.

    Attributes:
        name: `tformer`, or the library's.
        precision: of its products: fp32, bf16, int8, ...
    """

    name: str
    precision: str

    def prepare(self) -> None:
        """Build the model and whatever is made once. Not timed. Raises ValueError for what it cannot do."""

    def run(self) -> int:
        """One timed round, finished when it returns (a GPU has been waited for): the number of tokens done."""


ENOUGH_SECONDS = 0.5
"""Quick work is repeated for at least so long, whatever the number of repeats asked for."""

MOST_REPEATS = 1000


@dataclass(frozen=True)
class Timing:
    """Seconds of one repetition.

    Attributes:
        median, minimum: over all repetitions.
        spread: difference of the upper and the lower quartile, as a share of the median.
        repeats: how many there were.
    """

    median: float
    minimum: float
    spread: float
    repeats: int


def measure(
    work: Callable[[], object],
    *,
    repeats: int,
    most_seconds: float,
    warm_ups: int = 1,
    synchronise: Callable[[], object] = lambda: None,
) -> Timing:
    """Time `work`, at least `repeats` times and for `ENOUGH_SECONDS`.

    Args:
        most_seconds: after so long, warm-up included, no further repetition begins; one is always timed.
        warm_ups: repetitions beforehand, which are not counted.
        synchronise: waits until a device has finished what it was given.
    """
    began = time.perf_counter()
    for _ in range(warm_ups):
        work()
    synchronise()
    times: list[float] = []
    first = time.perf_counter()
    while True:
        start = time.perf_counter()
        work()
        synchronise()
        now = time.perf_counter()
        times.append(now - start)
        done = len(times) >= repeats and now - first >= ENOUGH_SECONDS
        if done or len(times) >= max(repeats, MOST_REPEATS) or now - began >= most_seconds:
            return summarise(times)


def summarise(times: list[float]) -> Timing:
    """Median, minimum and spread of at least one duration."""
    median = statistics.median(times)
    lower, _, upper = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3
    return Timing(median, min(times), (upper - lower) / median if median else 0.0, len(times))


POLL_SECONDS = 0.05
OUT_OF_MEMORY, TOO_LONG = "out of memory", "over"
"""How the words begin for what had too little room or time."""


def run_isolated(
    measurement: str, arguments: Mapping[str, Any], *, max_seconds: float, should_stop: Callable[[], bool]
) -> dict[str, Any] | None:
    """What `one.MEASUREMENTS[measurement](**arguments)` returns in a new process; None when stopped.

    What cannot be measured is `{"failed": why}`: out of memory, over the time limit, refused, crashed.
    """
    document = json.dumps({"measurement": measurement, "max_seconds": max_seconds, "arguments": dict(arguments)})
    child = start_process(subprocess.PIPE)
    answer: list[tuple[str, str]] = []
    reader = threading.Thread(target=lambda: answer.append(child.communicate(document)), daemon=True)
    deadline = time.monotonic() + max_seconds
    try:
        reader.start()
        while reader.is_alive():
            if should_stop():
                return None
            if time.monotonic() >= deadline:
                return {"failed": too_long(max_seconds)}
            reader.join(POLL_SECONDS)
    finally:
        if child.poll() is None:
            child.kill()
        reader.join()
        child.wait()
    out, talk = answer[0]
    return _read(child.returncode, out, talk, max_seconds)


def start_process(talk: int | IO[str]) -> subprocess.Popen[str]:
    """`python -m tformer.bench.worker` with pipes for what goes in and comes out; talk: where its stderr goes."""
    return subprocess.Popen(
        [sys.executable, "-m", "tformer.bench.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=talk,
        text=True,
        process_group=0,  # Ctrl-C reaches the parent alone, which ends the child
    )


def _read(code: int, out: str, talk: str, max_seconds: float) -> dict[str, Any]:
    if code == 0 and out.strip():
        return dict(json.loads(out.splitlines()[-1]))
    return {"failed": why_ended(code, talk, max_seconds)}


def why_ended(code: int, talk: str, max_seconds: float) -> str:
    """The words for a process that ended without its answer; talk: what it said on stderr."""
    if code == -signal.SIGKILL:
        return f"{OUT_OF_MEMORY}: the system ended the process"
    if code == -signal.SIGALRM:
        return too_long(max_seconds)
    last = talk.strip().splitlines()[-1] if talk.strip() else "it said nothing"
    return f"the process ended with {code}: {last}"


def too_long(max_seconds: float) -> str:
    """The words for a measurement that was ended by the time limit."""
    return f"{TOO_LONG} {max_seconds:g} s"


PARTING_SECONDS = 10
"""How long a process that was told to end may take for it."""


class Stopped(Exception):
    """`should_stop` said so."""


class Runner:
    """One process, from its start to its end.

    Attributes:
        failed: why it has no result; its process has ended by then.
        seconds, tokens: of every timed round; memory: what it said of its peak.
    """

    def __init__(self, arguments: Mapping[str, Any], *, max_seconds: float, should_stop: Callable[[], bool]) -> None:
        """arguments: of `contend.contend`; max_seconds: of its own, starting Python included, others' turns not."""
        self.failed: str | None = None
        self.seconds: list[float] = []
        self.tokens: list[int] = []
        self.memory: dict[str, int] = {}
        self._arguments, self._should_stop = arguments, should_stop
        self._max_seconds = self._left = max_seconds
        self._talk = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (closed by `end`)
        self._process = start_process(self._talk)

    def prepare(self) -> None:
        """Everything up to the first timed round. Like all that asks, it raises Stopped."""
        self._ask({"measurement": "contender", "arguments": dict(self._arguments)})

    def round(self) -> None:
        """One more, timed inside."""
        answer = self._ask({"question": "round"})
        if self.failed is None:
            self.seconds.append(answer["seconds"])
            self.tokens.append(answer["tokens"])

    def tell_peak(self) -> None:
        """Of the whole life of the process, which is then let go."""
        answer = self._ask({"question": "peak"})
        if self.failed is None:
            self.memory = answer
            self._let_go()

    @property
    def has_time(self) -> bool:
        """For another round that takes as long as the longest."""
        return self._left > max(self.seconds, default=0.0)

    def end(self) -> None:
        """At once, whatever it is doing; may be called again."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._talk):
            if pipe is not None:
                with contextlib.suppress(OSError):  # what was never written cannot be any more
                    pipe.close()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._should_stop():
            raise Stopped
        assert self._process.stdin is not None
        began = time.monotonic()
        self._process.send_signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):  # it has ended: `_answer` tells why
            self._process.stdin.write(json.dumps({**request, "max_seconds": self._left}) + "\n")
            self._process.stdin.flush()
        answer = self._answer(deadline=began + self._left)
        self._left -= time.monotonic() - began
        self.failed = answer.get("failed")
        if self.failed is None:
            self._process.send_signal(signal.SIGSTOP)
        else:
            self.end()
        return answer

    def _answer(self, *, deadline: float) -> dict[str, Any]:
        out = self._process.stdout
        assert out is not None
        while True:
            gone = self._process.poll() is not None
            if select.select([out], [], [], 0 if gone else POLL_SECONDS)[0]:
                line = out.readline()
                if line:
                    return dict(json.loads(line))
                self._process.wait()
                gone = True
            if gone:
                self._talk.seek(0)
                return {"failed": why_ended(self._process.returncode, self._talk.read(), self._max_seconds)}
            if self._should_stop():
                raise Stopped
            if time.monotonic() >= deadline:
                return {"failed": too_long(self._max_seconds)}

    def _let_go(self) -> None:
        """It ends in its own way, helpers and temporary files first."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.send_signal(signal.SIGCONT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(PARTING_SECONDS)
        self.end()


SHARE_FOR_ROUNDS = 0.6
"""Of the time limit, for the turns of all: no further one begins after it."""

Row = dict[str, Any]


def race(
    contenders: Sequence[Mapping[str, Any]], *, repeats: int, max_seconds: float, should_stop: Callable[[], bool]
) -> list[Row] | None:
    """A row for each contender, in order; None when stopped.

    A row is a timing, the tokens of a round and the peak `memory` of the process, or {"failed": why}. A contender for
    whom memory was too small beside the others is measured again, alone: its row has {"alone": True}.

    Args:
        contenders: the arguments of `contend.contend` for each.
        repeats: rounds of each at least; quick ones go on until each has had `ENOUGH_SECONDS`.
        max_seconds: of each process; one that takes longer fails. One turn is always timed.
    """

    def take(some: Sequence[Mapping[str, Any]]) -> tuple[list[Row], list[int]]:
        return _together(some, repeats=repeats, max_seconds=max_seconds, should_stop=should_stop)

    try:
        rows, crowded = take(contenders)
        for index in crowded:
            [again], _ = take([contenders[index]])
            rows[index] = again if "failed" in again else {**again, "alone": True}
    except Stopped:
        return None
    return rows


def _together(
    contenders: Sequence[Mapping[str, Any]], *, repeats: int, max_seconds: float, should_stop: Callable[[], bool]
) -> tuple[list[Row], list[int]]:
    """A row for each, and the places of those for whom memory was too small while others held some."""
    runners: list[Runner] = []
    crowded: list[int] = []

    def do(runner: Runner, part: Callable[[Runner], None]) -> None:
        part(runner)
        if runner.failed is not None and runner.failed.startswith(OUT_OF_MEMORY) and _able(runners):
            crowded.append(runners.index(runner))

    try:
        for arguments in contenders:
            runners.append(Runner(arguments, max_seconds=max_seconds, should_stop=should_stop))
            do(runners[-1], Runner.prepare)
        began = time.monotonic()
        while (able := _able(runners)) and not _enough(able, repeats):
            for runner in able:
                do(runner, Runner.round)
            if time.monotonic() - began >= SHARE_FOR_ROUNDS * max_seconds:
                break
        for runner in _able(runners):
            do(runner, Runner.tell_peak)
    finally:
        for runner in runners:
            runner.end()
    return [_row(runner) for runner in runners], crowded


def _able(runners: Sequence[Runner]) -> list[Runner]:
    return [runner for runner in runners if runner.failed is None]


def _enough(able: Sequence[Runner], repeats: int) -> bool:
    """Whether the turns that were taken will do, or somebody has no time for another."""
    turns = len(able[0].seconds)
    if turns == 0:
        return False
    long_enough = turns >= repeats and min(sum(runner.seconds) for runner in able) >= ENOUGH_SECONDS
    return long_enough or turns >= max(repeats, MOST_REPEATS) or not all(runner.has_time for runner in able)


def _row(runner: Runner) -> Row:
    if runner.failed is not None:
        return {"failed": runner.failed}
    return {**asdict(summarise(runner.seconds)), "tokens": round(mean(runner.tokens)), "memory": runner.memory}
