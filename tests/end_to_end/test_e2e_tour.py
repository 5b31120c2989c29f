"""The tutorials of the guide's first steps: every command and Python block of each tutorial runs as it is written.

The data sets are small ones of the same names and forms, and trainings are cut to two steps of a narrow model.
"""

from __future__ import annotations

import gzip
import os
import random
import re
import shlex
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "tformer" / "guide"
TOUR = (GUIDE / "first-steps.md").read_text().split("\n## Five tutorials\n")[1].split("\n## ")[0]
TITLES = ("Attention by hand", "Positions", "An encoder for sentiment", "A small GPT", "A translator")
TUTORIALS = dict(re.findall(r"^### \d\. (.*?)\n(.*?)(?=^### |\Z)", TOUR, re.M | re.S))
BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```", re.M | re.S)
WORDS = ["a", "dog", "runs", "two", "men", "sit", "on", "the", "beach", "film", "good", "long"]
SHORT = ["--max-steps", "2", "--batch-size", "8", "--set", "training.eval_every=2"]
SHORT += ["--set", "training.save_every=2", "--set", "training.precision=fp32"]
SIDES = {"transformer": ("encoder", "decoder"), "bert": ("encoder",), "gpt": ("decoder",)}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like $DATA with small sets."""
    home, draw = tmp_path_factory.mktemp("data"), random.Random(0)
    for name in ("tinyshakespeare", "sst2", "multi30k"):
        (home / name).mkdir()

    def lines(count: int) -> list[str]:
        return [" ".join(draw.choices(WORDS, k=8)) for _ in range(count)]

    for part in ("train", "val"):
        (home / "tinyshakespeare" / f"{part}.txt").write_text("\n".join(lines(400)) + "\n")
    table = "".join(f"{line}\t{number % 2}\n" for number, line in enumerate(lines(40)))
    with gzip.open(home / "sst2" / "train.tsv.gz", "wt") as file:
        file.write("sentence\tlabel\n" + table)
    (home / "sst2" / "valid.tsv").write_text("sentence\tlabel\n" + table)
    for side in ("en", "de"):
        with gzip.open(home / "multi30k" / f"train.{side}.gz", "wt") as file:
            file.write("\n".join(lines(60)) + "\n")
        (home / "multi30k" / f"val.{side}").write_text("\n".join(lines(10)) + "\n")
    return home


def shortened(words: list[str]) -> list[str]:
    """A training of two steps of a small model; other commands as they are."""
    if words[0] != "train":
        return words
    arch = words[words.index("--arch") + 1]
    sizes = {"model.d_model": 32, "model.max_seq_len": 64, "data.seq_len": 64}
    for side in SIDES[arch]:
        sizes |= {f"model.{side}.num_heads": 2, f"model.{side}.feedforward.d_ff": 32}
    if arch == "transformer":
        sizes |= {"training.valid_sentences": 4, "generation.max_new_tokens": 12}
    return [*words, *SHORT, *(word for key, value in sizes.items() for word in ("--set", f"{key}={value}"))]


def outputs(words: list[str]) -> list[Path]:
    return [Path(after) for word, after in pairwise(words) if word == "-o"]


def test_the_tour_has_five_tutorials_with_commands_a_picture_and_what_to_look_at() -> None:
    assert tuple(TUTORIALS) == TITLES
    for title, text in TUTORIALS.items():
        commands = [line for kind, block in BLOCK.findall(text) if kind == "bash" for line in block.splitlines()]
        assert 1 <= len(commands) <= 3 and all(line.startswith("tformer ") for line in commands), title
        assert "Look at" in text, title
        pictures = re.findall(r"!\[.+?\]\((.+?)\)", text)
        assert pictures, title
        for picture in pictures:
            assert 0 < (GUIDE / picture).stat().st_size < 120_000, picture


@pytest.mark.parametrize("title", TITLES)
def test_a_tutorial_runs_as_it_is_written(
    title: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Callable[..., Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DATA", str(data))
    for kind, block in BLOCK.findall(TUTORIALS[title]):
        if kind == "python":
            exec(compile(block, title, "exec"), {})
            continue
        for line in block.splitlines():
            words = shlex.split(os.path.expandvars(line))[1:]
            outcome = cli(*shortened(words))
            assert outcome.code == 0, f"{line}\n{outcome.err}"
            assert all(path.stat().st_size for path in outputs(words)), line
