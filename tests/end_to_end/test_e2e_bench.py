"""`tformer bench attention` as a user runs it: real processes, and an interrupt in the middle of one."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

Start = Callable[..., "subprocess.Popen[str]"]


def children(process: int) -> list[int]:
    listing = Path(f"/proc/{process}/task/{process}/children")
    return [int(word) for word in listing.read_text().split()]


def test_a_short_bench(cli_process: Start, tmp_path: Path) -> None:
    command = ("bench", "attention", "--kinds", "dense-masked", "--lengths", "32,64", "--heads", 2, "--head-dim", 8,
               "--repeats", 1, "--max-seconds", 600, "--device", "cpu", "--out", "report", "--json")  # fmt: skip
    out, err = cli_process(*command, cwd=tmp_path).communicate(timeout=1800)
    found = json.loads(out)
    assert [(cell["kind"], cell["length"], cell["failed"]) for cell in found["cells"]] == [
        ("full", 32, None), ("dense-masked", 32, None), ("full", 64, None), ("dense-masked", 64, None),
    ]  # fmt: skip
    assert all(cell["median"] > 0 for cell in found["cells"])
    assert "4 of 4  dense-masked at 64" in err
    assert (tmp_path / "report" / "table.md").is_file()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for the process in /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_the_measuring_process_and_writes_nothing(
    cli_process: Start, tmp_path: Path, number: signal.Signals
) -> None:
    command = ("bench", "attention", "--kinds", "full", "--lengths", 65536, "--device", "cpu", "--out", "report")
    process = cli_process(*command, cwd=tmp_path)
    deadline = time.monotonic() + 600
    while not (found := children(process.pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 128 + number and out == "" and "interrupted" in err
    assert found and not any(Path(f"/proc/{child}").exists() for child in found)
    assert not (tmp_path / "report").exists()
