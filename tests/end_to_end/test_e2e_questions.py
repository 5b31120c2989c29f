"""Questions with a context as a user trains, measures and asks them; wrong inputs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tformer
from tests.end_to_end.labelled_examples import build_run, check_refusal, sentences

Cli = Callable[..., Any]

RECIPE = """\
arch: bert
tokenizer: {train: {model: word, template: bert, vocab_size: 200, min_frequency: 1}}
model:
  d_model: 16
  max_seq_len: 32
  embedding: {token_types: 2}
  encoder: {num_layers: 1, num_heads: 2, feedforward: {d_ff: 32}}
  heads: [{kind: span}]
objectives: [{kind: question_answering, stride: 8}]
optimizer: {lr: 0.02}
training: {max_steps: 120, batch_size: 16, eval_every: 120, save_every: 120, log_every: 120, best_metric: f1,
           precision: fp32, device: cpu, threads: 1}
"""
PLACES = ("London", "Paris", "Oslo")


def squad(count: int, seed: int, *, may_lack: bool = True) -> str:
    """Contexts of which most name one place, which is the answer; the others have none."""
    rng, paragraphs = np.random.default_rng(seed), []
    words = [text for _, text in sentences(count * 6, seed)]
    for number in range(count):
        parts = words[6 * number : 6 * number + 6]
        lacks = may_lack and number % 4 == 0
        place = str(rng.choice(PLACES))
        if not lacks:
            parts.insert(int(rng.integers(0, 6)), f"in {place}")
        context = " ".join(parts)
        answers = [] if lacks else [{"text": place, "answer_start": context.index(place)}]
        entry = {"id": str(number), "question": "where was it ?", "answers": answers, "is_impossible": lacks}
        paragraphs.append({"context": context, "qas": [entry]})
    return json.dumps({"version": "v2.0", "data": [{"title": "a", "paragraphs": paragraphs}]})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_run(
        tmp_path_factory.mktemp("questions"), RECIPE, {"train.json": squad(80, 1), "test.json": squad(20, 2)}
    )


def test_the_answer_is_printed_with_its_probability(cli: Cli, run: Path) -> None:
    context = "the owl and the fox in Oslo and the saw"
    outcome = cli("classify", run, "--text", "where was it ?", "--text2", context)
    assert outcome.code == 0, outcome.err
    text, probability = outcome.out.rstrip("\n").split("\t")
    assert text == "Oslo" and 0 < float(probability) <= 1
    document = json.loads(cli("classify", run, "--text", "where was it ?", "--text2", context, "--json").out)
    [span] = document["spans"]
    assert context[span["start"] : span["end"]] == "Oslo" and span["label"] == "answer"


def test_no_answer_is_an_empty_one(cli: Cli, run: Path) -> None:
    outcome = cli("classify", run, "--text", "where was it ?", "--text2", "the owl and the fox and the saw")
    assert outcome.code == 0 and outcome.out.startswith("\t"), outcome.out


def test_an_answer_is_found_in_any_window_of_a_long_context(cli: Cli, run: Path) -> None:
    filler = " ".join(text for _, text in sentences(30, 5))
    for context in (f"in Oslo {filler}", f"{filler} in Oslo", f"{filler} in Oslo {filler}"):
        outcome = cli("classify", run, "--text", "where was it ?", "--text2", context)
        assert outcome.code == 0 and outcome.out.startswith("Oslo\t"), outcome.out


def test_a_table_of_questions_comes_back_with_answers(cli: Cli, run: Path, tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("question,context\nwhere was it ?,the owl in Oslo\n")
    words = ["--input", tmp_path / "in.csv", "--text-column", "question", "--text2-column", "context"]
    outcome = cli("classify", run, *words, "--output", tmp_path / "out.jsonl")
    assert outcome.code == 0, outcome.err
    row = json.loads((tmp_path / "out.jsonl").read_text())
    assert row["answer"] == "Oslo" and 0 < row["probability"] <= 1


def test_python_gives_the_answer(run: Path) -> None:
    [span] = tformer.load(run).classify(("where was it ?", "the owl in Oslo")).spans
    assert span["text"] == "Oslo"


def test_the_report_has_the_figures_of_squad(cli: Cli, run: Path) -> None:
    words = ["evaluate", run, "--data", run.parent / "test.json"]
    outcome = cli(*words)
    assert outcome.code == 0 and "exact_match " in outcome.out and "unanswerable_f1 " in outcome.out, outcome.err
    report = json.loads(cli(*words, "--json").out)
    assert report["questions"] == 20 and report["examples"] > 20
    parts = (15 * report["answerable_f1"] + 5 * report["unanswerable_f1"]) / 20
    assert report["f1"] == pytest.approx(parts) and report["exact_match"] >= 80
    own = json.loads(cli("evaluate", run, "--json").out)
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert own["f1"] == pytest.approx(max(line["f1"] for line in logged if line.get("split") == "valid"))


def test_the_figures_do_not_depend_on_the_batch(cli: Cli, run: Path) -> None:
    words = ["evaluate", run, "--data", run.parent / "test.json", "--json", "--batch-size"]
    one, other = (json.loads(cli(*words, size).out) for size in (1, 7))
    assert one["loss"] == pytest.approx(other["loss"], abs=1e-5) and one["f1"] == other["f1"]


def test_validations_may_read_a_share(cli: Cli, run: Path, tmp_path: Path) -> None:
    words = ["--config", run.parent / "recipe.yaml", "--data", run.parent / "train.json", "--max-steps", 2]
    outcome = cli("train", *words, "--set", "training.valid_share=0.5", "--out", tmp_path / "run")
    assert outcome.code == 0, outcome.err


def test_the_first_example_is_shown_with_its_labels(cli: Cli, run: Path) -> None:
    words = ["--config", run.parent / "recipe.yaml", "--data", run.parent / "train.json"]
    outcome = cli("train", *words, "--dry-run")
    assert outcome.code == 0 and "question_answering: predicts where the answer starts" in outcome.err, outcome.err


def test_data_without_unanswerable_questions_always_gives_an_answer(cli: Cli, run: Path, tmp_path: Path) -> None:
    (tmp_path / "v1.json").write_text(squad(40, 3, may_lack=False))
    words = ["train", "--init-from", run, "--data", tmp_path / "v1.json", "--max-steps", 1, "--out", tmp_path / "run"]
    outcome = cli(*words, "--set", "objectives.0.unanswerable=null")
    assert outcome.code == 0, outcome.err
    outcome = cli("classify", tmp_path / "run", "--text", "where was it ?", "--text2", "the owl and the fox")
    assert outcome.code == 0 and not outcome.out.startswith("\t"), outcome.out


WRONG = [
    ("classify RUN --text a", "was trained on pairs of texts, found a single text"),
    ("classify RUN --text a --text2 b --top-k 2", "--top-k: ... gives spans of the text, not one label"),
    ("classify RUN --text a --text2 b --threshold 0.5", "--threshold: ... gives spans of the text, not one label"),
    ("classify RUN --input lines.txt", "lines.txt:1: expected two texts with a tab between them, found 1"),
    ("classify RUN --image x.png", "classifies texts, not images"),
    ("evaluate RUN --data test.json --mistakes m.tsv", "has no meaning here: ... is a model of questions and contexts"),
    ("evaluate RUN --data test.json --label-column a", "has no meaning here"),
    ("evaluate RUN --data lines.txt", "lines.txt: not JSON"),
    ("evaluate RUN --data test.json --by position", "predicts no tokens"),
    ("evaluate RUN --data test.json --plot p.html", "--plot draws the decisions of a classifier"),
    ("train --config recipe.yaml --out o", "questions need data: there is no built-in source"),
    ("train --config recipe.yaml --out o --data builtin:dates", "no such file"),
    ("train --config recipe.yaml --out o --data test.json --set objectives.0.stride=-1", "stride: must be at least 0"),
    ("train --config recipe.yaml --out o --data test.json --set objectives.0.max_answer=0", "must be at least 1"),
    ("train --config recipe.yaml --out o --data test.json --set data.seq_len=4", "leave no room for two texts"),
    ("train --config recipe.yaml --out o --data none.json", "no question of the training data has an answer"),
    ("train --config recipe.yaml --out o --data one.json", "all examples are of one group"),
    ("train --config recipe.yaml --out o --data test.json --best-metric mcc", "found 'mcc', expected a metric of"),
    ("train --arch gpt --objective question_answering --out o --data test.json", "needs model.encoder, found null"),
]


@pytest.mark.parametrize(("words", "message"), WRONG)
def test_wrong_uses_are_one_line(
    cli: Cli, run: Path, tmp_path: Path, monkeypatch: Any, words: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    files = {"lines.txt": "only one text\n", "one.json": squad(1, 4, may_lack=False), "none.json": squad(1, 4)}
    check_refusal(cli, run, words, message, files)
