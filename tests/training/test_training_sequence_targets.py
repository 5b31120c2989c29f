"""Translations of a teacher are kept under the weights that were loaded, whatever format they are cast to later."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tformer
from tests.training.pair_makers import english, german
from tformer.training import pair_material, sequence_targets
from tformer.training.sequence_targets import weights_digest

Cli = Callable[..., Any]


@pytest.fixture
def two_sets(tmp_path: Path) -> str:
    """`--set` of two sets of pairs to train on."""
    texts = english(60)
    for name, part in (("a", texts[:30]), ("b", texts[30:])):
        lines = [f"{text}\t{german(text)}" for text in part]
        (tmp_path / f"{name}.tsv").write_text("\n".join(["source\ttarget", *lines]) + "\n")
    return f"data.train=[{{path: {tmp_path / 'a.tsv'}}}, {{path: {tmp_path / 'b.tsv'}}}]"


def test_two_sets_share_one_digest_taken_before_the_cast_and_a_rerun_finds_both(
    train: Callable[..., Path], two_sets: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The teacher computes in bf16: had the second set a digest of cast weights, a rerun would translate it again."""
    monkeypatch.setenv("TFORMER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sequence_targets, "inference_dtype", lambda *_, **__: torch.bfloat16)
    taken: list[torch.dtype] = []

    def digest(model: Any) -> str:
        taken.append(next(model.encoder.parameters()).dtype)
        return weights_digest(model)

    monkeypatch.setattr(pair_material, "weights_digest", digest)
    teacher = train("--set", two_sets)

    def kept() -> dict[str, str]:
        return {file.name: file.read_text() for file in (tmp_path / "cache").glob("translations-*.jsonl")}

    flags = ("--set", two_sets, "--set", "data.overlong=truncate", "--teacher", teacher, "--distil", "sequence")
    train(*flags)
    first = kept()
    assert len(first) == 2 and all(first.values())
    monkeypatch.setattr(sequence_targets, "translator_of", None)  # nothing is translated again
    train(*flags)
    assert kept() == first and taken == [torch.float32] * 2


def test_a_cast_changes_the_digest_and_another_teacher_has_another(train: Callable[..., Path], two_sets: str) -> None:
    one, other = (tformer.load(train("--set", two_sets, "--seed", seed)).model for seed in (1, 2))
    found = weights_digest(one)
    assert found == weights_digest(one) != weights_digest(other)
    assert weights_digest(one.bfloat16()) != found
