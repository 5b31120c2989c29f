"""One child process: its output, its exit code, its own memory, and its end when it is asked to stop."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from tformer.workflows.sweep import process
from tformer.workflows.sweep.process import run_child


def plays(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Children run this Python instead of tformer."""

    class Popen(process.subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, command: list[str], **options: object) -> None:
            super().__init__([sys.executable, "-c", code, *command[3:]], **options)  # type: ignore[call-overload]

    monkeypatch.setattr(process.subprocess, "Popen", Popen)


def test_output_and_talk_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plays(monkeypatch, "import sys; print('data', sys.argv[1:]); print('talk', file=sys.stderr); sys.exit(5)")
    log = tmp_path / "log"
    ended = run_child(["train", "--lr", "1 2"], log=log, should_stop=lambda: False)
    assert (ended.code, ended.out, ended.stopped) == (5, "data ['train', '--lr', '1 2']\n", False)
    assert log.read_text() == '$ tformer train --lr "1 2"\ntalk\n'


def test_the_peak_is_the_childs_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not this process's, which is larger than the small child and smaller than the big one."""
    ballast = bytearray(os.urandom(1 << 20)) * 100
    plays(monkeypatch, "import sys, time; x = bytearray(int(sys.argv[1]) << 20); time.sleep(0.5)")
    peaks = [run_child([size], log=tmp_path / "log", should_stop=lambda: False).peak_bytes for size in ("1", "700")]
    assert 2**20 < peaks[0] < 90 * 2**20 and 700 * 2**20 < peaks[1] < 800 * 2**20
    assert len(ballast) > peaks[0]


def test_a_child_is_asked_once_to_stop_and_given_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plays(
        monkeypatch,
        "import signal, sys, time\n"
        "def heard(*_):\n    signal.signal(signal.SIGINT, lambda *_: sys.exit(9)); time.sleep(0.5); sys.exit(130)\n"
        "signal.signal(signal.SIGINT, heard)\nprint('ready', file=sys.stderr, flush=True)\ntime.sleep(60)",
    )
    log = tmp_path / "log"
    ended = run_child([], log=log, should_stop=lambda: "ready" in log.read_text())
    assert (ended.code, ended.stopped) == (130, True)


def test_a_killed_child_has_the_signals_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plays(monkeypatch, f"import os; os.kill(os.getpid(), {int(signal.SIGKILL)})")
    assert run_child([], log=tmp_path / "log", should_stop=lambda: False).code == -signal.SIGKILL


def test_no_child_outlives_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plays(monkeypatch, "import os, sys, time; print(os.getpid(), file=sys.stderr, flush=True); time.sleep(60)")
    log = tmp_path / "log"

    def breaks_down() -> bool:
        if log.read_text().count("\n") > 1:
            raise RuntimeError("at once")
        return False

    with pytest.raises(RuntimeError):
        run_child([], log=log, should_stop=breaks_down)
    with pytest.raises(ProcessLookupError):
        os.kill(int(log.read_text().splitlines()[1]), 0)
