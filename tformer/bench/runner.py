"""A contender's process as its parent sees it: it prepares once, and then does a round whenever it is asked.

Between its turns it is stopped (SIGSTOP), for threads that go on spinning after a round would take time from the next
contender's. It never outlives its parent: its stdin ends, or, while it is stopped, the system wakes it with a SIGHUP,
since its process group has nobody left who could (setpgid(2)).
"""

from __future__ import annotations

import contextlib
import json
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

from tformer.bench.isolate import POLL_SECONDS, start_process, too_long, why_ended

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
