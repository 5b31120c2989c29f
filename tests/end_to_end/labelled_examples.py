"""Small labelled data that a tiny model learns: texts have words of their label alone, images its brightness."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

WORDS = {
    "animal": ("cat", "dog", "cow", "hen", "fox", "owl"),
    "tool": ("saw", "axe", "nail", "drill", "file", "hammer"),
}


def sentences(count: int, seed: int) -> list[tuple[str, str]]:
    """(label, text): a text has words of its label alone."""
    draw = random.Random(seed)
    labels = [draw.choice(sorted(WORDS)) for _ in range(count)]
    return [(label, "the " + " and the ".join(draw.choices(WORDS[label], k=draw.randint(1, 5)))) for label in labels]


def write_table(path: Path, header: tuple[str, ...], rows: list[tuple[object, ...]]) -> Path:
    path.write_text("".join("\t".join(map(str, row)) + "\n" for row in [header, *rows]), encoding="utf-8")
    return path


def write_images(folder: Path, count: int) -> Path:
    draw = np.random.default_rng(0)
    for name, level in (("dark", 40), ("light", 200)):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            pixels = np.clip(draw.normal(level, 10, (8, 8)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")
    return folder


def pairs(count: int) -> list[tuple[object, ...]]:
    """Do the two texts speak of the same kind of thing?"""
    both = zip(sentences(count, 1), sentences(count, 2), strict=True)
    return [("same" if label == other else "other", text, text2) for (label, text), (other, text2) in both]


def many(count: int) -> list[tuple[object, ...]]:
    both = zip(sentences(count, 4), sentences(count, 5), strict=True)
    return [("|".join(sorted({label, other})), f"{text} with {text2}") for (label, text), (other, text2) in both]


def documents(folder: Path) -> Path:
    folder.mkdir()
    for number in range(12):
        lines = (f"{text} ." for _, text in sentences(20, number))
        (folder / f"{number}.txt").write_text("\n".join(lines))
    return folder


def build_run(folder: Path, recipe: str, files: Mapping[str, str]) -> Path:
    """A run of this recipe, trained on the first of the files, which lie beside it."""
    from tformer.cli.app import main

    for name, text in {"recipe.yaml": recipe, **files}.items():
        (folder / name).write_text(text)
    words = ["train", "--config", folder / "recipe.yaml", "--data", folder / next(iter(files)), "--out", folder / "run"]
    with pytest.raises(SystemExit) as end:
        main([str(word) for word in words])
    assert end.value.code == 0
    return folder / "run"


def check_refusal(cli: Callable[..., Any], run: Path, words: str, message: str, files: Mapping[str, str]) -> None:
    """`words`, with the run for RUN, end with the parts of `message`, and without a folder `o`.

    The files, and those beside the run, lie in the working folder.
    """
    for name, text in {**{place.name: place.read_text() for place in run.parent.glob("*.*")}, **files}.items():
        Path(name).write_text(text)
    outcome = cli(*(str(run) if word == "RUN" else word for word in words.split()))
    assert outcome.code == 2 and not Path("o").exists(), outcome.err
    place = 0
    for part in message.split(" ... "):
        place = outcome.err.find(part, place)
        assert place >= 0, outcome.err
