"""Options of `plot`, `viz-attention` and `viz-pe`."""

from __future__ import annotations

import csv
import gc
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.viz.plot_runs import train_record, write_run
from tformer.cli.process import uncollected
from tformer.support.errors import InputError
from tformer.support.options import parse_numbers

Cli = Callable[..., Any]


@pytest.fixture
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


def test_the_runs_meant(home: Path, cli: Cli) -> None:
    assert names(cli) == ["new"], "by default the one that logged last"
    assert names(cli, "old", "runs/new", "old") == ["old", "new"]
    assert names(cli, "sweeps/x") == names(cli, "sweeps/x/runs") == ["a", "b"]
    assert names(cli, "runs/old", "sweeps/x/runs/a") == ["old", "a"]


def test_no_run_at_all(home: Path, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bare").mkdir()
    for arguments in ((), ("nothing-here",), (tmp_path / "bare",)):
        with monkeypatch.context() as patch:
            patch.chdir(tmp_path / "bare")
            outcome = cli("plot", *arguments)
        assert outcome.code == 2 and outcome.out == "" and outcome.err.startswith("error: "), arguments


def test_a_run_without_metrics_is_one_line(home: Path, cli: Cli) -> None:
    alone = cli("plot", "runs/empty")
    assert alone.code == 2 and "runs/empty has no metrics" in alone.err and len(alone.err.splitlines()) == 2
    beside = cli("plot", "runs/empty", "runs/new", "--format", "csv")
    assert beside.code == 0 and "omitted: runs/empty" in beside.err and beside.out.startswith("run,split,")


def test_a_metric_that_only_some_runs_have_is_noted(home: Path, cli: Cli, tmp_path: Path) -> None:
    write_run(tmp_path / "runs/odd", [train_record(1, 2.0)])
    outcome = cli("plot", "new", "odd", "--metric", "accuracy", "--format", "csv")
    assert outcome.code == 0 and "no accuracy: odd" in outcome.err


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--metric", "acuracy"), "did you mean 'accuracy'"),
        (("--x", "epochs"), "'epochs' is not one of 'step', 'tokens', 'time'"),
        (("--smooth", "1"), "below 1"),
        (("-o", "curves.pdf"), ".pdf"),
        (("-o", "runs"), "is a folder"),
        (("-o", "runs/new/metrics.jsonl", "--format", "json"), "would replace"),
        (("--format", "gif"), "gif"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(arguments: tuple[str, ...], word: str, home: Path, cli: Cli) -> None:
    outcome = cli("plot", "runs/new", *arguments)
    assert outcome.code == 2 and outcome.out == "" and word in outcome.err
    assert len(outcome.err.splitlines()) <= 2 and "Traceback" not in outcome.err


def test_a_file_that_cannot_be_written_is_exit_3(home: Path, cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    outcome = cli("plot", "runs/new", "-o", "/proc/curves.html")
    assert outcome.code == 3 and "/proc/curves.html" in outcome.err
    for folder in ("file", "missing"):
        outcome = cli("plot", "runs/new", "-o", f"{folder}/curves.html")
        assert outcome.code == 2 and f"{folder}/curves.html" in outcome.err
    assert not (tmp_path / "missing").exists()


def test_formats_by_suffix_and_by_name(home: Path, cli: Cli) -> None:
    Path("made").mkdir()
    for name, start in (("c.html", "<!doctype"), ("c.json", "{"), ("c.csv", "run,"), ("c.txt", "loss\n")):
        outcome = cli("plot", "runs/new", "-o", f"made/{name}")
        assert outcome.code == 0 and outcome.out == "" and f"wrote made/{name}" in outcome.err
        assert Path("made", name).read_text().startswith(start)
    assert cli("plot", "runs/new").code == 0 and Path("curves.html").is_file()
    piped = cli("plot", "runs/new", "--format", "html", "-o", "-")
    assert piped.out.startswith("<!doctype") and piped.err == ""


def test_a_pipe_gets_no_colour_and_the_width_of_columns(home: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    outcome = cli("plot", "old", "new", "--metric", "loss,lr", "--smooth", "0.5", "--format", "terminal")
    assert outcome.code == 0 and "\x1b" not in outcome.out and "learning rate" in outcome.out
    assert max(map(len, outcome.out.splitlines())) <= 50


@pytest.mark.parametrize(
    ("text", "numbers"),
    [(None, None), ("0", (0,)), ("0,3-5", (0, 3, 4, 5)), ("3-5, 0,4", (0, 3, 4, 5)), (" 2 - 3 ", (2, 3))],
)
def test_numbers_and_ranges(text: str | None, numbers: tuple[int, ...] | None) -> None:
    assert parse_numbers(text, "--layers") == numbers


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "3-1", "1,,2", "1.5", "0-99999999", "mean"])
def test_what_is_no_number_is_one_line(text: str) -> None:
    with pytest.raises(InputError, match="--layers"):
        parse_numbers(text, "--layers")


SMALL = ("--d-model", 16, "--positions", 12)


def test_a_page_is_the_default(cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = cli("viz-pe", *SMALL)
    assert outcome.code == 0 and outcome.out == "viz-pe-sinusoidal.html\n" and outcome.err == ""
    text = Path("viz-pe-sinusoidal.html").read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>") and "Content-Security-Policy" in text and len(text) < 400_000


@pytest.mark.parametrize(("suffix", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("html", b"<!doctype")])
def test_the_suffix_is_the_format(suffix: str, magic: bytes, cli: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / f"picture.{suffix}"
    outcome = cli("viz-pe", *SMALL, "-o", path)
    assert outcome.code == 0 and outcome.out == f"{path}\n" and path.read_bytes().startswith(magic)


def test_json_has_the_numbers_of_the_formula(cli: Callable[..., Any]) -> None:
    outcome = cli("viz-pe", *SMALL, "--view", "heatmap", "--format", "json")
    document = json.loads(outcome.out)
    assert outcome.code == 0 and outcome.err == "" and document["encoding"] == "sinusoidal"
    values = np.array(document["plots"][0]["values"])
    place, i = np.arange(12)[:, None], np.arange(8)
    angle = place / 10000 ** (2 * i / 16)
    assert np.allclose(values[:, ::2], np.sin(angle), atol=1e-12)
    assert np.allclose(values[:, 1::2], np.cos(angle), atol=1e-12)


def test_csv_has_a_value_a_row(cli: Callable[..., Any]) -> None:
    words = ("--compare", "alibi", "--num-heads", 1, "--positions", 3)
    outcome = cli("viz-pe", *words, "--format", "csv")
    rows = list(csv.reader(io.StringIO(outcome.out)))
    assert rows[0] == ["plot", "line", "x", "y"]
    assert [float(row[3]) for row in rows[1:]] == [0, -(2**-8), -(2**-7)]


def test_characters_go_to_standard_output_without_colour(cli: Callable[..., Any], tmp_path: Path) -> None:
    outcome = cli("viz-pe", "--compare", "all", "--format", "terminal")
    assert outcome.code == 0 and "\x1b" not in outcome.out and "A sinusoidal, d_model 512" in outcome.out
    written = cli("viz-pe", "--encoding", "shaw", "-o", tmp_path / "a.txt")
    assert written.out == f"{tmp_path / 'a.txt'}\n" and "clip(j − i, −k, k) + k" in (tmp_path / "a.txt").read_text()


@pytest.mark.parametrize("encoding", ["sinusoidal", "rope", "alibi", "t5_bias", "shaw", "patch2d"])
def test_every_fixed_kind_needs_no_model(encoding: str, cli: Callable[..., Any]) -> None:
    outcome = cli("viz-pe", "--encoding", encoding, *SMALL, "--num-heads", 2, "--format", "json")
    document = json.loads(outcome.out)
    assert outcome.code == 0 and document["encoding"] == encoding and document["run"] is None


def test_what_cannot_be_written_is_exit_code_3(cli: Callable[..., Any]) -> None:
    outcome = cli("viz-pe", *SMALL, "-o", "/proc/a.html")
    assert outcome.code == 3 and outcome.err.startswith("error: cannot write /proc/a.html")


def test_imports_are_not_interrupted_by_the_search_for_garbage() -> None:
    assert gc.isenabled()
    with uncollected():
        assert not gc.isenabled()
    assert gc.isenabled()
