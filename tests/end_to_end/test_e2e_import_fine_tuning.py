"""Fine-tuning from folders of Hugging Face: it lowers the loss, and resumes as if it had not been interrupted."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.end_to_end.import_data import write_data
from tformer.support.errors import Interrupted
from tformer.training.options import TrainOptions
from tformer.training.session import run_training
from tformer.workers.work import Work

Cli = Callable[..., Any]
TIMES = {"seconds", "tokens_per_second", "peak_share"}
QUICK = ("--batch-size", 8, "--lr", 0.01, "--precision", "fp32", "--device", "cpu")


def losses(run: Path) -> list[float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if line.get("split") == "valid"]


@pytest.mark.parametrize(("name", "data", "more"), [
    ("gpt2", "text", ()), ("bert", "text", ()), ("bert", "labelled", ("--objective", "classification")),
    ("classifier", "labelled", ()), ("t5", "pairs", ()), ("bart", "pairs", ()),
    ("gpt2", "text", ("--preset", "gpt/tiny")), ("bert", "labelled", ("--preset", "bert/finetune")),
])  # fmt: skip
def test_fine_tuning_lowers_the_loss(name: str, data: str, more: Any, cli: Cli, folders: Path, tmp_path: Path) -> None:
    file, run = write_data(data, tmp_path), tmp_path / "run"
    sets = ["training.eval_every=8", "training.sample_every=0"]
    sets += ["training.valid_beam_size=0"] if data == "pairs" else []
    options = [word for text in sets for word in ("--set", text)]
    words = ("--data", file, "--out", run, *QUICK, "--max-steps", 24, *options, *more)
    outcome = cli("train", "--init-from", folders / name, *words)
    assert outcome.code == 0, outcome.err
    found = losses(run)
    assert len(found) >= 2 and found[-1] < found[0] - 0.01, found
    if name == "classifier":
        assert "kept head: classifier" in outcome.err and "labels (3): zeta, alpha, mid" in outcome.err
    alone = cli("evaluate", run, "--data", file, *(["--no-decode"] if data == "pairs" else []))
    assert alone.code == 0, alone.err  # the run needs the folder no more


class Polls:
    """Says stop at the n-th question, as a signal that arrives there would."""

    def __init__(self, stop_at: int | None) -> None:
        self.stop_at, self.count = stop_at, 0

    def __call__(self) -> bool:
        self.count += 1
        return self.stop_at is not None and self.count >= self.stop_at


def train(options: TrainOptions, *, stop_at: int | None = None) -> bool:
    """Whether it came to its end."""
    try:
        run_training(
            options,
            console=Console(quiet=True, stderr=True),
            work=Work(should_stop=Polls(stop_at)),
            began=0.0,
        )
    except Interrupted:
        return False
    return True


def result(run: Path) -> tuple[str, list[dict[str, Any]]]:
    """The hash of the last weights, and the metrics without times."""
    latest = run / "checkpoints" / (run / "checkpoints" / "latest").read_text().strip()
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    metrics = [{key: value for key, value in line.items() if key not in TIMES} for line in lines]
    return hashlib.sha256((latest / "model.safetensors").read_bytes()).hexdigest(), metrics


@pytest.mark.parametrize(("name", "data", "kind"), [
    ("gpt2", "text", None), ("bert", "labelled", "classification"), ("t5", "pairs", None),
])  # fmt: skip
def test_fine_tuning_resumes_exactly(name: str, data: str, kind: str | None, folders: Path, tmp_path: Path) -> None:
    file = write_data(data, tmp_path)
    values = {
        "max_steps": 6, "eval_every": 3, "save_every": 2, "log_every": 1, "batch_size": 4, "sample_every": 0,
        "precision": "fp32", "device": "cpu", "threads": 1, **({"valid_beam_size": 0} if data == "pairs" else {}),
    }  # fmt: skip
    sets = tuple(f"training.{key}={value}" for key, value in values.items())
    start = TrainOptions(init_from=folders / name, data=(str(file),), objective=kind, sets=sets, out=tmp_path / "whole")
    assert train(start)
    expected = result(tmp_path / "whole")
    for stop_at in (4, 10):
        out = tmp_path / f"stopped-{stop_at}"
        assert not train(replace(start, out=out), stop_at=stop_at)
        assert result(out)[0] != expected[0]  # it stopped before its end
        assert train(TrainOptions(out=out, resume=True))
        assert result(out) == expected
