"""The system's clock is set back while a command works: durations, limits and the order of checkpoints stay right."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tformer.checkpoint.run import RunDirectory

Cli = Callable[..., Any]


def test_a_training_under_a_clock_that_goes_backwards_has_no_negative_duration_and_keeps_its_order(
    cli: Cli, tmp_path: Path, text_file: Path, tiny_recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hours = count(1)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now - 3600 * next(hours))
    run = tmp_path / "run"
    words = ("train", "--config", tiny_recipe, "--data", text_file, "--out", run, "--max-minutes", 1000)
    outcome = cli(*words, "--max-steps", 8)
    assert outcome.code == 0, outcome.err
    assert "ETA -" not in outcome.err
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    seconds = [record["seconds"] for record in records if record["split"] == "train"]
    assert seconds == sorted(seconds) and seconds[0] > 0
    assert all(record["tokens_per_second"] > 0 for record in records if record["split"] == "train")

    for age, entry in enumerate(RunDirectory.open(run).checkpoints()):  # later steps have earlier times
        for path in (entry.path, *entry.path.iterdir()):
            os.utime(path, (1e9 - age, 1e9 - age))
    latest = RunDirectory.open(run).latest()
    assert latest is not None and latest.name == "step-00000008"
    assert cli(*words, "--max-steps", 10, "--resume").code == 0
    assert [entry.step for entry in RunDirectory.open(run).checkpoints()][-1] == 10
