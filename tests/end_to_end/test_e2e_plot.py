"""`tformer plot` on what `tformer train` really logs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def test_training_is_plotted_in_every_format(
    cli: Callable[..., Any], tmp_path: Path, text_file: Path, tiny_recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for out, options in (("runs/one", ()), ("runs/two", ("--lr", 0.001))):
        trained = cli("train", "--config", tiny_recipe, "--data", text_file, "--out", out, *options)
        assert trained.code == 0, trained.err
    with open("runs/one/metrics.jsonl", "a") as stream:
        stream.write('{"split": "train", "st')  # as a kill leaves it

    outcome = cli("plot", "runs", "--metric", "all", "--x", "tokens", "--format", "json")
    assert outcome.code == 0, outcome.err
    document = json.loads(outcome.out)
    assert [run["name"] for run in document["runs"]] == ["one", "two"]
    found = {(series["split"], series["metric"]): series for series in document["series"] if series["run"] == "one"}
    assert {("train", "loss"), ("valid", "loss"), ("train", "lr"), ("train", "tokens_per_second"),
            ("train", "grad_norm"), ("valid", "bits_per_byte")} <= set(found)  # fmt: skip
    assert found["train", "loss"]["x"] == [192, 384, 576, 768], "4 sequences of 16 tokens a step, a record every 3"
    assert found["valid", "loss"]["x"] == [384, 768]

    for name in ("c.html", "c.svg", "c.png", "c.txt", "c.csv"):
        made = cli("plot", "one", "two", "--smooth", 0.5, "--x", "time", "--title", "Two rates", "-o", name)
        assert made.code == 0, made.err
        assert Path(name).stat().st_size > 500
