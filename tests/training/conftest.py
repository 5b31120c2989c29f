"""Trainings of a second: of a causal model, and of pairs in aligned files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.training.pair_makers import RECIPE, english, german

Cli = Callable[..., Any]
STEP_SECONDS = 0.01


@pytest.fixture(autouse=True)
def _plans_by_a_given_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give plans of a training by time a fixed duration of a step; end-to-end tests time real steps."""
    monkeypatch.setattr("tformer.training.plan._time_steps", lambda short, longest: STEP_SECONDS)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "pairs.yaml"
    path.write_text(RECIPE)
    return path


@pytest.fixture
def aligned(tmp_path: Path) -> tuple[Path, Path]:
    texts = english(60)
    (tmp_path / "train.en").write_text("\n".join(texts) + "\n")
    (tmp_path / "train.de").write_text("\n".join(map(german, texts)) + "\n")
    return tmp_path / "train.en", tmp_path / "train.de"


@pytest.fixture
def tiny(cli: Cli, tmp_path: Path, text_file: Path, tiny_recipe: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """`tiny("--out", "run", ...)`: the outcome of a training of a second in a new current folder."""
    monkeypatch.chdir(tmp_path)
    return lambda *words: cli("train", "--config", tiny_recipe, "--data", text_file, *words)


@pytest.fixture
def train(cli: Cli, recipe: Path, tmp_path: Path) -> Callable[..., Path]:
    """`train(*flags)`: a run that must succeed; gives its folder."""
    runs = iter(range(100))

    def run(*flags: object, base: bool = True) -> Path:
        out = tmp_path / f"run-{next(runs)}"
        outcome = cli("train", *(("--config", recipe) if base else ()), "--out", out, *flags)
        assert outcome.code == 0, outcome.err
        return out

    return run
