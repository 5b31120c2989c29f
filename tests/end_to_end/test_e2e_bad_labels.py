"""Mistakes in labelled data and images: one clear line, exit code 2, and everything on disk as it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.end_to_end.conftest import ENCODER, IMAGES
from tests.end_to_end.labelled_examples import sentences, write_images, write_table

Cli = Callable[..., Any]


@pytest.fixture
def refused(cli: Cli, tmp_path: Path) -> Callable[..., str]:
    """`refused(*arguments)`: a training that must be refused; gives its message."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(ENCODER)
    images = tmp_path / "images.yaml"
    images.write_text(IMAGES)

    def run(*arguments: object, of_images: bool = False) -> str:
        out = tmp_path / "run"
        outcome = cli("train", "--config", images if of_images else recipe, "--out", out, *arguments)
        assert outcome.code == 2, outcome.err
        assert outcome.out == "" and not out.exists()
        [line] = [line for line in outcome.err.splitlines() if line.startswith("error: ")]
        assert "internal error" not in line
        return str(outcome.err[outcome.err.index("error: ") :]).replace("\n", " ")

    return run


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return write_table(tmp_path / "train.tsv", ("label", "text"), sentences(40, 0))


def test_unknown_label_in_valid(refused: Callable[..., str], table: Path, tmp_path: Path) -> None:
    valid = write_table(tmp_path / "valid.tsv", ("label", "text"), [("tool", "the saw"), ("plant", "the oak")])
    message = refused("--data", table, "--valid", valid)
    assert "valid.tsv:3" in message and "'plant'" in message and "animal" in message


def test_missing_column(refused: Callable[..., str], table: Path) -> None:
    message = refused("--data", table, "--label-column", "lable")
    assert "no column 'lable'" in message and "label" in message and "text" in message


def test_wrong_number_of_fields(refused: Callable[..., str], table: Path) -> None:
    with table.open("a") as file:
        file.write("animal\tthe cat\tand more\n")
    message = refused("--data", table)
    assert "train.tsv:42" in message and "expected 2" in message and "found 3" in message


def test_one_class_only(refused: Callable[..., str], tmp_path: Path) -> None:
    rows = [("tool", f"the saw {number}") for number in range(20)]
    assert "one class only" in refused("--data", write_table(tmp_path / "one.tsv", ("label", "text"), rows))


def test_pairs_in_valid_alone(refused: Callable[..., str], table: Path, tmp_path: Path) -> None:
    rows = [("tool", "the saw", "the axe"), ("animal", "the cat", "the dog")]
    valid = write_table(tmp_path / "pairs.tsv", ("label", "text", "text2"), rows)
    message = refused("--data", table, "--valid", valid)
    assert "pairs.tsv" in message and "two" in message


def test_score_that_is_no_number(refused: Callable[..., str], tmp_path: Path) -> None:
    rows = [("1.5", "the saw"), ("high", "the axe")]
    data = write_table(tmp_path / "scores.tsv", ("score", "text"), rows)
    message = refused("--data", data, "--text-column", "text", "--label-column", "score", "--objective", "regression")
    assert "scores.tsv:3" in message and "'high'" in message


def test_a_file_in_a_folder_of_images_that_is_none(refused: Callable[..., str], tmp_path: Path) -> None:
    folder = write_images(tmp_path / "images", 6)
    next(path for path in folder.iterdir() if path.is_dir()).joinpath("notes.txt").write_text("not an image")
    assert "notes.txt" in refused("--data", folder, of_images=True)


def test_images_of_one_class(refused: Callable[..., str], tmp_path: Path) -> None:
    folder = tmp_path / "one" / "cat"
    folder.mkdir(parents=True)
    for number in range(4):
        Image.new("L", (8, 8), number).save(folder / f"{number}.png")
    assert "class" in refused("--data", folder.parent, of_images=True)


def test_a_model_of_images_without_images(refused: Callable[..., str]) -> None:
    assert "needs images" in refused(of_images=True)


def test_an_image_of_another_size_is_resized_and_that_is_said(cli: Cli, tmp_path: Path) -> None:
    folder = write_images(tmp_path / "images", 6)
    first = next(path for path in folder.iterdir() if path.is_dir())
    Image.new("L", (20, 12), 100).save(first / "wide.png")
    recipe = tmp_path / "images.yaml"
    recipe.write_text(IMAGES)
    outcome = cli("train", "--config", recipe, "--data", folder, "--out", tmp_path / "run", "--max-steps", "2")
    assert outcome.code == 0, outcome.err
    assert "resized" in outcome.err


def test_masked_lm_without_a_mask_token(refused: Callable[..., str], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat\n" * 50)
    flags = ("--set", "tokenizer.train.template=gpt")
    assert "mask token" in refused("--data", text, "--objective", "masked_lm", *flags)


def test_objectives_that_do_not_go_together(refused: Callable[..., str], table: Path) -> None:
    assert "masked_lm and next_sentence" in refused("--data", table, "--objective", "classification,regression")
    assert "generator" in refused("--data", table, "--objective", "replaced_token")
