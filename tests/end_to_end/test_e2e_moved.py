"""A run is used from other folders, moves with its data, and says what is missing after a move apart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TINY_RECIPE

Cli = Callable[..., Any]
Figures = Callable[..., dict[str, Any]]


@pytest.fixture
def project(text_file: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with data and a run on them, both named by their places there."""
    folder = tmp_path / "project"
    (folder / "data").mkdir(parents=True)
    text_file.rename(folder / "data" / "a.txt")
    (folder / "tiny.yaml").write_text(TINY_RECIPE)
    monkeypatch.chdir(folder)
    outcome = cli("train", "--config", "tiny.yaml", "--data", "data/a.txt", "--max-steps", "4", "--out", "runs/a")
    assert outcome.code == 0, outcome.err
    return folder


def test_a_run_reads_its_data_from_every_folder(
    project: Path, tmp_path: Path, cli: Cli, figures: Figures, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = figures("runs/a")["loss"]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_text("another text\n" * 99)
    monkeypatch.chdir(tmp_path)
    assert figures(project / "runs/a")["loss"] == own
    for words in (
        ("train", "--resume", "--out", project / "runs/a", "--max-steps", "8"),
        ("prune", project / "runs/a", "--rate", "0.5", "--out", "pruned"),
        ("train", "--config", project / "runs/a/recipe.yaml", "--dry-run"),
    ):
        outcome = cli(*words)
        assert outcome.code == 0, outcome.err
    later = figures(project / "runs/a")["loss"]
    new = project.rename(tmp_path / "new")
    monkeypatch.chdir(new)
    assert figures("runs/a")["loss"] == later


def test_moved_data_are_named_with_the_option_that_gives_their_place(project: Path, cli: Cli, figures: Figures) -> None:
    own = figures("runs/a")["loss"]
    (project / "data").rename(project / "texts")
    for words in (("evaluate", "runs/a"), ("prune", "runs/a", "--rate", "0.5", "--out", "pruned")):
        outcome = cli(*words)
        assert outcome.code == 2 and "data/a.txt: no such file or directory, named by the recipe of" in outcome.err
        assert "--data-folder" in outcome.err
    assert figures("runs/a", "--data-folder", "texts")["loss"] == own
    resumes = ("train", "--resume", "--out", "runs/a", "--max-steps", "8")
    outcome = cli(*resumes)
    assert outcome.code == 2 and "data/a.txt: no such file or directory" in outcome.err and "--data" in outcome.err
    assert (outcome := cli(*resumes, "--data", "texts/a.txt")).code == 0, outcome.err
    assert figures("runs/a")["data"] == "the last 10% of texts/a.txt"
