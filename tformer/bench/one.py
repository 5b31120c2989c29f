"""`python -m tformer.bench.one`: the process of one measurement. A JSON document comes in on stdin, one goes out.

Reads {"measurement", "max_seconds", "arguments"}; writes what the measurement returns, or {"failed": why}.
"""

from __future__ import annotations

import contextlib
import json
import math
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tformer.bench.attention_cell import measure_attention
from tformer.bench.isolate import OUT_OF_MEMORY

MEASUREMENTS: dict[str, Callable[..., dict[str, Any]]] = {"attention": measure_attention}

OWN_LIMIT = 10
"""Seconds beyond the parent's limit after which a process whose parent is gone ends itself."""


def main() -> None:
    request = json.load(sys.stdin)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it
    signal.alarm(math.ceil(request["max_seconds"]) + OWN_LIMIT)
    with contextlib.suppress(OSError):  # Linux only
        Path("/proc/self/oom_score_adj").write_text("1000")
    try:
        result = MEASUREMENTS[request["measurement"]](**request["arguments"])
    except Exception as error:
        result = {"failed": why(error)}
    sys.stdout.write(json.dumps(result) + "\n")


def why(error: Exception) -> str:
    """One line on what went wrong."""
    text = str(error).splitlines()[0] if str(error) else ""
    allocation = "can't allocate memory" in str(error)
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or allocation:
        return OUT_OF_MEMORY
    return text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"


if __name__ == "__main__":
    main()
