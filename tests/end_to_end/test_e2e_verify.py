"""`inspect --verify` knows everything that a checkpoint may hold: whatever a command wrote has no problem."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.conftest import split
from tformer.checkpoint.read import read_checkpoint
from tformer.checkpoint.resolve import resolve_checkpoint

Cli = Callable[..., Any]
TRAIN = ("train", "--data", "text.txt", "--max-steps", 4)
LORA = (*TRAIN, "--init-from", "gpt", "--lora", 2, "--lr", 0.05, "--precision", "fp32")
GPT = {"gpt": (*TRAIN, "--config", "tiny.yaml", "--set", "training.ema_decay=0.9", "--set", "training.save_every=2")}
LONE = {"lora": (*LORA, "--out", "lora")}
ROWS = ("train", "--data", "rows.tsv", "--max-steps", 2, "--precision", "fp32")
SIDES = ("train", "--source", "source.txt", "--target", "target.txt", "--max-steps", 2, "--arch", "transformer",
         "--preset", "tiny", "--set", "model.d_model=16", "--set", "training.valid_beam_size=1", "--batch-size", 4,
         "--set", "tokenizer.separate=true", "--set", "model.tie.source_target=false")  # fmt: skip


def lora(*sets: str) -> dict[str, tuple[object, ...]]:
    return GPT | {"new": (*LORA, *(word for each in sets for word in ("--set", each)))}


FEATURES: dict[str, dict[str, tuple[object, ...]]] = {
    "averaged weights": {"new": GPT["gpt"]},
    "adapters": lora(),
    "adapters beside int8": lora("lora.weights=int8"),
    "DoRA of some, norms in full": lora("lora.dora=true", "lora.targets=[q,v]", "lora.train=[final_norm.*]"),
    "adapters, their average": lora("training.ema_decay=0.9"),
    "adapters, the tied table in full": lora("lora.train=[embedding.weight]"),
    "adapters and a head that the base lacks": GPT | {"new": (*ROWS, "--init-from", "gpt", "--lora", 2)},
    "student": GPT | {"new": (*TRAIN, "--config", "tiny.yaml", "--teacher", "gpt")},
    "two vocabularies": {"new": SIDES},
    "merged": GPT | LONE | {"new": ("merge", "lora")},
    "average": GPT | {"new": ("average", "--last", 2, "gpt")},
    "pruned": GPT | {"new": ("prune", "gpt", "--drop-heads", 0.5, "--no-evaluate")},
    "exported": GPT | {"new": ("export", "gpt")},
    "imported": GPT | {"hf": ("export", "gpt", "--out", "hf"), "new": ("import", "hf")},
    "imported adapters": GPT | {"hf": ("export", "gpt", "--out", "hf"), "imported": ("import", "hf", "--out", "base"),
                                "lora": (*TRAIN, "--init-from", "base", "--lora", 2, "--out", "lora"),
                                "peft": ("export", "lora", "--to", "peft", "--out", "peft"),
                                "new": ("import", "peft", "--base", "base")},
}  # fmt: skip
QUICK = ("averaged weights", "adapters", "imported adapters")


def problems(cli: Cli, path: object) -> list[str]:
    outcome = cli("inspect", path, "--verify", "--json")
    found = [problem for verdict in json.loads(outcome.out) for problem in verdict["problems"]]
    assert outcome.code == (2 if found else 0) and all(verdict["tensors"] for verdict in json.loads(outcome.out))
    return found


@pytest.fixture
def here(tmp_path: Path, text_file: Path, tiny_recipe: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    lines = text_file.read_text().splitlines()
    rows = [f"{'good' if number % 2 else 'bad'}\t{line}" for number, line in enumerate(lines[:60])]
    Path("rows.tsv").write_text("label\ttext\n" + "\n".join(rows) + "\n")
    Path("source.txt").write_text("\n".join(lines[:60]) + "\n")
    Path("target.txt").write_text("\n".join(line.upper() for line in lines[:60]) + "\n")
    return tmp_path


@pytest.mark.parametrize("feature", [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in FEATURES
])  # fmt: skip
def test_what_commands_write_has_no_problem(feature: str, here: Path, cli: Cli) -> None:
    for name, words in FEATURES[feature].items():
        outcome = cli(*words, *(() if "--out" in words else ("--out", name)))
        assert outcome.code == 0, (words, outcome.err)
    assert problems(cli, "new") == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["single", "image", "electra"])
def test_labels_images_and_a_generator_have_no_problem(kind: str, encoder_run: Cli, cli: Cli) -> None:
    assert problems(cli, encoder_run(kind)) == []


@pytest.mark.parametrize("lost", [None, "decoder.blocks.1.self_attention.qkv.adapter.b"])
def test_adapters_in_several_weight_files_have_no_problem_unless_one_is_missing(
    lost: str | None, here: Path, cli: Cli
) -> None:
    for name, words in (GPT | LONE).items():
        assert cli(*words, *(() if "--out" in words else ("--out", name))).code == 0
    step = resolve_checkpoint("lora", "latest")
    split(step, "weights", {name: each for name, each in read_checkpoint(step).weights().items() if name != lost})
    found = problems(cli, step)
    assert found == ([] if lost is None else [f"weights and recipe disagree: missing {lost}"])
