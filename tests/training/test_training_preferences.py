"""`train --objective dpo` and `evaluate`: preferences from rows to rewards, as a user runs them."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import tformer
from tests.quick import first_is_quick
from tformer.checkpoint.resolve import resolve_checkpoint
from tformer.cli.app import main

Cli = Callable[..., Any]
RECIPE = """\
arch: gpt
tokenizer: {train: {model: char, template: gpt}}
model:
  d_model: 32
  max_seq_len: 32
  decoder: {num_layers: 1, num_heads: 2, feedforward: {d_ff: 64}, dropout: 0.1}
data: {packing: none}
optimizer: {lr: 0.01}
schedule: {kind: constant, warmup_steps: 0}
training: {max_steps: 150, batch_size: 16, eval_every: 150, save_every: 150, log_every: 50, precision: fp32,
           device: cpu, threads: 1, sample_every: 0}
generation: {max_new_tokens: 12, temperature: 0}
"""
WORDS = ["the", "cat", "sat", "on", "mat", "and", "saw", "dog"]
DPO = ("--init-from", "base", "--lora", 4, "--objective", "dpo", "--lr", 0.005, "--max-steps", 20, "--batch-size", 8,
       *("--set", "training.log_every=5", "--set", "training.eval_every=10"))  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with preferences for lower case, and a run `base` that writes either case after a prompt."""
    folder, draw = tmp_path_factory.mktemp("dpo"), random.Random(0)

    def some() -> str:
        return " ".join(draw.choices(WORDS, k=2))

    texts = [(some(), some()) for _ in range(200)]
    lines = [json.dumps({"text": f"{a}:{b if n % 2 else b.upper()}"}) + "\n" for n, (a, b) in enumerate(texts)]
    (folder / "text.jsonl").write_text("".join(lines))
    rows = [{"prompt": f"{a}:", "chosen": b, "rejected": b.upper()} for a, b in texts[:60]]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "recipe.yaml").write_text(RECIPE)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setenv("TFORMER_CACHE", str(folder / "cache"))
        patch.chdir(folder)
        main(["train", "--config", "recipe.yaml", "--data", "text.jsonl", "--out", "base"])
    assert ended.value.code == 0
    return folder


@pytest.fixture(autouse=True)
def folder(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(made, tmp_path / "run")
    monkeypatch.chdir(tmp_path / "run")
    return tmp_path / "run"


def succeed(cli: Cli, *words: object) -> Any:
    outcome = cli(*words)
    assert outcome.code == 0, outcome.err
    return outcome


def train(cli: Cli, out: str, *more: object) -> Any:
    return succeed(cli, "train", *DPO, "--data", "rows.jsonl", "--out", out, *more)


def metrics(run: str, split: str) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if record["split"] == split]


def stored(run: str) -> dict[str, torch.Tensor]:
    return load_file(resolve_checkpoint(run, "latest") / "model.safetensors")


def test_the_margin_grows_and_answers_are_as_preferred(cli: Cli) -> None:
    outcome = train(cli, "run", "--precision", "fp32")
    assert "margin" in outcome.err and "accuracy 1.0000" in outcome.err
    logged, (*_, valid) = metrics("run", "train"), metrics("run", "valid")
    names = ("accuracy", "margin", "chosen_reward", "rejected_reward")
    assert all(name in record for record in (*logged, valid) for name in names)
    assert logged[-1]["margin"] > logged[0]["margin"] + 1 and logged[-1]["loss"] < logged[0]["loss"]
    assert valid["accuracy"] == 1.0 and valid["margin"] > 1.0
    assert valid["margin"] == pytest.approx(valid["chosen_reward"] - valid["rejected_reward"], rel=1e-5)
    report = json.loads(succeed(cli, "evaluate", "run", "--checkpoint", "latest", "--json").out)
    for name in ("loss", *names):
        assert report[name] == pytest.approx(valid[name], abs=1e-4), name
    assert report["examples"] == 6
    written = succeed(cli, "generate", "run", "--prompt", "the cat:").out.strip()
    assert written == written.lower() != ""
    assert tformer.load("run").evaluate([("the cat:", "the dog", "THE DOG")])["accuracy"] == 1.0


def test_a_resumed_training_is_the_uninterrupted_one_to_the_bit(cli: Cli) -> None:
    train(cli, "whole")
    train(cli, "parts", "--stop-at-step", 10)
    succeed(cli, "train", "--resume", "--out", "parts")
    one, two = stored("whole"), stored("parts")
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    assert metrics("whole", "valid")[-1] == metrics("parts", "valid")[-1]


@first_is_quick("more", [
    ("--grad-accum", 2, "--batch-size", 4), ("--set", "data.pad_to=max"), ("--set", "data.padding=random"),
])  # fmt: skip
def test_neither_padding_nor_accumulation_changes_the_training(more: tuple[object, ...], cli: Cli) -> None:
    sets = ("--set", "optimizer.eps=1e-4", "--max-steps", 5, "--precision", "fp32")
    train(cli, "one", *sets)
    train(cli, "two", *sets, *more)
    one, two = stored("one"), stored("two")
    assert max(float((one[name] - two[name]).abs().max()) for name in one) < 1e-4


@pytest.mark.slow
def test_several_processes_train_the_adapters_of_one(cli: Cli) -> None:
    sets = ("--set", "optimizer.eps=1e-4", "--max-steps", 5, "--batch-size", 7, "--precision", "fp32")
    train(cli, "one", *sets)
    train(cli, "two", *sets, "--devices", 2)
    one, two = stored("one"), stored("two")
    assert max(float((one[name] - two[name]).abs().max()) for name in one) < 1e-4
    valid, other = (metrics(run, "valid")[-1] for run in ("one", "two"))
    assert valid["margin"] == pytest.approx(other["margin"], abs=1e-4)


@first_is_quick("more", [
    ("--lora-weights", "int8"), ("--set", "lora.dora=true"), ("--set", "training.ema_decay=0.9"),
    ("--set", "objectives.0.loss=ipo"), ("--set", "objectives.0.label_smoothing=0.1"),
])  # fmt: skip
def test_validation_agrees_with_evaluate_for_every_kind_of_base_and_loss(more: tuple[object, ...], cli: Cli) -> None:
    train(cli, "run", "--precision", "fp32", *more)
    valid = metrics("run", "valid")[-1]
    report = json.loads(succeed(cli, "evaluate", "run", "--checkpoint", "latest", "--json").out)
    for name in ("loss", "margin", "chosen_reward", "rejected_reward"):
        assert report[name] == pytest.approx(valid[name], rel=1e-4, abs=1e-4), name


def test_conversations_are_learned_in_the_chat_template(cli: Cli) -> None:
    rows = [json.loads(line) for line in Path("rows.jsonl").read_text().splitlines()]
    chats = []
    for row in rows:
        sides = {key: [{"role": "assistant", "content": row[key]}] for key in ("chosen", "rejected")}
        chats.append({"prompt": row["prompt"], **sides})
    Path("chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats))
    succeed(cli, "train", *DPO, "--data", "chats.jsonl", "--out", "run")
    logged = metrics("run", "train")
    assert logged[-1]["margin"] > logged[0]["margin"]
    assert json.loads(succeed(cli, "evaluate", "run", "--json").out)["accuracy"] > 0.5
    succeed(cli, "generate", "run", "--chat", "--prompt", "the cat:")
    assert "chosen" in succeed(cli, "train", *DPO, "--data", "chats.jsonl", "--dry-run").err


def test_a_merged_run_writes_the_same_and_has_no_base_to_compare_with(cli: Cli) -> None:
    train(cli, "run")
    succeed(cli, "merge", "run", "--out", "merged")
    one, two = (succeed(cli, "generate", name, "--prompt", "the cat:").out for name in ("run", "merged"))
    assert one == two
    outcome = cli("evaluate", "merged", "--data", "rows.jsonl")
    assert outcome.code == 2 and "has no adapters, so there is no base to compare it with" in outcome.err
    assert "before tformer merge" in outcome.err


MISTAKES: dict[str, tuple[tuple[object, ...], str]] = {
    "no adapters": (
        ("--init-from", "base", "--objective", "dpo", "--data", "rows.jsonl"),
        "dpo compares the model with the frozen base of its adapters, found no adapters",
    ),
    "no model": (
        ("--config", "recipe.yaml", "--objective", "dpo", "--data", "rows.jsonl"),
        "dpo compares the model with the frozen base of its adapters, found no adapters",
    ),
    "no data": (DPO, "dpo has no built-in data"),
    "beta": ((*DPO, "--data", "rows.jsonl", "--set", "objectives.0.beta=0"), "beta: must be greater than 0, found 0"),
    "loss": ((*DPO, "--data", "rows.jsonl", "--set", "objectives.0.loss=kto"), "objectives.0.loss"),
    "smoothing": (
        (*DPO, "--data", "rows.jsonl", "--set", "objectives.0.loss=hinge", "--set", "objectives.0.label_smoothing=0.1"),
        "label_smoothing: found 0.1, expected 0 with the loss hinge",
    ),
    "trained in full": (
        (*DPO, "--data", "rows.jsonl", "--set", "lora.train=[final_norm.*]"),
        "lora.train: found ['final_norm.*'], expected [] with dpo",
    ),
    "dropout": ((*DPO, "--data", "rows.jsonl", "--set", "lora.dropout=0.1"), "lora.dropout: found 0.1, expected 0"),
    "long": ((*DPO, "--data", "rows.jsonl", "--set", "data.seq_len=4"), "none of 60 preferences is left"),
    "few": ((*DPO, "--data", "one.jsonl"), "one.jsonl: 1 example is too few to hold one out"),
    "table": ((*DPO, "--data", "rows.tsv"), "read from .jsonl and .parquet files"),
    "key": ((*DPO, "--data", "wrong.jsonl"), "wrong.jsonl:2: no key 'rejected', found prompt, chosen"),
    "metric": ((*DPO, "--data", "rows.jsonl", "--best-metric", "bleu"), "expected a metric of the objectives"),
    "teacher": ((*DPO, "--data", "rows.jsonl", "--teacher", "base"), "dpo, which has no soft targets"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_one_clear_line(case: str, cli: Cli) -> None:
    row = {"prompt": "a", "chosen": "the", "rejected": "THE"}
    Path("one.jsonl").write_text(json.dumps(row) + "\n")
    Path("wrong.jsonl").write_text(json.dumps(row) + "\n" + json.dumps({"prompt": "a", "chosen": "b"}) + "\n")
    Path("rows.tsv").write_text("prompt\tchosen\trejected\na\tb\tc\n")
    words, message = MISTAKES[case]
    outcome = cli("train", *words, "--out", "run")
    assert outcome.code == 2 and message in outcome.err, outcome.err
    assert not Path("run").exists() and "Traceback" not in outcome.err


def test_an_encoder_has_no_answers_to_prefer(cli: Cli) -> None:
    recipe = RECIPE.replace("gpt", "bert").replace("decoder:", "encoder:").replace("max_steps: 150", "max_steps: 1")
    Path("bert.yaml").write_text(recipe)
    succeed(
        cli, "train", "--config", "bert.yaml", "--objective", "masked_lm", "--data", "text.jsonl", "--out", "encoder"
    )
    words = ["encoder" if word == "base" else word for word in DPO]
    outcome = cli("train", *words, "--data", "rows.jsonl", "--out", "run")
    assert outcome.code == 2 and "dpo needs model.decoder, found null" in outcome.err


def test_a_base_that_writes_no_text_is_refused(cli: Cli) -> None:
    Path("labelled.tsv").write_text("text\tlabel\n" + "the cat\tx\nTHE CAT\ty\n" * 20)
    untied = ("--set", "model.tie.output=false", "--set", "training.max_steps=1", "--objective", "classification")
    succeed(cli, "train", "--config", "recipe.yaml", *untied, "--data", "labelled.tsv", "--out", "classifier")
    words = ["classifier" if word == "base" else word for word in DPO]
    outcome = cli("train", *words, "--data", "rows.jsonl", "--out", "run")
    assert outcome.code == 2 and "dpo compares with the base, which has no heads.lm.weight" in outcome.err
    assert "--objective causal_lm first" in outcome.err and not Path("run").exists()


def test_rows_that_cannot_be_used_are_left_out_where_that_is_wanted(cli: Cli) -> None:
    with Path("rows.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": "a", "chosen": "b", "rejected": "b"}) + "\n")
    outcome = train(cli, "run", "--bad-rows", "drop", "--max-steps", 1)
    assert "1 rows left out" in outcome.err
    assert "are equal" in Path("run/bad-rows.jsonl").read_text()
