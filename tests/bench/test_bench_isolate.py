"""One process per measurement: what comes back, and what becomes of a process that does not."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tformer.bench import isolate
from tformer.bench.isolate import run_isolated
from tformer.bench.one import why


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`child(script)`: what runs instead of Python; it notes its process id."""

    def become(script: str) -> Path:
        noted, program = tmp_path / "pid", tmp_path / "program"
        program.write_text(f"#!/bin/sh\necho $$ > {noted}\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setattr(isolate.sys, "executable", str(program))
        return noted

    return become


def run(max_seconds: float = 30, *, should_stop: Any = lambda: False) -> dict[str, Any] | None:
    return run_isolated("attention", {"kind": "full"}, max_seconds=max_seconds, should_stop=should_stop)


def is_running(noted: Path) -> bool:
    try:
        os.kill(int(noted.read_text()), 0)
    except ProcessLookupError:
        return False
    return True


def test_the_last_line_is_the_answer(child: Any) -> None:
    child("cat > /dev/null; echo noise; echo '{\"median\": 1.5}'")
    assert run() == {"median": 1.5}


def test_a_process_over_the_limit_is_ended(child: Any) -> None:
    noted = child("exec sleep 60")
    began = time.monotonic()
    assert run(max_seconds=0.5) == {"failed": "over 0.5 s"}
    assert time.monotonic() - began < 30 and not is_running(noted)


def test_a_stop_ends_the_process_and_gives_nothing(child: Any) -> None:
    noted = child("exec sleep 60")
    assert run(should_stop=noted.exists) is None
    assert not is_running(noted)


@pytest.mark.parametrize(
    ("script", "told"),
    [
        (f"kill -{signal.SIGKILL.value} $$", "out of memory: the system ended the process"),
        (f"kill -{signal.SIGALRM.value} $$", "over 30 s"),
        ("cat > /dev/null; echo first >&2; echo last >&2; exit 3", "the process ended with 3: last"),
        ("cat > /dev/null", "the process ended with 0: it said nothing"),
    ],
)
def test_an_end_without_an_answer_is_told(child: Any, script: str, told: str) -> None:
    child(script)
    assert run() == {"failed": told}


def test_failures_inside_are_told_in_one_line() -> None:
    assert why(MemoryError()) == "out of memory"
    assert why(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 8 bytes")) == "out of memory"
    assert why(ValueError("window: 100 is odd\nand more")) == "window: 100 is odd"
    assert why(RuntimeError("broken")) == "RuntimeError: broken"


def test_what_is_refused_comes_back_from_a_real_process() -> None:
    found = run_isolated("nothing", {}, max_seconds=100, should_stop=lambda: False)
    assert found == {"failed": "KeyError: 'nothing'"}
