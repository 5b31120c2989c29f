"""`tformer bench quality` as a user runs it: real trainings, and an interrupt in the middle of one."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.end_to_end.interrupting import interrupt_with_its_child

Start = Callable[..., "subprocess.Popen[str]"]
TINY = (
    *("--set", "model.d_model=16", "--set", "model.decoder.num_heads=2", "--set", "model.decoder.num_layers=1"),
    *("--set", "training.max_steps=4", "--set", "training.eval_every=2", "--set", "training.batch_size=2"),
)


def test_two_seeds_of_a_tiny_model(cli_process: Start, tmp_path: Path, text_file: Path) -> None:
    words = ("--data", text_file, "--valid", text_file, "--seeds", "5,6", "--threads", 1, "--device", "cpu")
    process = cli_process("bench", "quality", "--preset", "char-12s", *TINY, *words, "--json", cwd=tmp_path)
    out, err = process.communicate(timeout=1800)
    assert process.returncode == 0, err
    found = json.loads(out)
    assert [(row["seed"], row["steps"], row["failed"]) for row in found["rows"]] == [(5, 4, None), (6, 4, None)]
    for row in found["rows"]:
        assert 0 < row["training_seconds"] < row["seconds"] and 0 < row["loss"] < 20 and row["reached"] is None
        assert row["tokens_per_second"] > 0 and row["step_ms"] > 0 and row["share_of_peak"] > 0
    assert found["rows"][0]["loss"] != found["rows"][1]["loss"]
    assert found["spread"]["loss"]["std"] > 0 and not list(tmp_path.glob("runs*"))


def test_a_target_ends_the_training_and_a_mistake_of_it_is_said(
    cli_process: Start, tmp_path: Path, text_file: Path
) -> None:
    words = ("--data", text_file, "--valid", text_file, "--seeds", "5", "--threads", 1, "--device", "cpu")
    command = ("bench", "quality", "--preset", "char-12s", *TINY, *words)
    out, err = cli_process(*command, "--target", 19, cwd=tmp_path).communicate(timeout=1800)
    assert "| 5 |" in out and "seed 5: loss" in err and "not reached" not in out
    process = cli_process(*command, "--set", "training.max_steps=0", cwd=tmp_path)
    out, err = process.communicate(timeout=1800)
    assert process.returncode == 2 and out == "" and "training.max_steps" in err


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for the process in /proc")
def test_an_interrupt_ends_the_training(cli_process: Start, tmp_path: Path, text_file: Path) -> None:
    words = ("--data", text_file, "--valid", text_file, "--device", "cpu")
    process = cli_process("bench", "quality", "--preset", "char", *words, cwd=tmp_path)
    interrupt_with_its_child(process)
