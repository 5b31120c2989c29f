"""`python -m tformer.bench.worker`: the measuring process. Reads JSON requests from stdin, writes JSON answers."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tformer.bench.processes import OUT_OF_MEMORY
from tformer.errors import TformerError

Answer = dict[str, Any]


def _attention(**arguments: Any) -> Answer:
    from tformer.bench.machine import peak_of_process
    from tformer.bench.workloads.attention import measure_attention

    found = measure_attention(**arguments)
    return {**found, "peak_rss_bytes": peak_of_process()}


def _attention_ceilings(**arguments: Any) -> Answer:
    from tformer.bench.attention import ceilings

    return ceilings(**arguments)


def _bounds(**arguments: Any) -> Answer:
    from tformer.bench.speed import bounds

    return bounds(**arguments)


def _contender(**arguments: Any) -> Callable[[str], Answer]:
    from tformer.bench.speed import contend

    return contend(**arguments)


MEASUREMENTS: dict[str, Callable[..., Answer]] = {
    "attention": _attention,
    "attention_ceilings": _attention_ceilings,
    "bounds": _bounds,
}
"""Each loads what it needs and no more: that would count as its memory."""

CONVERSATIONS: dict[str, Callable[..., Callable[[str], Answer]]] = {"contender": _contender}
"""What each returns answers questions."""

OWN_LIMIT = 10
"""Seconds beyond the parent's limit after which a process whose parent is gone ends itself."""


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it
    with contextlib.suppress(OSError):  # Linux only
        Path("/proc/self/oom_score_adj").write_text("1000")
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer

    def say(answer: Answer) -> None:
        signal.alarm(0)  # now, for from the answer on the process may stand still for longer than its limit
        out.write(json.dumps(answer) + "\n")
        out.flush()

    try:
        request = _next_request()
        measurement, arguments = request["measurement"], request["arguments"]
        if measurement not in CONVERSATIONS:
            say(MEASUREMENTS[measurement](**arguments))
            return
        answer = CONVERSATIONS[measurement](**arguments)
        say({})
        while request := _next_request():
            say(answer(request["question"]))
    except Exception as error:
        say({"failed": why(error)})


def _next_request() -> dict[str, Any]:
    """Empty at the end of stdin. The clock runs from when a request is there until it is answered."""
    line = sys.stdin.readline()
    request: dict[str, Any] = json.loads(line) if line else {}
    if request:
        signal.alarm(math.ceil(request["max_seconds"]) + OWN_LIMIT)
    return request


def why(error: Exception) -> str:
    """One line on what went wrong."""
    if isinstance(error, TformerError):
        return error.message
    text = str(error).splitlines()[0] if str(error) else ""
    allocation = "can't allocate memory" in str(error)
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or allocation:
        return OUT_OF_MEMORY
    return text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"


if __name__ == "__main__":
    main()
