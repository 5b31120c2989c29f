"""`tformer viz-pe` in every format, and what it refuses."""

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

from tformer.cli.common import uncollected

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
    outcome = cli("viz-pe", "--encoding", "alibi", "--heads", 4, "--view", "slopes", "--format", "csv")
    rows = list(csv.reader(io.StringIO(outcome.out)))
    assert rows[0] == ["plot", "line", "x", "y"]
    assert [float(row[3]) for row in rows[1:]] == [2**-2, 2**-4, 2**-6, 2**-8]


def test_characters_go_to_standard_output_without_colour(cli: Callable[..., Any], tmp_path: Path) -> None:
    outcome = cli("viz-pe", "--compare", "all", "--format", "terminal")
    assert outcome.code == 0 and "\x1b" not in outcome.out and "A sinusoidal, d_model 512" in outcome.out
    written = cli("viz-pe", "--encoding", "shaw", "-o", tmp_path / "a.txt")
    assert written.out == f"{tmp_path / 'a.txt'}\n" and "clip(j − i, −k, k) + k" in (tmp_path / "a.txt").read_text()


@pytest.mark.parametrize("encoding", ["sinusoidal", "rope", "alibi", "t5_bias", "shaw", "patch2d"])
def test_every_fixed_kind_needs_no_model(encoding: str, cli: Callable[..., Any]) -> None:
    outcome = cli("viz-pe", "--encoding", encoding, *SMALL, "--heads", 2, "--format", "json")
    document = json.loads(outcome.out)
    assert outcome.code == 0 and document["encoding"] == encoding and document["run"] is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--encoding", "ropes"], "--encoding ropes: unknown"),
        (["--d-model", "9"], "--d-model 9 is odd"),
        (["--view", "spiral"], "--view spiral: sinusoidal has no such view"),
        (["--encoding", "learned"], "shows what a model has learned: name one"),
        (["--encoding", "t5_bias", "--view", "bias"], "shows what a model has learned"),
        (["-o", "a.gif"], "a.gif has the suffix .gif"),
        (["--format", "pdf"], "--format pdf: unknown"),
        (["--dims", "1,two"], "--dims 1,two: expected whole numbers"),
        (["--dims", "512", "--view", "waves"], "--dims 512: there is no such dimension"),
        (["--compare", "rope,spiral"], "--compare spiral: unknown"),
        (["--compare", "rope,"], "--compare (nothing): unknown"),
        (["--layer", "3"], "--layer names a part of a run"),
        (["--compare", "rope,shaw"], "--compare shaw: it has no curve"),
        (["--stack", "encoder"], "--stack names a part of a run"),
        (["--run", "no/such/run"], "no/such/run"),
        (["--layout", "diagonal"], "--layout diagonal: expected"),
    ],
)
@pytest.mark.parametrize("format_", ["html", "json"])
def test_mistakes_are_one_line_and_leave_nothing(
    arguments: list[str],
    words: str,
    format_: str,
    cli: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    extra = [] if {"-o", "--format"} & set(arguments) else ["--format", format_]
    outcome = cli("viz-pe", *arguments, *extra)
    assert outcome.code == 2 and outcome.out == "" and words in outcome.err
    assert outcome.err.startswith("error: ") and len(outcome.err.splitlines()) <= 2
    assert not os.listdir(tmp_path)


def test_what_cannot_be_written_is_exit_code_3(cli: Callable[..., Any]) -> None:
    outcome = cli("viz-pe", *SMALL, "-o", "/proc/none/a.html")
    assert outcome.code == 3 and outcome.err.startswith("error: cannot write /proc/none/a.html")


def test_imports_are_not_interrupted_by_the_search_for_garbage() -> None:
    assert gc.isenabled()
    with uncollected():
        assert not gc.isenabled()
    assert gc.isenabled()
