"""`evaluate --threshold`: chosen on validation data, stored with the checkpoint, used by evaluate and classify."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tformer
from tests.end_to_end.labelled_examples import many, sentences, write_table
from tformer.metrics.thresholds import choose_threshold

Cli = Callable[..., Any]
Runs = Callable[[str], Path]
Figures = Callable[..., dict[str, Any]]
FILE = "thresholds.json"
WORDS = ("the cat", "the saw", "the cat and the saw", "the dog and the cat and the axe", "hammer", "the owl")


@pytest.fixture
def run_of(encoder_run: Runs, tmp_path: Path) -> Runs:
    """A run of a kind that a test may change."""
    return lambda kind: shutil.copytree(encoder_run(kind), tmp_path / kind)


@pytest.fixture
def test_set(tmp_path: Path) -> Path:
    return write_table(tmp_path / "test.tsv", ("label", "text"), [*sentences(30, 9)])


def answers(run: Path, texts: tuple[str, ...] = WORDS) -> list[str | None]:
    return [answer.label for answer in tformer.load(run).classify(list(texts))]


def test_a_number_decides_in_evaluate_classify_and_python(cli: Cli, figures: Figures, run_of: Runs) -> None:
    run = run_of("single")
    plain = [tformer.load(run).classify(text).probabilities["tool"] for text in WORDS]
    limit = float(np.sort(plain)[1] + np.sort(plain)[2]) / 2  # two of the texts are below
    outcome = cli("evaluate", run, "--threshold", limit)
    assert f"threshold {limit:.4f} of 'tool' (as given)" in outcome.out and FILE in outcome.err
    expected = ["tool" if value > limit else "animal" for value in plain]
    assert answers(run) == expected and expected.count("animal") == 2
    lines = run.parent / "lines.txt"
    lines.write_text("\n".join(WORDS) + "\n")
    shown = cli("classify", run, "--input", lines)
    assert [line.split("\t")[0] for line in shown.out.splitlines()] == expected
    assert f"threshold {limit:.4f} of 'tool'" in shown.err
    [document] = [json.loads(cli("classify", run, "--text", WORDS[0], "--json").out)]
    assert document["label"] == expected[0]
    confusion = figures(run)["confusion"]
    assert np.array(confusion).sum() == figures(run)["examples"]


def test_classify_takes_a_threshold_for_two_classes_once(cli: Cli, run_of: Runs) -> None:
    run = run_of("single")
    assert cli("classify", run, "--text", "the cat", "--threshold", 0).out.startswith("tool\t")
    assert cli("classify", run, "--text", "the saw", "--threshold", 1).out.startswith("animal\t")
    assert tformer.load(run).classify("the cat", threshold=0.0).label == "tool"
    assert cli("classify", run, "--text", "the saw").out.startswith("tool\t")


def test_a_half_is_the_default(figures: Figures, run_of: Runs, test_set: Path) -> None:
    run = run_of("single")
    before, labels = figures(run, "--data", test_set), answers(run)
    assert figures(run, "--data", test_set, "--threshold", 0.99)["confusion"] != before["confusion"]
    back = figures(run, "--data", test_set, "--threshold", 0.5)
    assert {name: back[name] for name in ("accuracy", "f1_binary", "mcc", "confusion", "ece", "loss")} == {
        name: before[name] for name in ("accuracy", "f1_binary", "mcc", "confusion", "ece", "loss")
    }
    assert answers(run) == labels


def test_a_rule_is_applied_to_validation_data_not_to_the_data_that_is_measured(
    figures: Figures, run_of: Runs, test_set: Path
) -> None:
    run = run_of("single")
    wrong = write_table(
        test_set.with_name("wrong.tsv"), ("label", "text"), [("tool", "the cat"), ("animal", "the saw")]
    )
    on_validation = figures(run, "--threshold", "best-f1")["thresholds"]
    elsewhere = figures(run, "--threshold", "best-f1", "--data", wrong)
    assert elsewhere["thresholds"] == on_validation == {"rule": "best-f1", "values": on_validation["values"]}
    assert elsewhere["examples"] == 2 and elsewhere["accuracy"] == 0.0
    assert figures(run, "--data", test_set)["thresholds"] == on_validation  # stored


def test_a_rule_of_a_run_is_the_rule_on_its_probabilities(cli: Cli, figures: Figures, run_of: Runs) -> None:
    run = run_of("multi")
    rows = write_table(run.parent / "own.tsv", ("labels", "text"), many(60))
    valid = run.parent / "valid"
    outcome = cli("train", "--init-from", run, "--data", rows, "--valid", rows, "--max-steps", 1, "--lr", 1e-9,
                  "--objective", "multi_label", "--out", valid)  # fmt: skip
    assert outcome.code == 0, outcome.err
    found = figures(valid, "--threshold", "best-f1")["thresholds"]["values"]
    loaded = tformer.load(valid)
    answered = loaded.classify([text for _, text in many(60)], threshold=0.5)
    for label in ("animal", "tool"):
        truth = [label in labels.split("|") for labels, _ in many(60)]
        values = np.array([answer.probabilities[label] for answer in answered])
        chosen = choose_threshold(truth, values, "best-f1")
        assert found[label] == pytest.approx(chosen, abs=1e-6)
    several = loaded.classify("the cat with the dog")
    assert set(several.labels) == {name for name, value in several.probabilities.items() if value > found[name]}


def test_mistakes_are_those_of_the_threshold(figures: Figures, run_of: Runs, test_set: Path) -> None:
    run, listing = run_of("single"), test_set.with_name("wrong.jsonl")
    found = figures(run, "--data", test_set, "--threshold", 1, "--mistakes", listing)
    wrong = [json.loads(line) for line in listing.read_text().splitlines()]
    assert len(wrong) == found["confusion"][1][0] == found["per_class"]["tool"]["support"]
    assert {each["prediction"] for each in wrong} == {"animal"}


def test_images_have_thresholds_too(cli: Cli, figures: Figures, run_of: Runs) -> None:
    run = run_of("image")
    assert figures(run, "--threshold", "best-accuracy")["thresholds"]["values"].keys() == {"light"}
    image = next((run.parent.parent.glob("*/data/dark/*.png")), None)
    assert image is None or cli("classify", run, "--image", image).code == 0


def test_python_takes_numbers_and_rules(run_of: Runs) -> None:
    run = tformer.load(run_of("single"))
    assert run.evaluate(threshold=0.25)["thresholds"]["values"] == {"tool": 0.25}
    assert run.evaluate(threshold="recall=0.9")["thresholds"]["rule"] == "recall=0.9"


def test_what_no_threshold_reaches_keeps_a_half_and_is_said(cli: Cli, run_of: Runs) -> None:
    run = run_of("multi")
    rare = write_table(run.parent / "rare.tsv", ("labels", "text"), [("animal", "the saw"), ("tool", "the cat")] * 20)
    valid = run.parent / "valid"
    flags = ("--objective", "multi_label", "--max-steps", 1, "--lr", 1e-9, "--out", valid)
    assert cli("train", "--init-from", run, "--data", rare, "--valid", rare, *flags).code == 0
    outcome = cli("evaluate", valid, "--threshold", "precision=1")
    assert outcome.code == 0
    assert "no threshold gives precision=1 on the validation data, 0.5 is kept: animal" in " ".join(outcome.err.split())


@pytest.mark.parametrize(
    "content", ["{}", '{"rule": "x", "values": {"cat": 0.5}}', '{"rule": 1, "values": {"tool": 2}}']
)
def test_a_damaged_file_is_named_and_can_be_chosen_again(content: str, cli: Cli, run_of: Runs) -> None:
    run = run_of("single")
    [best] = {path.resolve() for path in (run / "checkpoints").glob("step-*")} & {tformer.load(run).path.resolve()}
    (best / FILE).write_text(content)
    outcome = cli("classify", run, "--text", "the cat")
    assert outcome.code == 2 and f"{FILE} is damaged" in outcome.err and "hint: delete it" in outcome.err
    assert cli("evaluate", run, "--threshold", "best-f1").code == 0
    assert cli("classify", run, "--text", "the cat").code == 0


def test_a_model_without_validation_data_needs_a_number(cli: Cli, run_of: Runs, test_set: Path) -> None:
    run = run_of("single")
    assert cli("export", run, "--out", run.parent / "hf").code == 0
    outcome = cli("evaluate", run.parent / "hf", "--data", test_set, "--threshold", "best-f1")
    said = " ".join(outcome.err.split())
    assert outcome.code == 2 and "--threshold best-f1 is chosen on the validation data of the run" in said
    assert "give a number" in said


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_that_cannot_be_written_is_refused_first(cli: Cli, run_of: Runs) -> None:
    run = run_of("single")
    folder = tformer.load(run).path
    folder.chmod(0o500)
    try:
        assert cli("evaluate", run, "--threshold", 0.3).code == 3
    finally:
        folder.chmod(0o700)
