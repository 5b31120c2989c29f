"""Tokenizers that a training makes are kept in the cache, by the data's fingerprint and the options."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tformer.recipe import load_recipe
from tformer.tasks import tokenizers as module
from tformer.tasks.base import TrainingData, TrainingStart
from tformer.tasks.table import task_of
from tformer.tasks.tokenizers import CACHE
from tformer.tokenizer import Tokenizer
from tformer.workers.work import Work

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
        found = task_of(recipe).training_data(TrainingStart(recipe=recipe), silent)[1].tokenizer
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


def test_a_tokenizer_of_an_earlier_version_is_not_trusted(
    obtain: Callable[..., str], trainings: list[None], text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be of half a text, which changed while it was read."""
    with monkeypatch.context() as patch:
        patch.setattr(module, "VERSION", 1)
        obtain(text_file)
    obtain(text_file)
    assert len(trainings) == 2


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


UNIQUE = [f"word{number:03d}" for number in range(200)]

KINDS: dict[str, tuple[dict[str, str], list[str]]] = {  # architecture and preset, lines of the file
    "text": ({"arch": "gpt", "preset": "tiny"}, [f"the {word}" for word in UNIQUE]),
    "labelled": (
        {"arch": "bert", "preset": "classify"},
        ["label\ttext", *(f"{number % 2}\tthe {word}" for number, word in enumerate(UNIQUE))],
    ),
    "pairs": (
        {"arch": "transformer", "preset": "dates"},
        ["source\ttarget", *(f"the {word}\tdas {word}" for word in UNIQUE)],
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_held_out_is_not_what_a_tokenizer_is_trained_on(kind: str, tmp_path: Path) -> None:
    flags, lines = KINDS[kind]
    path = tmp_path / ("text.txt" if kind == "text" else "rows.tsv")
    path.write_text("\n".join(lines) + "\n")

    def data_of(**more: Any) -> TrainingData:
        own = {"data.train": [{"path": str(path)}], **more}
        sets = ("tokenizer.train.model=word", "tokenizer.train.min_frequency=1", "tokenizer.train.vocab_size=1000",
                "training.batch_tokens=null", "training.batch_size=2", "data.seq_len=6",
                "model.max_seq_len=8")  # fmt: skip
        recipe = load_recipe(**flags, flags=own, sets=sets).recipe
        return task_of(recipe).training_data(TrainingStart(recipe=recipe), Work(cache_dir=tmp_path / "cache"))[1]

    def unknown(data: TrainingData) -> set[str]:
        assert data.tokenizer is not None
        return {word for word in UNIQUE if not any(token.endswith(word) for token in data.tokenizer.tokens)}

    found = data_of()
    missing = unknown(found)
    if kind == "text":
        assert set(UNIQUE[-20:]) <= missing and len(missing) <= 30
    elif kind == "labelled":
        assert len(found.samples) == 180 and 20 <= len(missing) <= 24
    else:
        samples: Any = found.samples
        trained = {samples.texts(number)[0].split()[-1] for number in range(len(samples))}
        assert len(trained) == 180 and set(UNIQUE) - trained <= missing and len(missing) <= 30
    assert len(unknown(data_of(**{"data.valid": [{"path": str(path)}]}))) <= 4  # one text in 50 is for the report
