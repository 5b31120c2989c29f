"""`train --pooling`: the vector that a classifier reads, chosen for encoders and for decoders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tformer
from tests.quick import first_is_quick
from tformer.nn.classification_heads import POOLINGS
from tformer.recipe import load_recipe
from tformer.support.errors import InputError

Cli = Callable[..., Any]
ANIMALS, TOOLS = ("cat", "dog", "cow", "hen"), ("saw", "axe", "nail", "file")
SIZES = ("model.d_model=16", "tokenizer.train.vocab_size=300", "training.threads=1")
SMALL = (
    *(word for text in SIZES for word in ("--set", text)),
    *("--batch-size", "8", "--max-steps", "40", "--precision", "fp32", "--device", "cpu"),
)


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "train.tsv"
    rows = [
        (label, a if a == b else f"{a} and the {b}")
        for label, words in (("animal", ANIMALS), ("tool", TOOLS))
        for a in words
        for b in words * 3
    ]
    path.write_text("\n".join("\t".join(row) for row in [("label", "text"), *rows]) + "\n")
    return path


def poolings(*args: Any, **options: Any) -> list[str]:
    heads = load_recipe(*args, **options).recipe.model.heads
    return [head.pooling for head in heads if hasattr(head, "pooling")]


@pytest.mark.parametrize("how", POOLINGS)
def test_the_flag_sets_the_pooling_of_the_head_for_labels(how: str) -> None:
    flags = {"model.heads.*.pooling": how}
    assert poolings(preset="bert/classify", flags=flags) == [how]
    given = {**flags, "objectives": [{"kind": "regression"}]}  # the head that an objective brings
    assert poolings(preset="bert/tiny", flags=given) == [how]


def test_set_goes_over_the_flag() -> None:
    flags, sets = {"model.heads.*.pooling": "max"}, ["model.heads.0.pooling=cls"]
    assert poolings(preset="bert/classify", flags=flags, sets=sets) == ["cls"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preset": "bert/classify", "flags": {"model.heads.*.pooling": "sum"}}, "--pooling: model.heads.0.pooling"),
        ({"preset": "gpt/tiny", "flags": {"model.heads.*.pooling": "mean"}}, "--pooling: found heads of kind lm"),
        (
            {
                "preset": "bart/tiny",
                "flags": {"objectives": [{"kind": "classification"}], "model.heads.*.pooling": "cls"},
            },
            "--pooling: model.heads.0.pooling: found cls, the first position, where model.decoder has read nothing",
        ),
    ],
)
def test_a_pooling_that_cannot_be_is_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        load_recipe(**options)
    assert message in caught.value.message and "\n" not in caught.value.message


@first_is_quick(
    ("flags", "how"),
    [
        (("--arch", "bert", "--preset", "classify", "--pooling", "max"), "max"),
        (("--arch", "bert", "--preset", "classify", "--pooling", "cls"), "cls"),
        (("--arch", "gpt", "--preset", "tiny", "--objective", "classification"), "eos"),
    ],
)
def test_a_classifier_learns_with_each_pooling(
    flags: tuple[str, ...], how: str, cli: Cli, labelled: Path, tmp_path: Path
) -> None:
    outcome = cli("train", *flags, "--data", labelled, "--valid", labelled, "--out", tmp_path / "run", *SMALL)
    assert outcome.code == 0, outcome.err
    [head] = tformer.load(tmp_path / "run").recipe.model.heads
    assert head.pooling == how  # type: ignore[union-attr]
    texts = ["cat", "saw and the axe", "dog and the hen"]
    together = cli("classify", tmp_path / "run", "--input", write(tmp_path, texts)).out.splitlines()
    assert [line.split("\t")[0] for line in together] == ["animal", "tool", "animal"]


def write(folder: Path, lines: list[str]) -> Path:
    path = folder / "lines.txt"
    path.write_text("\n".join(lines) + "\n")
    return path
