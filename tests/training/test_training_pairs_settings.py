"""Runs of pairs: what decodes at a validation is settled before training, and is what `evaluate` decodes with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.training.pair_makers import RECIPE, english, german, metrics, sides

Cli = Callable[..., Any]

GROUPS = ("--set", "generation.beam_size=4", "--set", "generation.beam_groups=2",
          "--set", "generation.diversity_penalty=0.5")  # fmt: skip
SHORT = ("--max-steps", 2, "--set", "training.eval_every=2")


@pytest.mark.parametrize("size", [1, 3, 4])
def test_groups_of_the_recipes_beam_give_way_to_the_beam_of_a_validation(
    train: Callable[..., Path], aligned: tuple[Path, Path], size: int
) -> None:
    run = train(*sides(aligned), *GROUPS, *SHORT, "--set", f"training.valid_beam_size={size}")
    assert "bleu" in metrics(run)[-1] and " -> " in (run / "samples.txt").read_text()


WRONG = {
    "generation.min_new_tokens=300": "generation.min_new_tokens 300 is larger than generation.max_new_tokens 200",
    "generation.beam_groups=2": "generation.beam_size 3 cannot be divided into 2 groups",
    "generation.diversity_penalty=0.5": "generation.diversity_penalty 0.5 has nothing to act on",
    "generation.length_penalty=99.0": "generation.length_penalty must be between -10 and 10",
    "training.valid_beam_size=99": "training.valid_beam_size: found 99, expected at most the target's",
    "generation.beam_size=99": "generation.beam_size: found 99, expected at most the target's",
    "training.valid_beam_size=0": "training.best_metric: found 'bleu', expected accuracy, loss",
    "data.target_seq_len=33": "data.target_seq_len: found 33, expected at most model.max_seq_len (32)",
    "tokenizer.special_ids.forced_bos=999": "tokenizer.special_ids.forced_bos: found 999, expected an id of the",
    "tokenizer.special_ids.decoder_start=99": "tokenizer.special_ids.decoder_start: found 99",
    "tokenizer.special_ids.eos=99": "tokenizer.special_ids.eos: found 99",
}


@pytest.mark.parametrize(("text", "told"), WRONG.items(), ids=WRONG)
def test_a_wrong_setting_is_told_with_its_key_before_training(
    cli: Cli, recipe: Path, aligned: tuple[Path, Path], tmp_path: Path, text: str, told: str
) -> None:
    out = tmp_path / "run"
    outcome = cli("train", "--config", recipe, *sides(aligned), "--out", out, "--set", text)
    assert outcome.code == 2 and told in outcome.err.replace("\n", " "), outcome.err
    assert "--min-new" not in outcome.err and not out.exists()


def test_evaluate_says_what_the_validation_said(
    train: Callable[..., Path], aligned: tuple[Path, Path], cli: Cli, tmp_path: Path
) -> None:
    """Sources longer than in training, a beam, and a coverage penalty: one translator for both."""
    texts = [" ".join(english(20)[n : n + 3]) for n in range(12)]
    (tmp_path / "v.en").write_text("\n".join(texts) + "\n")
    (tmp_path / "v.de").write_text("\n".join(map(german, texts)) + "\n")
    run = train(*sides(aligned), "--valid-source", tmp_path / "v.en", "--valid-target", tmp_path / "v.de",
                "--set", "data.seq_len=8", "--set", "training.valid_beam_size=3",
                "--set", "generation.max_new_tokens=12", "--set", "generation.coverage_penalty=0.5")  # fmt: skip
    outcome = cli("evaluate", run, "--checkpoint", "latest", "--json")
    found, validated = json.loads(outcome.out), metrics(run)[-1]
    for name in ("loss", "accuracy", "bleu", "chrf", "sequence_accuracy"):
        assert found[name] == pytest.approx(validated[name], abs=1e-4), name


def test_several_tasks_are_measured_one_by_one(train: Callable[..., Path], tmp_path: Path, cli: Cli) -> None:
    table = tmp_path / "pairs.tsv"
    table.write_text("\n".join(f"{text}\t{german(text)}" for text in english(40)) + "\n")
    spell = tmp_path / "spell.tsv"
    spell.write_text("\n".join(f"{text}\t{text}" for text in english(60)[20:]) + "\n")
    config = tmp_path / "tasks.yaml"
    data = (
        f'data: {{train: [{{path: {table}, task: translate, prefix: "to german "}}, '
        f'{{path: {spell}, task: copy, prefix: "copy "}}]}}'
    )
    config.write_text(RECIPE.replace("data: {sort_window: 64}", data))
    run = train("--config", config, "--set", "training.valid_sentences=4", *SHORT, base=False)
    found = metrics(run)[-1]
    assert {"loss.translate", "loss.copy", "bleu.translate", "bleu.copy"} <= found.keys()
    low, high = sorted((found["loss.translate"], found["loss.copy"]))
    assert low <= found["loss"] <= high
    lines = cli("evaluate", run, "--checkpoint", "latest").out.splitlines()
    named = dict(line.split()[:2] for line in lines)
    assert float(named["loss.copy"]) == pytest.approx(found["loss.copy"], abs=1e-3)
    assert {"loss.translate", "bleu.translate", "bleu.copy"} <= named.keys()


def test_one_task_is_not_measured_twice(train: Callable[..., Path], aligned: tuple[Path, Path]) -> None:
    assert not [name for name in metrics(train(*sides(aligned), *SHORT))[-1] if "." in name]
