"""One child process: what it printed, how it ended, and the most memory that it held."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

POLL_SECONDS = 0.1
MAXRSS_UNIT = 1 if sys.platform == "darwin" else 1024
"""Bytes in the kernel's unit of `ru_maxrss`."""

PEAK_LINE = re.compile(rb"^VmHWM:\s+(\d+) kB$", re.MULTILINE)


@dataclass(frozen=True)
class Ended:
    """How a child ended.

    code: its exit code; -N when signal N killed it. out: its standard output.
    peak_bytes: its largest resident set (a GPU's memory is not in it). stopped: it was asked to stop.
    """

    code: int
    out: str
    peak_bytes: int
    seconds: float
    stopped: bool


def run_child(words: Sequence[str], *, log: Path, should_stop: Callable[[], bool]) -> Ended:
    """Run `tformer WORDS` to its end; its talk is appended to `log`.

    The child has a process group of its own, so that Ctrl-C reaches it once: from here, when `should_stop` says so. It
    is then given all the time it needs to save. It never outlives this call.
    """
    command = [sys.executable, "-m", "tformer", *words]
    began, stopped, watched = time.monotonic(), False, 0
    with tempfile.TemporaryFile() as out, log.open("ab") as talk:
        talk.write(f"$ {subprocess.list2cmdline(['tformer', *words])}\n".encode())
        talk.flush()
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=talk, process_group=0)
        try:
            while True:
                pid, status, usage = os.wait4(child.pid, os.WNOHANG)
                if pid:
                    break
                watched = max(watched, _peak_so_far(child.pid))
                if should_stop() and not stopped:
                    stopped = True
                    os.kill(child.pid, signal.SIGINT)
                time.sleep(POLL_SECONDS)
            child.returncode = os.waitstatus_to_exitcode(status)  # so that Popen does not wait for it again
        finally:
            if child.returncode is None:
                child.kill()
                child.wait()
        out.seek(0)
        text = out.read().decode("utf-8", "replace")
    peak = _peak(usage.ru_maxrss * MAXRSS_UNIT, watched)
    return Ended(child.returncode, text, peak, time.monotonic() - began, stopped)


def _peak(reported: int, watched: int) -> int:
    """Linux counts the set that the parent had at a child's birth as the child's: up to that, what was seen counts."""
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * MAXRSS_UNIT
    return watched if watched and reported <= own else reported


def _peak_so_far(pid: int) -> int:
    """The largest resident set of a living process, in bytes; 0 where the system does not tell."""
    with suppress(OSError):
        match = PEAK_LINE.search(Path(f"/proc/{pid}/status").read_bytes())
        return int(match[1]) * 1024 if match else 0
    return 0
