"""`python -m tformer.bench.worker`: the measuring process. It reads JSON requests from stdin and writes JSON answers.

`processes` describes the requests.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tformer.bench.processes import OUT_OF_MEMORY
from tformer.support.errors import TformerError

if TYPE_CHECKING:
    from tformer.bench.workloads import Contender

OWN_LIMIT = 10
"""Seconds beyond the parent's limit after which a process without a parent ends itself."""


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it
    with contextlib.suppress(OSError):  # Linux only
        Path("/proc/self/oom_score_adj").write_text("1000")
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries must not mix with the answers

    def write(answer: dict[str, Any]) -> None:
        signal.alarm(0)  # the parent may suspend this process for longer than its limit
        out.write(json.dumps(answer) + "\n")
        out.flush()

    try:
        request = _next_request()
        found = named(request["measurement"])(**request["arguments"])
        if isinstance(found, dict):
            write(found)
        else:
            _serve(found, write)
    except Exception as error:
        write({"failed": reason_of(error)})


def named(measurement: str) -> Any:
    """The function `module:name`. Only its module is imported, for the memory of others would be measured too."""
    module, _, name = measurement.partition(":")
    return getattr(import_module(module), name)


def _serve(contender: Contender, write: Callable[[dict[str, Any]], None]) -> None:
    """Prepare the contender and answer questions until stdin ends."""
    contender.prepare()
    gc.collect()
    contender.warm_up()
    write({})
    while request := _next_request():
        if request["question"] == "round":
            start = time.perf_counter()
            tokens = contender.run()
            write({"seconds": time.perf_counter() - start, "tokens": tokens})
        else:
            write(contender.peak_memory())


def _next_request() -> dict[str, Any]:
    """The next request; empty at the end of stdin. An alarm ends the process if it takes too long to answer."""
    line = sys.stdin.readline()
    request: dict[str, Any] = json.loads(line) if line else {}
    if request:
        signal.alarm(math.ceil(request["max_seconds"]) + OWN_LIMIT)
    return request


def reason_of(error: Exception) -> str:
    """The reason of a failure in one line."""
    if isinstance(error, TformerError):
        return error.message
    text = str(error).splitlines()[0] if str(error) else ""
    allocation = "can't allocate memory" in str(error)
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or allocation:
        return OUT_OF_MEMORY
    return text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"


if __name__ == "__main__":
    main()
