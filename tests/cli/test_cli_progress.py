"""Progress on stderr: bars and a spinner on a terminal, sparse lines in a pipe, always with units."""

from __future__ import annotations

import ast
import io
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import tformer
from tformer.cli import report
from tformer.support.formatting import counted

SOURCE = Path(tformer.__file__).parent
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@pytest.fixture
def piped(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What a pipe gets, with intervals of a hundredth of a second."""
    stream = io.StringIO()
    monkeypatch.setattr(report, "console", report.Messages(file=stream, width=200))
    monkeypatch.setattr(report, "FIRST_LINE_SECONDS", 0.02)
    monkeypatch.setattr(report, "LINE_SECONDS", 0.04)
    return stream


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """What a terminal gets; the spinner appears after a hundredth of a second."""
    stream = io.StringIO()
    monkeypatch.setattr(report, "console", report.Messages(file=stream, width=200, force_terminal=True))
    monkeypatch.setattr(report, "SPINNER_SECONDS", 0.01)
    monkeypatch.setattr(report, "spinner", report.Spinner())
    yield stream
    report.spinner.end()


def wait_for(condition: Callable[[], object], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing was shown"
        time.sleep(0.005)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [({}, False), ({"TERM": "xterm", "MPLBACKEND": "agg"}, False), ({"JPY_PARENT_PID": "7"}, True),
     ({"COLAB_RELEASE_TAG": "x"}, True), ({"MPLBACKEND": "module://matplotlib_inline.backend_inline"}, True)],
)  # fmt: skip
def test_a_command_of_a_notebook_is_known_by_its_environment(environment: dict[str, str], expected: bool) -> None:
    assert report.in_notebook(environment) == expected


def test_a_notebook_gets_the_lines_of_a_pipe_and_no_spinner() -> None:
    """Its kernel forces colours, so that rich would take any output for a terminal."""
    code = "from tformer.cli.report import console; print(console.is_terminal)"
    found = [
        subprocess.run([sys.executable, "-c", code], env=os.environ | added, capture_output=True, text=True, check=True)
        for added in ({"FORCE_COLOR": "1"}, {"FORCE_COLOR": "1", "JPY_PARENT_PID": "7"})
    ]
    assert [each.stdout.strip() for each in found] == ["True", "False"]


@pytest.mark.parametrize(
    ("done", "total", "unit", "shown"),
    [
        (524_000, 1_049_169, "B", "524.0 kB of 1.0 MB"),
        (3_100_000, None, "B", "3.1 MB"),
        (12, 40, "steps", "12 of 40 steps"),
        (1234, None, "pairs", "1,234 pairs"),
    ],
)
def test_counts_have_units(done: int, total: int | None, unit: str, shown: str) -> None:
    assert counted(done, total, unit) == shown


def test_every_count_in_the_code_names_its_unit() -> None:
    missing = []
    for path in [*SOURCE.glob("tasks/*.py"), *SOURCE.glob("cli/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.With) and isinstance(node.items[0].context_expr, ast.Call)):
                continue
            call = node.items[0].context_expr
            name = getattr(call.func, "attr", getattr(call.func, "id", ""))
            counts = node.items[0].optional_vars is not None
            if name in ("progress", "progress_reporter") and counts and "unit" not in [k.arg for k in call.keywords]:
                missing.append(f"{path.name}:{node.lineno}")
    assert missing == []


def test_a_pipe_gets_a_line_with_units_although_nothing_is_reported_meanwhile(piped: io.StringIO) -> None:
    with report.progress_reporter("tokenizing a.txt", total=1_049_169, unit="B") as progress:
        progress(524_000)
        wait_for(lambda: piped.getvalue().count("\n") >= 2)
    for line in piped.getvalue().splitlines():
        assert re.fullmatch(r"tokenizing a.txt: 524.0 kB of 1.0 MB, 50 %: \d+\.\ds", line)


def test_a_pipe_gets_no_line_about_short_work_or_while_other_lines_come(
    piped: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "FIRST_LINE_SECONDS", 30.0)
    with report.progress_reporter("short", unit="steps") as progress:
        progress(1)
    assert piped.getvalue() == ""
    monkeypatch.setattr(report, "FIRST_LINE_SECONDS", 5.0)
    with report.progress_reporter("training", unit="steps") as progress:
        for step in range(10):
            report.console.print(f"step {step}")
            progress(step)
            time.sleep(0.01)
    assert "training" not in piped.getvalue()


def test_only_the_innermost_work_writes_lines(piped: io.StringIO) -> None:
    with report.progress_reporter("training", total=10, unit="steps") as outer:
        outer(3)
        with report.progress_reporter("validating", total=40, unit="pairs") as inner:
            inner(10)
            wait_for(lambda: "validating" in piped.getvalue())
            before = len(piped.getvalue())
            wait_for(lambda: piped.getvalue().count("validating") >= 3)
            assert "training" not in piped.getvalue()[before:]
        wait_for(lambda: "training: 3 of 10 steps, 30 %" in piped.getvalue())
    assert "validating: 10 of 40 pairs, 25 %" in piped.getvalue()
    assert not [thread for thread in threading.enumerate() if thread.name == "progress"]


def test_a_terminal_gets_a_bar_with_units_that_disappears(terminal: io.StringIO) -> None:
    with report.progress_reporter("reading [images]", total=60_000, unit="images") as progress:
        progress(15_000)
        wait_for(lambda: "25 %" in terminal.getvalue())
    shown = ESCAPES.sub("", terminal.getvalue())
    assert "reading [images]" in shown and "15,000 of 60,000 images, 25 %" in shown


def test_a_spinner_appears_on_a_silent_terminal_until_there_is_data(
    terminal: io.StringIO, capsys: pytest.CaptureFixture[str]
) -> None:
    with report.spinner.shown():
        wait_for(lambda: "working" in terminal.getvalue())
        with report.progress_reporter("decoding", unit="pairs"):
            wait_for(lambda: "decoding" in terminal.getvalue())
        shown = terminal.getvalue().count("working")
        wait_for(lambda: terminal.getvalue().count("working") > shown)  # it comes back after the bar
        report.emit("data")
        length = len(terminal.getvalue())
        time.sleep(0.3)
        assert len(terminal.getvalue()) == length
    assert capsys.readouterr().out == "data\n"


def test_data_never_moves_to_stderr_while_a_bar_is_shown(
    terminal: io.StringIO, capsys: pytest.CaptureFixture[str]
) -> None:
    with report.progress_reporter("decoding", total=2, unit="pairs"):
        sys.stdout.write("a line of data\n")
    assert capsys.readouterr().out == "a line of data\n" and "a line of data" not in terminal.getvalue()


def test_a_pipe_gets_a_line_about_a_silent_command_until_there_is_data(
    piped: io.StringIO, capsys: pytest.CaptureFixture[str]
) -> None:
    with report.Spinner().shown():
        wait_for(lambda: "working: " in piped.getvalue())
    with report.spinner.shown():
        report.emit("data")
        length = len(piped.getvalue())
        time.sleep(0.2)
    assert len(piped.getvalue()) == length and "\x1b" not in piped.getvalue()
