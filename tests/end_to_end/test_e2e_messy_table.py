"""A messy table from file to predictions: look, train, evaluate, classify; and the same from pandas."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tformer
from tests.data import messy

Cli = Callable[..., Any]
TINY = {
    "model.d_model": 16,
    "model.encoder.num_layers": 1,
    "model.encoder.num_heads": 2,
    "model.encoder.feedforward.d_ff": 16,
    "data.seq_len": 32,
}


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "messy.csv"
    path.write_bytes(messy.messy_csv(messy.messy_rows()))
    return path


def test_a_messy_table_goes_from_file_to_predictions(cli: Cli, table: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    sets = [word for key, value in TINY.items() for word in ("--set", f"{key}={value}")]
    refused = cli("train", "--arch", "bert", "--data", table, "--max-steps", "2", "--out", run, *sets)
    assert refused.code == 2 and "13 rows cannot be used: the label is empty" in refused.err
    assert "--bad-rows drop" in refused.err and not run.exists()
    words = ("train", "--arch", "bert", "--data", table, "--bad-rows", "drop", "--out", run, *sets)
    trained = cli(*words, "--max-steps", "2")
    assert trained.code == 0, trained.err
    starts = ("messy", "data:", "labels", "lengths", "texts", "caution")
    look = [line for line in trained.err.splitlines() if line.startswith(starts)]
    assert any("37 rows left out" in line for line in trained.err.splitlines())
    assert len([line for line in look if "left out" not in line]) <= 6 and "near duplicates" in trained.err
    assert len((run / "bad-rows.jsonl").read_text().splitlines()) == 37
    resumed = cli("train", "--resume", "--out", run, "--max-steps", "3")
    assert resumed.code == 0 and "near duplicates" not in resumed.err, "the look is not printed again"
    assert cli("evaluate", run, "--json").code == 0
    answers = cli("classify", run, "--input", table, "--json").out.splitlines()
    assert len(answers) == 3000 and {json.loads(answer)["label"] for answer in answers} <= {"neg", "pos"}


def test_the_same_from_pandas(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(messy.messy_rows(400), columns=messy.NAMES)
    frame["stars"] = frame["sentiment"].map({"neg": 0, "pos": 1})  # floats, as labels are missing
    labels = {"text_column": "review", "label_column": "stars", "bad_rows": "drop"}
    run = tformer.train(frame, arch="bert", set=TINY, max_steps=2, out=tmp_path / "run", quiet=True, **labels)
    assert run.recipe.data.labels == ("0", "1")
    answers = run.classify(frame)
    assert len(answers) == 400 and {answer.label for answer in answers} <= {"0", "1"}
    assert run.evaluate(frame, bad_rows="drop")["examples"] < 400
