"""`tformer plot`: which runs are meant, what cannot be drawn, where the picture goes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.viz.plot_runs import train_record, write_run

Cli = Callable[..., Any]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """runs/old, runs/new (the last to log), runs/empty, and a sweep of two runs."""
    for number, place in enumerate(("runs/old", "runs/new", "sweeps/x/runs/a", "sweeps/x/runs/b")):
        path = write_run(tmp_path / place)
        os.utime(path / "metrics.jsonl", (1000 + number % 2, 1000 + number % 2))
    write_run(tmp_path / "runs/empty", [])
    os.utime(tmp_path / "runs/empty/metrics.jsonl", (900, 900))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def names(cli: Cli, *arguments: object) -> list[str]:
    outcome = cli("plot", *arguments, "--format", "json")
    assert outcome.code == 0, outcome.err
    return [run["name"] for run in json.loads(outcome.out)["runs"]]


def test_the_runs_meant(cli: Cli) -> None:
    assert names(cli) == ["new"], "by default the one that logged last"
    assert names(cli, "old", "runs/new", "old") == ["old", "new"]
    assert names(cli, "sweeps/x") == names(cli, "sweeps/x/runs") == ["a", "b"]
    assert names(cli, "runs/old", "sweeps/x/runs/a") == ["old", "a"]


def test_no_run_at_all(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bare").mkdir()
    for arguments in ((), ("nothing-here",), (tmp_path / "bare",)):
        with monkeypatch.context() as patch:
            patch.chdir(tmp_path / "bare")
            outcome = cli("plot", *arguments)
        assert outcome.code == 2 and outcome.out == "" and outcome.err.startswith("error: "), arguments


def test_a_run_without_metrics_is_one_line(cli: Cli) -> None:
    alone = cli("plot", "runs/empty")
    assert alone.code == 2 and "runs/empty has no metrics" in alone.err and len(alone.err.splitlines()) == 2
    beside = cli("plot", "runs/empty", "runs/new", "--format", "csv")
    assert beside.code == 0 and "left out: runs/empty" in beside.err and beside.out.startswith("run,split,")


def test_a_metric_that_only_some_runs_have_is_noted(cli: Cli, tmp_path: Path) -> None:
    write_run(tmp_path / "runs/odd", [train_record(1, 2.0)])
    outcome = cli("plot", "new", "odd", "--metric", "accuracy", "--format", "csv")
    assert outcome.code == 0 and "no accuracy: odd" in outcome.err


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--metric", "acuracy"), "did you mean 'accuracy'"),
        (("--x", "epochs"), "step, tokens or time"),
        (("--smooth", "1"), "below 1"),
        (("-o", "curves.pdf"), ".pdf"),
        (("-o", "runs"), "is a folder"),
        (("-o", "runs/new/metrics.jsonl", "--format", "json"), "would replace"),
        (("--format", "gif"), "gif"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(arguments: tuple[str, ...], word: str, cli: Cli) -> None:
    outcome = cli("plot", "runs/new", *arguments)
    assert outcome.code == 2 and outcome.out == "" and word in outcome.err
    assert len(outcome.err.splitlines()) <= 2 and "Traceback" not in outcome.err


def test_a_file_that_cannot_be_written_is_exit_3(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    outcome = cli("plot", "runs/new", "-o", "file/curves.html")
    assert outcome.code == 3 and "file/curves.html" in outcome.err


def test_formats_by_suffix_and_by_name(cli: Cli) -> None:
    for name, start in (("c.html", "<!doctype"), ("c.json", "{"), ("c.csv", "run,"), ("c.txt", "loss\n")):
        outcome = cli("plot", "runs/new", "-o", f"made/{name}")
        assert outcome.code == 0 and outcome.out == "" and f"wrote made/{name}" in outcome.err
        assert Path("made", name).read_text().startswith(start)
    assert cli("plot", "runs/new").code == 0 and Path("curves.html").is_file()
    piped = cli("plot", "runs/new", "--format", "html", "-o", "-")
    assert piped.out.startswith("<!doctype") and piped.err == ""


def test_a_pipe_gets_no_colour_and_the_width_of_columns(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    outcome = cli("plot", "old", "new", "--metric", "loss,lr", "--smooth", "0.5", "--format", "terminal")
    assert outcome.code == 0 and "\x1b" not in outcome.out and "learning rate" in outcome.out
    assert max(map(len, outcome.out.splitlines())) <= 50
