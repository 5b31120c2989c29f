"""Heads on tokens over bodies of transformers: trained whole, by adapters, by a teacher; exported with equal logits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

import tformer
from tests.interop.tiny_folders import SENTENCES, WORDS
from tests.quick import first_is_quick
from tests.training.pair_makers import metrics
from tformer.checkpoint.resolve import resolve_checkpoint

Cli = Callable[..., Any]
QUICK = ("--batch-size", 8, "--lr", 0.01, "--precision", "fp32", "--device", "cpu", "--set", "training.log_every=4")
KINDS = {
    "token_classification": ("token_classifier", "TokenClassification"),
    "question_answering": ("span", "QuestionAnswering"),
}


def write_rows(objective: str, folder: Path) -> Path:
    """The place of a word in the vocabulary decides its tag; the answer to a word is the word behind it."""
    rows: list[dict[str, Any]] = []
    for line in SENTENCES:
        words = line.split()
        if objective == "token_classification":
            rows.append({"words": words, "tags": [("B-X", "O", "B-Y")[WORDS.index(word) % 3] for word in words]})
        else:
            start = len(words[0]) + 1
            answers = {"text": [words[1]], "answer_start": [start]}
            rows.append({"question": words[0], "context": line, "answers": answers})
    path = folder / f"{objective}.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.fixture
def tune(cli: Cli, folders: Path, tmp_path: Path) -> Callable[..., tuple[Path, str]]:
    """`tune(objective, ...)`: a short training over an imported body; (run, what it said)."""

    def run(objective: str, *words: object, steps: int = 24, name: str = "run") -> tuple[Path, str]:
        file, out = write_rows(objective, tmp_path), tmp_path / name
        given = ("--objective", objective, "--data", file, "--valid", file, "--out", out, "--max-steps", steps)
        outcome = cli("train", "--init-from", folders / "bert", *given, *QUICK, *words)
        assert outcome.code == 0, outcome.err
        return out, outcome.err

    return run


@pytest.mark.parametrize("objective", KINDS)
def test_a_tuned_body_is_exported_with_equal_logits(
    objective: str, tune: Callable[..., Any], cli: Cli, tmp_path: Path
) -> None:
    run, _ = tune(objective)
    found = [record["loss"] for record in metrics(run, "train")]
    assert found[-1] < found[0] - 0.01, found
    kind, task = KINDS[objective]
    outcome = cli("export", run, "--out", tmp_path / "folder")
    assert outcome.code == 0, outcome.err
    theirs = getattr(transformers, f"BertFor{task}").from_pretrained(tmp_path / "folder").eval()
    ids = torch.randint(5, theirs.config.vocab_size, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    with torch.no_grad():
        ours = tformer.load(run).model(input_ids=ids, attention_mask=mask).head(kind)
        output = theirs(input_ids=ids, attention_mask=mask)
    expected = (
        output.logits if kind == "token_classifier" else torch.stack([output.start_logits, output.end_logits], -1)
    )
    real = mask.bool()
    torch.testing.assert_close(ours[real], expected[real], atol=1e-5, rtol=0)
    if kind == "token_classifier":
        assert theirs.config.id2label == {0: "B-X", 1: "B-Y", 2: "O"}


@first_is_quick("objective", KINDS)
def test_adapters_are_trained_beside_a_whole_head(
    objective: str, tune: Callable[..., Any], cli: Cli, tmp_path: Path
) -> None:
    run, _ = tune(objective, "--lora", 4)
    found = [record["loss"] for record in metrics(run, "train")]
    assert found[-1] < found[0] - 0.01, found
    kind, data = KINDS[objective][0], tmp_path / f"{objective}.jsonl"

    def whole(trained: Path) -> set[str]:
        stored = load_file(resolve_checkpoint(str(trained), "latest") / "model.safetensors")
        assert any(".adapter." in name for name in stored)
        return {name for name in stored if ".adapter." not in name}

    head = {f"heads.{kind}.project.weight", f"heads.{kind}.project.bias"}
    assert whole(run) == head
    assert cli("merge", run, "--out", tmp_path / "merged").code == 0
    outcome = cli("export", run, "--to", "peft", "--out", tmp_path / "peft")
    assert outcome.code == 0, outcome.err
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert config["task_type"] == {"token_classifier": "TOKEN_CLS", "span": "QUESTION_ANS"}[kind]
    again = ("--data", data, "--valid", data, "--lora", 2, "--max-steps", 2, "--out", tmp_path / "again")
    outcome = cli("train", "--init-from", tmp_path / "merged", *again, *QUICK)
    assert outcome.code == 0 and whole(tmp_path / "again") == head, outcome.err
    one, two = (json.loads(cli("evaluate", each, "--data", data, "--json").out) for each in (run, tmp_path / "merged"))
    assert one["loss"] == pytest.approx(two["loss"], abs=1e-5) and one["accuracy"] == two["accuracy"]


@pytest.mark.parametrize("objective", KINDS)
def test_a_teacher_is_learned_from(objective: str, tune: Callable[..., Any]) -> None:
    teacher, _ = tune(objective, name="teacher", steps=8)
    run, _ = tune(objective, "--teacher", teacher, steps=8)
    assert any("distillation" in key or "soft" in key for record in metrics(run, "train") for key in record)
