"""Ctrl-C for a command that works in a process of its own."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path


def interrupt_with_its_child(process: subprocess.Popen[str]) -> None:
    """Once `process` has a child, interrupt it: both end, with the code for that and nothing on stdout."""
    listing = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while process.poll() is None and not (found := [int(word) for word in listing.read_text().split()]):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 130 and out == "" and "interrupted" in err
    assert found and not any(Path(f"/proc/{child}").exists() for child in found)
