"""One `tformer train` in a process of its own, watched through the log that it writes: what it said, and when.

The run goes to a temporary folder that is removed, and so does the cache, so that no seed profits from an earlier one.
The training never outlives its watcher's call.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tformer.bench.isolate import too_long
from tformer.checkpoint.logs import read_metrics

POLL_SECONDS = 0.02
"""How late a validation is seen at most."""

PEAK = re.compile(r"^VmHWM:\s+(\d+) kB$", re.MULTILINE)
METRICS = "metrics.jsonl"


@dataclass(frozen=True)
class Watched:
    """records: of the run's log, so far. seconds: from the start of the process to the validation that reached the
    target, or to its end. peak_bytes: of its resident set; None: nobody told. failed: why it is no result."""

    records: tuple[dict[str, Any], ...]
    seconds: float
    peak_bytes: int | None
    failed: str | None = None


def watch_training(
    words: Callable[[str], Sequence[str]],
    *,
    target: float | None,
    max_seconds: float,
    should_stop: Callable[[], bool],
) -> Watched | None:
    """Train until a validation loss of `target` or less, or to the end; None when stopped.

    words: the command line for a run directory.
    """
    with tempfile.TemporaryDirectory(prefix="tformer-quality-") as folder, tempfile.TemporaryFile() as talk:
        run = Path(folder) / "run"
        began = time.monotonic()
        child = subprocess.Popen(
            [sys.executable, "-m", "tformer", *words(str(run))],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=talk,
            env={**os.environ, "TFORMER_CACHE": str(Path(folder) / "cache")},
            process_group=0,  # Ctrl-C reaches the parent alone, which ends the child
        )
        try:
            return _watch(child, run / METRICS, began, target, max_seconds, should_stop, lambda: _last_words(talk))
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def _watch(
    child: subprocess.Popen[bytes],
    log: Path,
    began: float,
    target: float | None,
    max_seconds: float,
    should_stop: Callable[[], bool],
    last_words: Callable[[], str],
) -> Watched | None:
    records: tuple[dict[str, Any], ...] = ()
    size, peak = -1, None
    while True:
        ended = child.poll() is not None
        seconds = time.monotonic() - began
        peak = _peak_of(child.pid) or peak
        written = log.stat().st_size if log.is_file() else 0
        if written != size:
            size, records = written, tuple(read_metrics(log))
            if target is not None and _reached(records, target):
                return Watched(records, seconds, peak)
        if ended:
            failed = None if child.returncode == 0 else f"training ended with {child.returncode}: {last_words()}"
            return Watched(records, seconds, peak, failed)
        if should_stop():
            return None
        if seconds >= max_seconds:
            return Watched(records, seconds, peak, too_long(max_seconds))
        time.sleep(POLL_SECONDS)


def _reached(records: Sequence[dict[str, Any]], target: float) -> bool:
    losses = (record.get("loss") for record in records if record.get("split") == "valid")
    return any(loss is not None and loss <= target for loss in losses)


def _peak_of(pid: int) -> int | None:
    """Bytes of a living process's largest resident set; None where the system does not tell."""
    with suppress(OSError):
        found = PEAK.search(Path(f"/proc/{pid}/status").read_text())
        return int(found[1]) * 1024 if found else None
    return None


def _last_words(talk: Any) -> str:
    """What it complained of: its line that begins with `error:`, or the last."""
    talk.seek(0)
    told = talk.read().decode("utf-8", "replace").strip().splitlines() or ["it said nothing"]
    return next((line for line in told if line.startswith("error: ")), told[-1]).removeprefix("error: ")
