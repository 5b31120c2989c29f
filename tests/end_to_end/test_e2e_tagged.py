"""Labels of words as a user trains, measures and reads them; the set made of Python's own source; wrong inputs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tformer
from tests.end_to_end.labelled_examples import build_run, check_refusal, sentences
from tformer.data.sources.tables import TaggedRow
from tformer.evaluation.classifier import GivenRows
from tformer.loading import load
from tformer.metrics.tags import may_follow
from tformer.tasks.tags.words import NO_LABELS, Tagger, decode_tags, tokenize_tagged, word_scores

Cli = Callable[..., Any]

RECIPE = """\
arch: bert
tokenizer: {train: {model: word, template: bert, vocab_size: 200, min_frequency: 1}}
data: {sort_window: 64}
model:
  d_model: 16
  max_seq_len: 24
  encoder: {num_layers: 1, num_heads: 2, feedforward: {d_ff: 32}}
  heads: [{kind: token_classifier}]
objectives: [{kind: token_classification}]
optimizer: {lr: 0.02}
training: {max_steps: 60, batch_size: 8, eval_every: 60, save_every: 60, log_every: 60, best_metric: f1_micro,
           precision: fp32, device: cpu, threads: 1}
"""
FIRST, LAST = ("Ada", "Alan", "Grace"), ("Lovelace", "Turing", "Hopper")


def conll(count: int, seed: int) -> str:
    """Sentences in which a first and a last name together are a person, and a first name alone is one."""
    rng, lines = np.random.default_rng(seed), ["-DOCSTART- O", ""]
    for _, text in sentences(count, seed):
        words = [f"{word} O" for word in text.split()]
        name = [f"{rng.choice(FIRST)} B-PER", *([f"{rng.choice(LAST)} I-PER"] if rng.random() < 0.5 else [])]
        place = int(rng.integers(0, len(words) + 1))
        lines += [*words[:place], *name, *words[place:], ". O", ""]
    return "\n".join(lines)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_run(
        tmp_path_factory.mktemp("tagged"), RECIPE, {"train.conll": conll(80, 1), "test.conll": conll(20, 2)}
    )


def test_spans_are_printed_inside_the_text(cli: Cli, run: Path) -> None:
    outcome = cli("classify", run, "--text", "the fox and Ada Lovelace.")
    assert outcome.code == 0 and outcome.out == "the fox and [PER Ada Lovelace].\n", outcome.err


def test_json_has_the_characters_of_each_span(cli: Cli, run: Path, tmp_path: Path) -> None:
    texts = ["the fox and Ada Lovelace.", "", "Alan . the owl"]
    (tmp_path / "texts.txt").write_text("\n".join(texts) + "\n")
    outcome = cli("classify", run, "--input", tmp_path / "texts.txt", "--json")
    documents = [json.loads(line) for line in outcome.out.splitlines()]
    assert [[span["text"] for span in each["spans"]] for each in documents] == [["Ada Lovelace"], [], ["Alan"]]
    for text, document in zip(texts, documents, strict=True):
        for span in document["spans"]:
            assert text[span["start"] : span["end"]] == span["text"] and span["label"] == "PER"
            assert 0 < span["probability"] <= 1


def test_a_table_comes_back_with_its_spans(cli: Cli, run: Path, tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("id,text\n1,Ada Lovelace .\n2,the owl\n")
    outcome = cli("classify", run, "--input", tmp_path / "in.csv", "--output", tmp_path / "out.jsonl")
    assert outcome.code == 0, outcome.err
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["spans"] for row in rows] == [["PER Ada Lovelace"], []] and rows[0]["id"] == "1"


def test_python_gives_the_spans(run: Path) -> None:
    first, second = tformer.load(run).classify(["Ada Lovelace .", "the owl"])
    assert first.spans[0]["label"] == "PER" and second.spans == []


def test_the_report_has_a_line_for_each_type(cli: Cli, run: Path) -> None:
    outcome = cli("evaluate", run, "--data", run.parent / "test.conll")
    assert outcome.code == 0, outcome.err
    assert "f1_micro 1.0000 [" in outcome.out and "PER" in outcome.out
    report = json.loads(cli("evaluate", run, "--data", run.parent / "test.conll", "--json", "--by", "length").out)
    own = cli("evaluate", run).out
    assert "baseline loss " in own and "(always answering 'O')" in own
    assert report["per_class"]["PER"]["support"] == 20 and report["accuracy"] == 1 and report["by"]["rows"]


def test_every_word_of_a_long_sentence_is_labelled(cli: Cli, run: Path, tmp_path: Path) -> None:
    words = [*(["the", "fox", "and"] * 9), "Ada", "Lovelace"] * 4  # 116 tokens, the model reads 24
    outcome = cli("classify", run, "--text", " ".join(words))
    assert (
        outcome.out == " ".join(words).replace("Ada Lovelace", "[PER Ada Lovelace]") + "\n"
        and "were cut" not in outcome.err
    )
    tags = {"Ada": "B-PER", "Lovelace": "I-PER"}
    sentence = "".join(f"{word} {tags.get(word, 'O')}\n" for word in words)
    (tmp_path / "long.conll").write_text(f"{sentence}\nthe O\n")
    outcome = cli("evaluate", run, "--data", tmp_path / "long.conll", "--json", "--by", "length")
    report = json.loads(outcome.out)
    assert report["examples"] == 2 and report["words"] == len(words) + 1
    assert report["recall_micro"] == report["accuracy"] == 1 and report["per_class"]["PER"]["support"] == 4
    assert "1 of 2 texts are longer than 24 tokens and are read in windows" in outcome.err


def test_a_long_sentence_has_the_scores_of_its_windows(run: Path) -> None:
    loaded, rng = load(run), np.random.default_rng(3)
    row = TaggedRow.of([str(word) for word in rng.choice([*FIRST, *LAST, "the", "fox"], size=70)], (), "")
    samples = tokenize_tagged([GivenRows([row])], NO_LABELS, loaded.text_tokenizer, seq_len=24)
    tagger = Tagger(loaded)
    [(_, logs_WL)] = word_scores(samples.rows, tagger.scores(samples), len(tagger.labels))
    seen = set[int]()
    for example, window in zip(samples.examples(0, range(len(samples))), samples.rows, strict=True):
        assert isinstance(window, TaggedRow)
        with torch.no_grad():
            scores_TL = loaded.model(input_ids=torch.from_numpy(example.ids[None])).head("token_classifier")[0]
        expected_nL = scores_TL.double().log_softmax(dim=-1)[torch.from_numpy(window.marks) == 0]
        np.testing.assert_allclose(logs_WL[window.seen], expected_nL, atol=1e-5)
        seen |= set(window.seen.tolist())
    assert seen == set(range(70)) and len(samples) == 6
    joined = decode_tags(logs_WL, tagger.labels)
    assert None not in joined and all(may_follow(*pair, "bio") for pair in pairwise([None, *joined, None]))


def test_a_word_without_a_token_is_outside() -> None:
    row = replace(TaggedRow.of(["a", "b"], (), ""), seen=np.zeros(0, dtype=np.int64))
    [(_, logs_WL)] = word_scores([row], [np.zeros(0)], 2)
    assert decode_tags(logs_WL, ("B-X", "O")) == ["O", "O"]
    assert decode_tags(logs_WL, ("DET", "NOUN")) == [None, None]


def test_training_goes_on_from_a_body_and_keeps_the_head_of_the_same_tags(cli: Cli, run: Path, tmp_path: Path) -> None:
    data, again = run.parent / "train.conll", tmp_path / "again"
    outcome = cli("train", "--init-from", run, "--data", data, "--max-steps", 1, "--out", again)
    assert outcome.code == 0 and "initialized from scratch" not in outcome.err, outcome.err
    (tmp_path / "other.conll").write_text(data.read_text().replace("PER", "NAME"))
    other = ["--init-from", run, "--data", tmp_path / "other.conll", "--max-steps", 1, "--out", tmp_path / "other"]
    outcome = cli("train", *other)
    assert outcome.code == 0 and "its labels were B-PER, I-PER, O" in outcome.err, outcome.err


def test_validations_may_read_a_share(cli: Cli, run: Path, tmp_path: Path) -> None:
    words = ["--config", run.parent / "recipe.yaml", "--data", run.parent / "train.conll", "--max-steps", 2]
    outcome = cli("train", *words, "--set", "training.valid_share=0.5", "--out", tmp_path / "run")
    assert outcome.code == 0, outcome.err
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert any("f1_micro" in line for line in lines if line.get("split") == "valid")


def test_words_that_a_mixture_of_schemes_leaves_in_no_entity_are_counted(cli: Cli, run: Path, tmp_path: Path) -> None:
    """BIO beside BILOU: an entity of one word should be U-, the last word of a longer one L-."""
    text = "Ada B-PER\nLovelace I-PER\n. O\n\nAda B-PER\nLovelace L-PER\n\nAlan U-PER\n\nGrace B-PER\n\n"
    (tmp_path / "mixed.conll").write_text(text * 5)
    words = ["train", "--config", run.parent / "recipe.yaml", "--data", tmp_path / "mixed.conll", "--dry-run"]
    outcome = cli(*words)
    assert outcome.code == 0 and "BILOU: " in outcome.err and "15 tagged words count as no entity" in outcome.err
    (tmp_path / "mixed.conll").write_text(text.replace("Lovelace I", "Lovelace L").replace("Grace B", "Grace U") * 5)
    outcome = cli(*words)
    assert outcome.code == 0 and "BILOU: " in outcome.err and "count as no entity" not in outcome.err


def test_the_first_example_is_shown_with_its_tags(cli: Cli, run: Path) -> None:
    words = ["--config", run.parent / "recipe.yaml", "--data", run.parent / "train.conll"]
    outcome = cli("train", *words, "--dry-run")
    assert outcome.code == 0 and "B-PER" in outcome.err, outcome.err


WRONG = [
    ("classify RUN --text a --top-k 2", "--top-k: ... gives spans of the text, not one label"),
    ("classify RUN --text a --threshold 0.5", "--threshold: ... gives spans of the text, not one label"),
    ("classify RUN --text a --text2 b", "was trained on single texts, not on pairs"),
    ("classify RUN --image x.png", "classifies texts, not images"),
    ("classify RUN --text a --views 2", "--views: ... classifies texts"),
    ("evaluate RUN --data test.conll --mistakes m.tsv", "--mistakes has no meaning here: ... model of tagged words"),
    ("evaluate RUN --data test.conll --plot p.html", "--plot draws the decisions of a classifier"),
    ("evaluate RUN --data test.conll --by position", "predicts no tokens"),
    ("evaluate RUN --data other.conll", "other.conll:1: unknown label 'B-LOC', not one of the training data"),
    ("evaluate RUN --data rows.tsv", "rows.tsv:2: expected a word in column 0"),
    ("train --config recipe.yaml --out o --data one.conll", "one class only, 'O'"),
    ("train --config recipe.yaml --out o --data train.conll --valid other.conll", "unknown label 'B-LOC'"),
    ("train --config recipe.yaml --out o --data train.conll --label-column ner", "columns of CoNLL files have numbers"),
    ("train --config recipe.yaml --out o --data few.conll", "too few to keep 0.1 of them for validation"),
    ("train --config recipe.yaml --out o --data train.conll --best-metric mcc", "found 'mcc', expected a metric of"),
    ("train --config recipe.yaml --out o --data train.conll --set data.subword_sampling=0.1", "0.1, expected 0"),
    ("train --config recipe.yaml --out o --data train.conll --folds 3", "only labelled examples are cut into folds"),
    ("train --config recipe.yaml --out o --data train.conll --set data.seq_len=2", "leave no room for text"),
    ("train --arch gpt --objective token_classification --out o --data train.conll", "needs model.encoder, found null"),
    ("train --arch vit --objective token_classification --out o --data train.conll", "without model.patches"),
]


@pytest.mark.parametrize(("words", "message"), WRONG)
def test_wrong_uses_are_one_line(
    cli: Cli, run: Path, tmp_path: Path, monkeypatch: Any, words: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    files = {
        "other.conll": "London B-LOC\n",
        "one.conll": "a O\n\nb O\n",
        "few.conll": "a O\nb B-X\n",
        "rows.tsv": "a\tO\nb\n",
    }
    check_refusal(cli, run, words, message, files)


@pytest.mark.slow
def test_the_kinds_of_tokens_of_python_are_learned_in_a_minute(cli: Cli, tmp_path: Path) -> None:
    words = ["--arch", "bert", "--objective", "token_classification", "--data", "builtin:python-tokens"]
    outcome = cli("train", *words, "--out", tmp_path / "run")
    assert outcome.code == 0, outcome.err
    report = json.loads(cli("evaluate", tmp_path / "run", "--json").out)
    assert report["f1_micro"] >= 0.99, report
    assert set(report["per_class"]) == {"identifier", "keyword", "string", "number", "comment"}
