"""Tokenizers that a training makes are kept in the cache, by the data's fingerprint and the options."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tformer.recipe import load_recipe
from tformer.tasks import task_of
from tformer.tasks import tokenizers as module
from tformer.tasks.base import TrainingStart, Work
from tformer.tasks.tokenizers import CACHE
from tformer.tokenizer import Tokenizer

SETS = ("tokenizer.train.vocab_size=300", "training.batch_size=2", "training.max_steps=2", "data.seq_len=8",
        "model.max_seq_len=8")  # fmt: skip


@pytest.fixture
def trainings(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """An entry for each tokenizer that is trained."""
    found: list[None] = []
    train = module.train_tokenizer

    def counting(*arguments: Any, **settings: Any) -> Tokenizer:
        found.append(None)
        return train(*arguments, **settings)

    monkeypatch.setattr(module, "train_tokenizer", counting)
    return found


@pytest.fixture
def obtain(tmp_path: Path) -> Callable[..., str]:
    """The JSON of the tokenizer that a training with these settings uses, with a cache of its own."""

    def tokenizer(text: Path, *sets: str) -> str:
        flags = {"data.train": [{"path": str(text)}]}
        recipe = load_recipe(arch="gpt", preset="tiny", flags=flags, sets=[*SETS, *sets]).recipe
        silent = Work(cache_dir=tmp_path / "cache")
        found = task_of(recipe).training_data(TrainingStart(recipe=recipe), silent).tokenizer
        assert found is not None
        return found.to_json()

    return tokenizer


def test_the_tokenizer_of_a_corpus_is_trained_once(
    obtain: Callable[..., str], trainings: list[None], text_file: Path
) -> None:
    assert obtain(text_file) == obtain(text_file) and len(trainings) == 1


def test_another_text_or_another_option_trains_another_tokenizer(
    obtain: Callable[..., str], trainings: list[None], text_file: Path
) -> None:
    first = obtain(text_file)
    assert obtain(text_file, "tokenizer.train.model=char") != first and len(trainings) == 2
    text_file.write_text(text_file.read_text().replace("dogs", "zebras"))
    assert obtain(text_file) != first and len(trainings) == 3


def test_a_damaged_tokenizer_in_the_cache_is_trained_again(
    obtain: Callable[..., str], trainings: list[None], text_file: Path, tmp_path: Path
) -> None:
    first = obtain(text_file)
    [cached] = (tmp_path / "cache" / CACHE).iterdir()
    cached.write_text(cached.read_text()[:100])
    assert obtain(text_file) == first and len(trainings) == 2
    assert obtain(text_file) == first and len(trainings) == 2  # it was replaced


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_cache_that_cannot_be_written_is_no_error(
    obtain: Callable[..., str], trainings: list[None], text_file: Path, tmp_path: Path
) -> None:
    (tmp_path / "cache").mkdir(mode=0o500)
    assert obtain(text_file) == obtain(text_file) and len(trainings) == 2


def test_a_cache_folder_that_is_a_file_is_no_error(
    obtain: Callable[..., str], trainings: list[None], text_file: Path, tmp_path: Path
) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / CACHE).write_text("")
    assert obtain(text_file) == obtain(text_file) and len(trainings) == 2
