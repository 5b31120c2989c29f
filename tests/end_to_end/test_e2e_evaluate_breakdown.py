"""`tformer evaluate --by` and `--plot` of every kind of run: parts that make the whole, pictures, refusals."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import tformer
from tests.end_to_end.labelled_examples import sentences, write_table
from tests.end_to_end.translate_runs import SEQ2SEQ as MODEL_OF_PAIRS
from tests.quick import first_is_quick
from tests.random_runs import random_run as make_random_run
from tformer.viz.output import SUFFIXES

Cli = Callable[..., Any]
Runs = Callable[[str], Path]
Figures = Callable[..., dict[str, Any]]
MakeRun = Callable[..., Path]


def mean(rows: list[dict[str, Any]], count: str, name: str) -> float:
    return float(sum(row[count] * row[name] for row in rows) / sum(row[count] for row in rows))


GPT = """
schema: 1
model:
  d_model: 8
  max_seq_len: 16
  decoder: {num_layers: 1, num_heads: 2, feedforward: {d_ff: 16}, positions: {kind: rope}}
  init: {std: 0.5}
data: {%s}
training: {precision: fp32}
"""


@pytest.fixture
def gpt(tmp_path: Path) -> Path:
    return make_random_run(tmp_path / "runs", GPT % "", arch="gpt", letters="abcdefgh \n", template="none")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("abc fed\ncab gabe\n" * 20)
    return path


def test_the_loss_by_position_is_that_of_a_plain_loop(figures: Figures, gpt: Path, text: Path) -> None:
    found = figures(gpt, "--data", text, "--by", "position")
    assert found["by"]["axis"] == "position"
    rows = found["by"]["rows"]
    assert [(row["from"], row["to"]) for row in rows] == [(n, n) for n in range(16)]
    loaded = tformer.load(gpt)
    ids = torch.tensor(loaded.tokenizer.encode(text.read_text()))
    losses: list[list[float]] = [[] for _ in range(16)]
    with torch.no_grad():
        for start in range(0, len(ids) - 1, 16):
            window = ids[start : start + 17]
            logits = loaded.model(window[None, :-1]).logits[0]
            nll = torch.nn.functional.cross_entropy(logits, window[1:], reduction="none")
            for position, value in enumerate(nll.tolist()):
                losses[position].append(value)
    assert [row["tokens"] for row in rows] == list(map(len, losses))
    assert [row["loss"] for row in rows] == pytest.approx([sum(own) / len(own) for own in losses], abs=1e-5)
    assert found["loss"] == pytest.approx(sum(map(sum, losses)) / (len(ids) - 1), abs=1e-5)
    assert mean(rows, "tokens", "accuracy") == pytest.approx(found["accuracy"])


@pytest.mark.parametrize("data", ["padding: left", "padding: right", "packing: documents, document_mask: true"])
def test_padding_and_documents_count_positions_from_the_first_token(
    data: str, figures: Figures, tmp_path: Path, text: Path
) -> None:
    def rows(settings: str) -> list[dict[str, Any]]:
        run = make_random_run(
            tmp_path / settings[:4], GPT % settings, arch="gpt", letters="abcdefgh \n", template="none"
        )
        found = figures(run, "--data", text, "--by", "position")
        assert mean(found["by"]["rows"], "tokens", "loss") == pytest.approx(found["loss"], abs=1e-5)
        by: list[dict[str, Any]] = found["by"]["rows"]
        return by

    assert rows(data) == [pytest.approx(row, abs=1e-5) for row in rows("packing: concat")]


def test_windows_of_other_lengths_are_those_of_seq_len(figures: Figures, gpt: Path, text: Path) -> None:
    rows = figures(gpt, "--data", text, "--by", "length", "--seq-len", 32)["by"]["rows"]
    assert [row["from"] for row in rows] == [row["to"] for row in rows] == [4, 8, 16, 32]
    for row in rows:
        alone = figures(gpt, "--data", text, "--seq-len", row["from"])
        assert (row["loss"], row["accuracy"]) == pytest.approx((alone["loss"], alone["accuracy"]), abs=1e-5)


LENGTHS = ("single", "pair", "multi", "score")


@pytest.mark.parametrize("kind", ["masked", "sentences", *LENGTHS])
def test_the_parts_make_the_whole(kind: str, figures: Figures, encoder_run: Runs) -> None:
    axis, count, close = ("length", "examples", 1e-5) if kind in LENGTHS else ("position", "tokens", 1e-4)
    found = figures(encoder_run(kind), "--by", axis)
    rows, whole = found["by"]["rows"], {"sentences": "masked_lm_loss", "score": "mae"}.get(kind, "loss")
    assert mean(rows, count, whole.removeprefix("masked_lm_")) == pytest.approx(found[whole], abs=close)
    assert all(row["from"] <= row["to"] < after["from"] for row, after in pairwise(rows))
    assert axis == "position" or (sum(row[count] for row in rows) == found[count] and 1 < len(rows) <= 10)


def test_pairs_by_the_position_in_the_target_and_the_length_of_the_source(
    figures: Figures, random_run: MakeRun, tmp_path: Path
) -> None:
    run = random_run(MODEL_OF_PAIRS + "objectives: [{kind: seq2seq}]\n")
    table = write_table(
        tmp_path / "pairs.tsv", ("source", "target"), [("a" * n, "ba" * (n % 4 + 1)) for n in range(1, 9)]
    )
    words = (run, "--data", table, "--source-column", "source", "--target-column", "target", "--no-decode")
    found = figures(*words, "--by", "position")
    assert [row["from"] for row in found["by"]["rows"]] == list(range(9))  # eight letters and the end
    assert found["by"]["rows"][0]["tokens"] == 8
    assert mean(found["by"]["rows"], "tokens", "loss") == pytest.approx(found["loss"], abs=1e-5)
    rows = figures(*words, "--by", "length")["by"]["rows"]
    assert sum(row["examples"] for row in rows) == 8 and rows[-1]["to"] - rows[0]["from"] == 7


def test_the_table_stands_at_the_end_of_the_report(cli: Cli, encoder_run: Runs) -> None:
    lines = cli("evaluate", encoder_run("single"), "--by", "length").out.splitlines()
    start = len(lines) - lines[::-1].index("")
    assert lines[start].split() == ["length", "examples", "loss", "accuracy", "f1_macro"]
    assert len(lines[start + 1].split()) == 5


@first_is_quick("suffix", SUFFIXES, quick=2)
def test_a_classifier_is_drawn_in_every_format(suffix: str, cli: Cli, encoder_run: Runs, tmp_path: Path) -> None:
    file = tmp_path / f"picture{suffix}"
    outcome = cli("evaluate", encoder_run("single"), "--by", "length", "--plot", file, "--json")
    assert outcome.code == 0 and "curves" not in json.loads(outcome.out), outcome.err
    titles = ("Confusion matrix", "Precision and recall", "Calibration", "Loss by length")
    assert (
        file.read_bytes().startswith(b"\x89PNG")
        if suffix == ".png"
        else all(title in file.read_text() for title in titles)
    )


def test_the_csv_holds_the_counts_of_the_report(cli: Cli, encoder_run: Runs, tmp_path: Path) -> None:
    file = tmp_path / "picture.csv"
    data = write_table(tmp_path / "test.tsv", ("label", "text"), sentences(60, 21))
    report = json.loads(cli("evaluate", encoder_run("single"), "--data", data, "--plot", file, "--json").out)
    rows = [row for row in csv.reader(file.open()) if row[0] == "Confusion matrix"]
    names = list(report["per_class"])
    assert [(row[1], row[2], float(row[3])) for row in rows] == [
        (label, guess, count)
        for label, counts in zip(names, report["confusion"], strict=True)
        for guess, count in zip(names, counts, strict=True)
    ]


def test_python_draws_and_divides_too(encoder_run: Runs, tmp_path: Path) -> None:
    file = tmp_path / "picture.svg"
    report = tformer.load(encoder_run("multi")).evaluate(by="length", plot=str(file))
    assert report["by"]["axis"] == "length" and "Calibration" in file.read_text() and "curves" not in report


@pytest.mark.parametrize(
    ("kind", "words", "expected"),
    [
        ("single", ("--by", "position"), "--by position: "),
        ("electra", ("--by", "position"), "predicts no tokens"),
        ("image", ("--by", "length"), "all have one length"),
        ("score", ("--plot", "x.html"), "--plot draws the decisions of a classifier"),
        ("masked", ("--plot", "x.html"), "of models that predict tokens --by position"),
        ("single", ("--plot", "x.pdf"), "x.pdf has the suffix .pdf, expected one of .html"),
        ("single", ("--plot", "-"), "--plot: expected a file"),
        ("single", ("--plot", "missing/x.png"), "--plot"),
        ("single", ("--by", "size"), "'size' is not one of 'position', 'length'"),
    ],
)
def test_what_cannot_be_drawn_or_divided_is_one_line(
    kind: str, words: tuple[str, ...], expected: str, cli: Cli, encoder_run: Runs, tmp_path: Path, monkeypatch: Any
) -> None:
    run = encoder_run(kind).resolve()
    monkeypatch.chdir(tmp_path)
    outcome = cli("evaluate", run, *words)
    assert outcome.code == 2 and expected in outcome.err and "Traceback" not in outcome.err, outcome.err
    assert outcome.out == "" and not list(tmp_path.glob("x.*"))


def test_standard_input_cannot_be_read_twice(cli: Cli, gpt: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with text.open() as file:
        monkeypatch.setattr("sys.stdin", file)
        outcome = cli("evaluate", gpt, "--data", "-", "--by", "length")
    assert outcome.code == 2 and "--by length reads the data twice" in outcome.err
