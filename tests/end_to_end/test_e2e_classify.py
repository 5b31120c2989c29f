"""`tformer classify` as a user runs it: texts, pairs, images, files and standard input, in order."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tformer
from tests.end_to_end.labelled_examples import sentences
from tformer.evaluation.classifier import Classifier

Cli = Callable[..., Any]
Runs = Callable[[str], Path]


def labels_of(out: str) -> list[str]:
    return [line.split("\t")[0] for line in out.splitlines()]


def test_a_text_gives_its_label_and_probability(cli: Cli, encoder_run: Runs) -> None:
    outcome = cli("classify", encoder_run("single"), "--text", "the fox and the owl")
    assert outcome.code == 0, outcome.err
    label, probability = outcome.out.rstrip("\n").split("\t")
    assert label == "animal" and 0.5 < float(probability) <= 1


def test_top_and_json_give_the_others_too(cli: Cli, encoder_run: Runs) -> None:
    cells = cli("classify", encoder_run("single"), "--text", "a saw", "--top-k", 2).out.rstrip("\n").split("\t")
    assert cells[::2] == ["tool", "animal"] and float(cells[1]) + float(cells[3]) == pytest.approx(1, abs=1e-3)
    outcome = cli("classify", encoder_run("single"), "--text", "a saw", "--json")
    document = json.loads(outcome.out)
    assert document["label"] == "tool" and sum(document["probabilities"].values()) == pytest.approx(1)
    assert len(outcome.out.splitlines()) == 1


def test_the_newest_run_is_the_default(cli: Cli, encoder_run: Runs, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "runs").mkdir()
    for name, kind in (("classifier", "single"), ("masked", "masked")):  # the newer one has no labels
        (tmp_path / "runs" / name).symlink_to(encoder_run(kind))
    monkeypatch.chdir(tmp_path)
    outcome = cli("classify", "--text", "the cow")
    assert outcome.code == 0 and outcome.out.startswith("animal"), outcome.err


def test_every_line_of_a_file_is_answered_in_order(cli: Cli, encoder_run: Runs, tmp_path: Path) -> None:
    expected = sentences(50, 11)
    texts = tmp_path / "texts.txt"
    texts.write_text("".join(f"{text}\n" for _, text in expected))
    for options in ([], ["--batch-size", 1], ["--batch-size", 7]):
        outcome = cli("classify", encoder_run("single"), "--input", texts, *options)
        assert labels_of(outcome.out) == [label for label, _ in expected], outcome.err


@pytest.mark.parametrize("kind", ["single", "pair"])
def test_the_scores_are_those_of_a_plain_loop(kind: str, encoder_run: Runs) -> None:
    """One text at a time, encoded by the tokenizer's own template: no padding, no sorting, no batches."""
    loaded = tformer.load(encoder_run(kind))
    assert loaded.tokenizer is not None
    texts = [(first, second if kind == "pair" else None) for (_, first), (_, second) in zip(
        sentences(40, 14), sentences(40, 15), strict=True)]  # fmt: skip
    texts = [(first, second) for first, second in texts if len(f"{first} {second}".split()) <= 20]  # none is cut
    texts[7] = ("", "" if kind == "pair" else None)
    found = Classifier(loaded, batch_size=9).classify(texts)
    for (first, second), scores in zip(texts, found, strict=True):
        if second is None:
            ids, types = loaded.tokenizer.encode(first, template=True), None
        else:
            ids, types = loaded.tokenizer.encode_pair(first, second)
        with torch.no_grad():
            expected = loaded.model(torch.tensor([ids]), token_type_ids=types and torch.tensor([types])).logits[0]
        assert torch.allclose(torch.from_numpy(scores), expected, atol=1e-5)


def test_empty_lines_are_answered(cli: Cli, encoder_run: Runs, tmp_path: Path) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("\nthe saw\n   \n\n")
    found = cli("classify", encoder_run("single"), "--input", texts).out.splitlines()
    assert len(found) == 4 and found[1].startswith("tool") and found[0] == found[3]
    assert found[0] == cli("classify", encoder_run("single"), "--text", "").out.rstrip("\n")


@pytest.mark.parametrize("ending", ["csv", "tsv", "jsonl"])
def test_tables_are_read_by_column(ending: str, cli: Cli, encoder_run: Runs, tmp_path: Path) -> None:
    expected = sentences(20, 12)
    rows = {
        "csv": "id,text\n" + "".join(f'{i},"{text}"\n' for i, (_, text) in enumerate(expected)),
        "tsv": "id\ttext\n" + "".join(f"{i}\t{text}\n" for i, (_, text) in enumerate(expected)),
        "jsonl": "".join(json.dumps({"id": i, "text": text}) + "\n" for i, (_, text) in enumerate(expected)),
    }

    def labels_in(out: str) -> list[str]:
        """The labels of the answers, which are a table of the same format."""
        if ending == "jsonl":
            return [json.loads(line)["label"] for line in out.splitlines()]
        header, *lines = (line.split("," if ending == "csv" else "\t") for line in out.splitlines())
        assert header[2:] == ["label", "probability", "animal", "tool"]
        return [cells[2] for cells in lines]

    path = tmp_path / f"rows.{ending}"
    path.write_text(rows[ending])
    outcome = cli("classify", encoder_run("single"), "--input", path)
    assert labels_in(outcome.out) == [label for label, _ in expected], outcome.err
    path.write_text(rows[ending].replace("text", "words"))
    refused = cli("classify", encoder_run("single"), "--input", path)
    assert refused.code == 2 and "words" in refused.err
    named = cli("classify", encoder_run("single"), "--input", path, "--text-column", "words")
    assert labels_in(named.out) == [label for label, _ in expected], named.err


def test_five_thousand_lines_of_standard_input_in_order(
    cli: Cli, encoder_run: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = sentences(5_000, 13)  # more than a block
    texts = tmp_path / "texts.txt"
    texts.write_text("".join(f"{text}\n" for _, text in expected))
    with texts.open() as file:
        monkeypatch.setattr("sys.stdin", file)
        done = cli("classify", encoder_run("single"))
    assert done.code == 0, done.err
    assert labels_of(done.out) == [label for label, _ in expected]


def test_a_line_is_answered_before_the_next_one_is_written(encoder_run: Runs) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "tformer", "classify", encoder_run("single"), "--input", "-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    assert process.stdin is not None and process.stdout is not None
    for text, label in (("the saw", "tool"), ("", None), ("the cow", "animal")):
        process.stdin.write(text + "\n")
        answer = process.stdout.readline()
        assert label is None or answer.startswith(label)
    out, err = process.communicate(timeout=60)
    assert (out, process.returncode) == ("", 0), err


@pytest.mark.slow
def test_a_reader_that_leaves_ends_the_command_quietly(encoder_run: Runs, tmp_path: Path) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("the saw\n" * 20_000)
    command = f"{sys.executable} -m tformer classify {encoder_run('single')} --input {texts} | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("tool") and "Traceback" not in done.stderr and "error" not in done.stderr


def test_an_interrupt_keeps_what_was_done(cli: Cli, encoder_run: Runs, tmp_path: Path, monkeypatch: Any) -> None:
    from tformer.decoding import lines

    monkeypatch.setattr(lines, "BLOCK_LINES", 10)
    texts, out = tmp_path / "texts.txt", tmp_path / "out.tsv"
    texts.write_text("the saw\n" * 35)
    real = Classifier.classify
    calls: list[int] = []

    def stop_in_the_third(self: Classifier, block: Any) -> Any:
        calls.append(len(block))
        if len(calls) == 3:
            os.kill(os.getpid(), 2)
        return real(self, block)

    monkeypatch.setattr(Classifier, "classify", stop_in_the_third)
    outcome = cli("classify", encoder_run("single"), "--input", texts, "--output", out)
    assert outcome.code == 130 and "after 20 inputs" in outcome.err
    assert len(out.read_text().splitlines()) == 20


def test_pairs(cli: Cli, encoder_run: Runs, tmp_path: Path) -> None:
    run = encoder_run("pair")
    outcome = cli("classify", run, "--text", "the cat", "--text2", "the saw", "--json")
    assert outcome.code == 0 and set(json.loads(outcome.out)["probabilities"]) == {"other", "same"}
    lines = tmp_path / "pairs.txt"
    lines.write_text("the cat\tthe saw\n")
    table = tmp_path / "pairs.tsv"
    table.write_text("text_a\ttext_b\nthe cat\tthe saw\n")
    of_line, of_row = (json.loads(cli("classify", run, "--input", path, "--json").out) for path in (lines, table))
    assert of_line == json.loads(outcome.out) and of_row == {"row": 0, **of_line}


def test_several_labels(cli: Cli, encoder_run: Runs) -> None:
    run = encoder_run("multi")
    labels, probabilities = cli("classify", run, "--text", "the cat with the saw").out.rstrip("\n").split("\t")
    assert sorted(labels.split(",")) == ["animal", "tool"] and len(probabilities.split(",")) == 2
    assert cli("classify", run, "--text", "the cat with the dog", "--threshold", 1).out == "\t\n"
    document = json.loads(cli("classify", run, "--text", "the cat with the dog", "--json").out)
    assert document["labels"] == ["animal"] and set(document["probabilities"]) == {"animal", "tool"}


def test_a_score(cli: Cli, encoder_run: Runs) -> None:
    run = encoder_run("score")
    low, high = (float(cli("classify", run, "--text", text).out) for text in ("the cow", "the saw"))
    assert low < 2 < high
    assert json.loads(cli("classify", run, "--text", "the cow", "--json").out)["score"] == pytest.approx(low, abs=1e-3)


def test_images(cli: Cli, encoder_run: Runs, tmp_path: Path) -> None:
    run = encoder_run("image")
    folder = run.parent / "data"
    dark, light = folder / "dark" / "0.png", folder / "light" / "0.png"
    assert labels_of(cli("classify", run, "--image", dark).out) == ["dark"]
    assert labels_of(cli("classify", run, "--image", light, dark, light).out) == ["light", "dark", "light"]
    assert labels_of(cli("classify", run, "--image", light, "--image", dark).out) == ["light", "dark"]
    names = tmp_path / "images.txt"
    names.write_text(f"{dark}\n{light}\n")
    documents = [json.loads(line) for line in cli("classify", run, "--input", names, "--json").out.splitlines()]
    assert [(one["image"], one["label"]) for one in documents] == [(str(dark), "dark"), (str(light), "light")]
    whole = labels_of(cli("classify", run, "--input", folder).out)
    assert whole == ["dark"] * 20 + ["light"] * 20


def test_answers_never_replace_redirected_standard_input(
    cli: Cli, encoder_run: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("the saw\n")
    with texts.open() as file:
        monkeypatch.setattr("sys.stdin", file)
        outcome = cli("classify", encoder_run("single"), "--output", texts)
    assert outcome.code == 2 and "would replace what is read: -" in outcome.err and texts.read_text() == "the saw\n"


@pytest.mark.parametrize("bad", ["a\0b.png", "~nosuchuser/b.png", "absent.png"])
def test_a_bad_path_in_a_list_is_named_with_its_line(
    bad: str, cli: Cli, encoder_run: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = encoder_run("image")
    names = tmp_path / "names.tsv"
    names.write_text(f"{run.parent / 'data' / 'dark' / '0.png'}\n{bad}\n")
    shown = bad.replace("\0", "\\x00")
    outcome = cli("classify", run, "--input", names)
    assert outcome.code == 2 and f"error: {names}:2: {shown}: " in outcome.err, outcome.err
    with names.open() as file:
        monkeypatch.setattr("sys.stdin", file)
        outcome = cli("classify", run)
    assert outcome.code == 2 and f"error: standard input:2: {shown}: " in outcome.err, outcome.err


def test_lines_of_a_list_are_counted_through_blocks(
    cli: Cli, encoder_run: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tformer.cli.classify.BLOCK_IMAGES", 2)
    run = encoder_run("image")
    names = tmp_path / "names.txt"
    names.write_text(f"{run.parent / 'data' / 'dark' / '0.png'}\n" * 5 + "absent.png\n")
    outcome = cli("classify", run, "--input", names)
    assert outcome.code == 2 and f"{names}:6: absent.png" in outcome.err and len(outcome.out.splitlines()) == 4


def test_without_a_run_the_hint_is_how_to_train_a_classifier(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for run in ([], ["runs/none"]):
        outcome = cli("classify", *run, "--text", "a")
        assert outcome.code == 2 and "tformer train --arch bert" in outcome.err and "gpt" not in outcome.err


def test_nothing_to_classify_on_a_terminal(cli: Cli, encoder_run: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    outcome = cli("classify", encoder_run("single"))
    assert outcome.code == 2 and "nothing to classify" in outcome.err and "--text" in outcome.err


def test_texts_that_were_cut_are_counted(cli: Cli, encoder_run: Runs) -> None:
    outcome = cli("classify", encoder_run("single"), "--text", "the cat " * 50)
    assert outcome.code == 0 and "1 of 1 texts are longer than 24 tokens" in outcome.err
