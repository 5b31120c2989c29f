"""`train --objective contrastive|similarity` and `evaluate`: pairs of texts from data to metrics, and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

import tformer
from tformer.objectives.contrastive import ContrastiveOptions
from tformer.support.errors import InputError
from tformer.training.together import prepare_together
from tformer.workers.work import Work
from tformer.workers.worker import Worker

Cli = Callable[..., Any]
RECIPE = """\
arch: bert
tokenizer: {train: {model: word, template: bert, vocab_size: 200, min_frequency: 1}}
model:
  d_model: 16
  max_seq_len: 16
  encoder: {num_layers: 1, num_heads: 2, feedforward: {d_ff: 16}}
  heads: [{kind: masked_lm}]
objectives: [{kind: masked_lm}]
optimizer: {lr: 0.02, weight_decay: 0.0}
schedule: {kind: constant, warmup_steps: 0}
training: {max_steps: 30, batch_size: 16, eval_every: 30, save_every: 30, log_every: 30, precision: fp32, device: cpu,
           threads: 1}
"""
COLOURS = ["red", "green", "blue", "white", "black", "brown", "pink", "grey"]
THINGS = ["apple", "leaf", "sea", "brick", "cat", "dog", "house", "road"]
WORDS = [f"the {colour} {thing}" for colour in COLOURS for thing in THINGS]
OTHERS = "rouge vert bleu blanc noir brun rose gris pomme feuille mer brique chat chien maison route"
FRENCH = dict(zip((*COLOURS, *THINGS), OTHERS.split(), strict=True))


def translated(text: str) -> str:
    _, colour, thing = text.split()
    return f"{FRENCH[thing]} {FRENCH[colour]}"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bert.yaml").write_text(RECIPE)
    rows = [(text, translated(text)) for text in WORDS]
    Path("pairs.tsv").write_text("query\tpassage\n" + "".join(f"{a}\t{b}\n" for a, b in rows))
    draw = np.random.default_rng(0)
    scored = [(WORDS[i], WORDS[j]) for i, j in draw.integers(len(WORDS), size=(200, 2))]
    same = [sum(x == y for x, y in zip(a.split(), b.split(), strict=True)) for a, b in scored]
    lines = "".join(f"{a}\t{b}\t{score}\n" for (a, b), score in zip(scored, same, strict=True))
    Path("scored.tsv").write_text("sentence1\tsentence2\tscore\n" + lines)


def succeed(cli: Cli, *words: object) -> Any:
    outcome = cli(*words, "--json")
    assert outcome.code == 0, outcome.err
    return json.loads(outcome.out)


def train(cli: Cli, out: str, kind: str, data: str, *more: object) -> list[dict[str, Any]]:
    """Train, and return the validations."""
    succeed(cli, "train", "--config", "bert.yaml", "--objective", kind, "--data", data, "--out", out, *more)
    records = [json.loads(line) for line in Path(out, "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if record.get("split") == "valid"]


def test_in_batch_negatives_raise_the_retrieval_of_translations(cli: Cli) -> None:
    sets = ("objectives.0.chunk_size=8", "data.valid_fraction=0.25", "training.eval_every=1", "optimizer.lr=0.005")
    words = (word for each in sets for word in ("--set", each))
    first, *_, last = train(cli, "run", "contrastive", "pairs.tsv", "--max-steps", 60, *words)
    assert last["mrr"] > first["mrr"] + 0.2 and last["loss"] < first["loss"]
    report = succeed(cli, "evaluate", "run", "--checkpoint", "latest")
    names = ("recall_1", "recall_5", "recall_10", "mrr", "ndcg_10")
    assert {name: report[name] for name in names} == pytest.approx({name: last[name] for name in names})
    assert report["queries"] == report["documents"] == report["examples"] == 16
    assert cli("evaluate", "run").out.splitlines()[:3] == ["examples 16", "queries 16", "documents 16"]


def test_hard_negatives_are_read_from_columns_and_lists(cli: Cli) -> None:
    rows = [(text, translated(text), [translated(WORDS[(number + step) % 64]) for step in (1, 8)][: number % 3])
            for number, text in enumerate(WORDS)]  # fmt: skip
    table = "".join("\t".join([a, b, *more, *[""] * (2 - len(more))]) + "\n" for a, b, more in rows)
    Path("triples.tsv").write_text("anchor\tpositive\tnegative_1\tnegative_2\n" + table)
    lines = (json.dumps({"anchor": a, "positive": b, "negative": more}) for a, b, more in rows)
    Path("triples.jsonl").write_text("\n".join(lines))
    more = ("--max-steps", 4, "--set", "data.valid_fraction=0.25", "--set", "objectives.0.chunk_size=8")
    found = [train(cli, name, "contrastive", f"triples.{name}", *more)[-1] for name in ("tsv", "jsonl")]
    assert found[0]["loss"] == found[1]["loss"] and found[0]["mrr"] == found[1]["mrr"]
    plain = train(cli, "plain", "contrastive", "pairs.tsv", *more)[-1]
    assert plain["loss"] != found[0]["loss"]
    Path("one.jsonl").write_text('{"anchor": "the red cat", "positive": "chat rouge", "negative": ["mer", "mer", ""]}\n'
                                 '{"anchor": "sea", "positive": "mer"}\n')  # fmt: skip
    report = succeed(cli, "evaluate", "tsv", "--data", "one.jsonl")
    assert (report["queries"], report["documents"], report["examples"]) == (2, 2, 2)
    outcome = cli("train", "--config", "bert.yaml", "--objective", "contrastive", "--data", "triples.tsv", "--dry-run")
    assert "negatives in column 'negative_1,negative_2'" in outcome.err


def test_scores_raise_spearman_over_the_plain_mean_of_a_body(cli: Cli) -> None:
    Path("text.txt").write_text("\n".join(WORDS))
    succeed(cli, "train", "--config", "bert.yaml", "--data", "text.txt", "--out", "body")
    before = succeed(cli, "evaluate", "body", "--pooling", "mean", "--data", "scored.tsv", "--label-column", "score")
    sizes = ("--init-from", "body", "--set", "objectives.0.sizes=[4]", "--best-metric", "spearman")
    train(cli, "run", "similarity", "scored.tsv", *sizes)
    report = succeed(cli, "evaluate", "run", "--data", "scored.tsv")
    assert report["spearman"] > before["spearman"] + 0.1
    assert -1 <= report["dimensions"]["4"]["spearman"] <= 1
    vectors = tformer.load("run").embed(WORDS[:3], dimensions=4)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)


def test_a_body_is_trained_as_in_the_preset_for_fine_tuning(cli: Cli) -> None:
    Path("text.txt").write_text("\n".join(WORDS))
    succeed(cli, "train", "--config", "bert.yaml", "--data", "text.txt", "--out", "body", "--max-steps", 1)
    words = ("--init-from", "body", "--objective", "similarity", "--data", "scored.tsv", "--dry-run")
    outcome = cli("train", *words)
    assert outcome.code == 0 and "training as in preset bert/finetune" in outcome.err
    assert "similarity: predicts the score of the pair" in outcome.err and "original text2: " in outcome.err


def test_the_plain_vectors_of_a_body_are_those_of_embed(cli: Cli) -> None:
    train(cli, "a", "contrastive", "pairs.tsv", "--max-steps", 2)
    run = tformer.load("a")
    own = run.evaluate("scored.tsv", label_column="score", pooling="max")
    rows = [line.split("\t") for line in Path("scored.tsv").read_text().splitlines()[1:]]
    first, second = (run.embed([row[side] for row in rows], pooling="max", normalize=True) for side in (0, 1))
    expected = np.corrcoef((first * second).sum(axis=1), [float(row[2]) for row in rows])[0, 1]
    assert own["pearson"] == pytest.approx(expected, abs=1e-5)


def test_a_model_of_pairs_is_measured_on_scores_and_one_of_scores_on_pairs(cli: Cli) -> None:
    train(cli, "a", "contrastive", "pairs.tsv", "--max-steps", 2)
    train(cli, "b", "similarity", "scored.tsv", "--max-steps", 2)
    scored = succeed(cli, "evaluate", "a", "--data", "scored.tsv", "--label-column", "score")
    assert {"pearson", "spearman"} <= scored.keys()
    assert {"recall_1", "mrr"} <= succeed(cli, "evaluate", "b", "--data", "pairs.tsv").keys()
    assert "spearman" in succeed(cli, "evaluate", "b", "--data", "scored.tsv")
    run = tformer.load("b")
    assert run.evaluate([("a", "b", "1"), ("the red cat", "the cat", "2"), ("a", "c", "1.5")])["examples"] == 3


def test_all_second_texts_of_equal_first_texts_are_relevant(cli: Cli) -> None:
    train(cli, "a", "contrastive", "pairs.tsv", "--max-steps", 2)
    Path("several.tsv").write_text("query\tpassage\nthe red cat\tchat rouge\nthe red cat\tthe red cat\nsea\tmer\n")
    report = succeed(cli, "evaluate", "a", "--data", "several.tsv")
    assert (report["queries"], report["documents"], report["examples"]) == (2, 3, 3)


def test_a_resumed_training_is_the_uninterrupted_one(cli: Cli) -> None:
    more = ("--set", "training.eval_every=4", "--set", "training.save_every=2")
    whole = train(cli, "a", "contrastive", "pairs.tsv", "--max-steps", 8, *more)
    train(cli, "b", "contrastive", "pairs.tsv", "--max-steps", 8, "--stop-at-step", 4, *more)
    succeed(cli, "train", "--resume", "--out", "b", "--max-steps", 8)
    assert np.array_equal(tformer.load("a").embed(WORDS), tformer.load("b").embed(WORDS)) and len(whole) == 2


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ("contrastive", "pairs.tsv", "--grad-accum", "2"),
            "training.grad_accum: found 2, expected 1",
        ),
        (("contrastive", "one.tsv"), "one.tsv: found one text a row, expected pairs of texts"),
        (("similarity", "pairs.tsv"), "cannot tell which column holds the label"),
        (("similarity", "words.tsv"), "words.tsv:2"),
        (("contrastive", "none.tsv"), "none.tsv"),
        (("similarity", "scored.tsv", "--best-metric", "mrr"), "found 'mrr', expected a metric of the objectives"),
        (
            ("contrastive", "pairs.tsv", "--set", "objectives.0.scale=0"),
            "scale: must be greater than 0, found 0",
        ),
        (
            ("contrastive", "pairs.tsv", "--set", "objectives.0.sizes=[4,500]"),
            "objectives.0.sizes: found 500, expected at most",
        ),
        (
            ("contrastive", "pairs.tsv", "--set", "objectives.0.chunk_size=0"),
            "chunk_size: must be greater than 0",
        ),
        (
            ("similarity", "scored.tsv", "--set", "objectives.0.range=[5,1]"),
            "range: must be two numbers, the lower first",
        ),
        (("similarity", "scored.tsv", "--folds", "3"), "only labelled examples are cut into folds"),
        (("contrastive", "few.tsv"), "few.tsv: 1 examples are too few"),
        (("contrastive", "wrong.jsonl"), "wrong.jsonl:2: 'negative' should be text, found a number"),
    ],
)
def test_a_mistake_is_one_clear_line(words: tuple[str, ...], expected: str, cli: Cli) -> None:
    Path("one.tsv").write_text("text\tlabel\na\t1\nb\t2\n")
    Path("words.tsv").write_text("sentence1\tsentence2\tscore\na\tb\tgood\n")
    Path("wrong.jsonl").write_text('{"query": "a", "answer": "b"}\n{"query": "a", "answer": "b", "negative": ["c", 3]}')
    Path("few.tsv").write_text("query\tpassage\na\tb\n")
    kind, data, *more = words
    outcome = cli("train", "--config", "bert.yaml", "--objective", kind, "--data", data, "--out", "run", *more)
    assert outcome.code == 2 and expected in outcome.err, outcome.err
    assert not Path("run/checkpoints").exists()


def test_one_process_compares_the_examples_of_a_batch() -> None:
    requested = SimpleNamespace(recipe=SimpleNamespace(objectives=[ContrastiveOptions()]))
    with pytest.raises(InputError, match="--devices: contrastive compares all examples of a batch"):
        prepare_together(cast("Any", requested), Work(), Worker(world_size=2))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--pooling", "sum", "--data", "pairs.tsv"), "--pooling: found 'sum', expected 'cls', 'mean'"),
        (("--data", "one.tsv"), "one.tsv: found one text a row, expected pairs of texts"),
        (("--data", "pairs.tsv", "--label-column", "passage"), "is not a finite number"),
        (("--data", "single.tsv", "--label-column", "score"), "a correlation needs at least 2 pairs, found 1"),
        (("--data", "pairs.tsv", "--by", "position"), "--by position"),
    ],
)
def test_an_evaluation_refuses_in_one_line(words: tuple[str, ...], expected: str, cli: Cli) -> None:
    train(cli, "a", "contrastive", "pairs.tsv", "--max-steps", 1)
    Path("one.tsv").write_text("text\tlabel\na\t1\nb\t2\n")
    Path("single.tsv").write_text("sentence1\tsentence2\tscore\na\tb\t1\n")
    outcome = cli("evaluate", "a", *words)
    assert outcome.code == 2 and expected in outcome.err, outcome.err


def test_without_data_there_is_nothing_to_compare(cli: Cli) -> None:
    outcome = cli("train", "--config", "bert.yaml", "--objective", "contrastive", "--out", "run")
    assert outcome.code == 2 and "contrastive has no built-in data" in outcome.err
