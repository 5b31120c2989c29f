"""One measurement in one process: nothing that an earlier one left behind, memory least of all, can disturb it.

The parent sends a JSON document to `python -m tformer.bench.one` and reads one back. A child that takes too long is
ended; one that outlives its parent ends itself. Where memory runs out, it is the child that the system should choose.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import IO, Any

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
    """`python -m tformer.bench.one` with pipes for what goes in and comes out; talk: where its stderr goes."""
    return subprocess.Popen(
        [sys.executable, "-m", "tformer.bench.one"],
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
