"""A place that cannot be written is refused before any work: no pass of a model, no training of a tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tformer.model import Transformer
from tformer.support.errors import InputError
from tformer.tokenizer import train as tokenizer_training

TEXT = ("--text", "abc")
# What writes results after long work, without the place; RUN is the run, DATA a text.
COMMANDS: dict[str, tuple[str, ...]] = {
    "lens -o": ("lens", "RUN", *TEXT, "-o"),
    "attribute -o": ("attribute", "RUN", *TEXT, "-o"),
    "patch -o": ("patch", "RUN", "--clean", "abc", "--corrupted", "abd", "-o"),
    "heads -o": ("heads", "RUN", "-o"),
    "viz-attention -o": ("viz-attention", "RUN", *TEXT, "-o"),
    "viz-tokens -o": ("viz-tokens", "RUN", *TEXT, "-o"),
    "viz-embeddings -o": ("viz-embeddings", "RUN", "-o"),
    "viz-pe -o": ("viz-pe", "-o"),
    "inspect -o": ("inspect", "RUN", "--shapes", "-o"),
    "embed -o": ("embed", "RUN", *TEXT, "-o"),
    "generate --output": ("generate", "RUN", "--prompt", "abc", "--output"),
    "evaluate --predictions": ("evaluate", "RUN", "--data", "DATA", "--predictions"),
    "evaluate --mistakes": ("evaluate", "RUN", "--data", "DATA", "--mistakes"),
    "evaluate --plot": ("evaluate", "RUN", "--data", "DATA", "--plot"),
    "train --out": ("train", "--arch", "gpt", "--preset", "tiny", "--data", "DATA", "--max-steps", "1", "--out"),
    "train-tokenizer --out": ("train-tokenizer", "DATA", "--out"),
    "sweep --out": (
        "sweep",
        "--arch",
        "gpt",
        "--preset",
        "tiny",
        "--data",
        "DATA",
        "--vary",
        "optimizer.lr=1,2",
        "--out",
    ),
    "prune --out": ("prune", "RUN", "--data", "DATA", "--drop-heads", "1", "--out"),
    "export --out": ("export", "RUN", "--out"),
    "average --out": ("average", "RUN", "OTHER", "--out"),
}


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("work has begun")

    monkeypatch.setattr(Transformer, "forward", refuse)
    monkeypatch.setattr(tokenizer_training, "_train_model", refuse)


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("name", COMMANDS)
def test_a_place_that_cannot_be_written_is_refused_before_the_work(
    name: str, random_run: Path, make_run: Callable[..., Path], cli: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "a file").write_text("abc fed\n" * 40)
    other = str(make_run(seed=1)) if "OTHER" in COMMANDS[name] else ""
    words = {"RUN": str(random_run), "OTHER": other, "DATA": str(tmp_path / "a file")}
    suffix = {"--out": "", "-o": ".html", "--output": ".txt"}.get(name.split()[1], ".html")
    suffix = {"embed -o": ".npy", "evaluate --predictions": ".jsonl", "evaluate --mistakes": ".tsv"}.get(name, suffix)
    outcome = cli(*(words.get(word, word) for word in COMMANDS[name]), tmp_path / "a file" / f"out{suffix}")
    assert outcome.code in (2, 3) and "a file" in outcome.err and "work has begun" not in outcome.err


def test_a_tuned_lens_that_cannot_be_saved_is_not_trained(
    random_run: Path, cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tformer.inside import tuned

    def refuse(*_: Any, **__: Any) -> None:
        raise InputError("it was trained first")

    monkeypatch.setattr(tuned, "fit", refuse)
    (tmp_path / "text.txt").write_text("abc fed\n" * 400)
    place = random_run / "tuned-lens-step-00000003.safetensors"
    place.mkdir()
    try:
        outcome = cli("lens", random_run, *TEXT, "--tuned", tmp_path / "text.txt", "-o", tmp_path / "lens.html")
    finally:
        place.rmdir()
    assert outcome.code == 2 and f"--tuned '{place}' is a directory" in outcome.err
