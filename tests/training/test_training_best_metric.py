"""The metric that decides on the best checkpoint and on early stopping: names, flags, refusals, the guess beside it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tformer
from tests.end_to_end.conftest import ENCODER, IMAGES
from tests.end_to_end.labelled_examples import many, sentences, write_images, write_table
from tests.quick import first_is_quick
from tests.training.pair_makers import metrics
from tformer.checkpoint import catalog
from tformer.metrics import lower_is_better
from tformer.tasks.baselines import constant_baselines
from tformer.training.display import formats_of
from tformer.training.first_look import compare
from tformer.training.loop import constant_metric

Cli = Callable[..., Any]
Train = Callable[..., Path]
NOISY = [(label, text) if number % 4 else ({"animal": "tool", "tool": "animal"}[label], text)
         for number, (label, text) in enumerate(sentences(80, 0))]  # fmt: skip


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "encoder.yaml"
    path.write_text(ENCODER)
    return path


@pytest.fixture
def noisy(tmp_path: Path) -> Path:
    return write_table(tmp_path / "noisy.tsv", ("label", "text"), [*NOISY])


@first_is_quick("name", ["loss", "accuracy", "f1_binary", "f1_macro", "mcc"], quick=2)
def test_each_metric_of_two_classes_decides_by_its_flag(name: str, train: Train, noisy: Path) -> None:
    run = train("--data", noisy, "--best-metric", name, "--set", "training.eval_every=4")
    best = float("inf")
    for record in metrics(run):
        score = lower_is_better(name, record[name])
        assert record["is_best"] == (score < best)
        best = min(best, score)
    marked = [record["step"] for record in metrics(run) if record["is_best"]]
    assert (run / "checkpoints" / "best").read_text().strip().endswith(f"{marked[-1]:08d}")


@pytest.mark.parametrize("name", ["f1_micro", "f1_macro", "accuracy"])
def test_each_metric_of_several_labels_decides_by_its_flag(name: str, train: Train, tmp_path: Path) -> None:
    table = write_table(tmp_path / "many.tsv", ("labels", "text"), many(80))
    flags = ("--objective", "multi_label", "--best-metric", name, "--early-stopping", 1, "--lr", "1e-30")
    run = train("--data", table, *flags, "--set", "training.eval_every=4")
    assert [record["is_best"] for record in metrics(run)] == [True, False]  # and the second one ends the run


def test_ties_go_to_the_lower_loss_also_after_a_resume(train: Train, cli: Cli, tmp_path: Path) -> None:
    """A model that answers alike learns on: the first of its checkpoints is not the best."""
    table = write_table(tmp_path / "clean.tsv", ("label", "text"), [*sentences(80, 0)])
    flags = ("--best-metric", "f1_macro", "--lr", "1e-5", "--set", "training.keep_last=1")
    run = train("--data", table, *flags, "--set", "training.eval_every=2", "--max-steps", 6)
    outcome = cli("train", "--resume", "--out", run, "--max-steps", 12)
    assert outcome.code == 0, outcome.err
    found = metrics(run)
    assert len(found) == 6 and len({record["f1_macro"] for record in found}) == 1
    losses = [record["loss"] for record in found]
    assert [record["is_best"] for record in found] == [
        loss < min(losses[:n], default=9) for n, loss in enumerate(losses)
    ]
    best = found[losses.index(min(losses))]["step"]
    assert best > 6 and catalog.read_pointer(run / "checkpoints" / "best") == f"step-{best:08d}"
    [entry] = [entry for entry in catalog.scan(run / "checkpoints") if entry.step == best]
    assert (entry.score, entry.loss) == (-found[0]["f1_macro"], min(losses))
    assert tformer.load(run).step == best


def test_a_constant_metric_is_named_once_with_one_that_differs(
    cli: Cli, recipe: Path, noisy: Path, tmp_path: Path
) -> None:
    words = ("train", "--config", recipe, "--data", noisy, "--max-steps", 10, "--set", "training.eval_every=2")
    constant = (*words, "--best-metric", "f1_macro", "--lr", "1e-6", "--out", tmp_path / "constant")
    said = [line for line in cli(*constant).err.splitlines() if "in a row" in line]
    [record, *_] = metrics(tmp_path / "constant")
    assert said == [
        f"training.best_metric: f1_macro is {record['f1_macro']:.4f} in 3 validations in a row, so the lowest loss "
        "decides which checkpoint is the best (--best-metric loss tells them apart)"
    ]
    assert "in a row" not in cli(*words, "--lr", "1e-6", "--out", tmp_path / "loss").err


def test_a_constant_metric_is_compared_with_all_others() -> None:
    values = [{"loss": 1.0 - n, "sequence_accuracy": 0.0, "bleu": float(n), "perplexity": 2.0 - n} for n in range(3)]
    note = constant_metric(values, "sequence_accuracy")
    assert note is not None and "sequence_accuracy is 0.0000 in 3 validations" in note and "--best-metric bleu" in note
    assert constant_metric(values, "bleu") is constant_metric(values, "loss") is constant_metric(values, "chrf") is None
    assert constant_metric([{"loss": 1.0}] * 3, "loss") is None


def test_early_stopping_by_macro_f1(train: Train, noisy: Path) -> None:
    run = train("--data", noisy, "--best-metric", "f1_macro", "--early-stopping", 3, "--lr", "1e-30",
                "--set", "training.eval_every=2")  # fmt: skip
    assert [record["step"] for record in metrics(run)] == [2, 4, 6, 8]


REFUSALS = {
    ("--best-metric", "f1"): "found 'f1', expected a metric of the objectives: accuracy, f1_binary, f1_macro, loss",
    ("--best-metric", "recall"): "found the text 'recall', expected 'loss', 'accuracy', ",
    ("--best-metric", "f1_micro"): "of one label per example, micro F1 is the accuracy",
    ("--best-metric", "bleu"): "found 'bleu', expected a metric of the objectives: accuracy, f1_binary, f1_macro, loss",
    ("--best-metric", "f1_binary", "--objective", "multi_label"): "f1_macro, f1_micro, loss",
    ("--best-metric", "f1_binary", "--label-column", "text"): "f1_binary is the F1 of one of two classes, found ",
    ("--early-stopping", "0"): "--early-stopping",
}


@pytest.mark.parametrize("flags", REFUSALS, ids=" ".join)
def test_other_names_are_refused_before_anything_is_written(
    flags: tuple[str, ...], cli: Cli, recipe: Path, tmp_path: Path
) -> None:
    table = write_table(tmp_path / "data.tsv", ("kind", "text", "words"), [(*row, "the cat") for row in NOISY])
    columns = ("--text-column", "words", *(() if "--label-column" in flags else ("--label-column", "kind")))
    outcome = cli("train", "--config", recipe, "--data", table, "--out", tmp_path / "run", *columns, *flags)
    assert outcome.code == 2 and REFUSALS[flags] in " ".join(outcome.err.split())
    assert not (tmp_path / "run").exists()


def test_of_three_images_classes_there_is_no_binary_f1(cli: Cli, recipe: Path, tmp_path: Path) -> None:
    recipe.write_text(IMAGES)
    folder = write_images(tmp_path / "images", 4)
    (folder / "light").rename(folder / "day")
    write_images(tmp_path / "more", 4)
    (tmp_path / "more" / "light").rename(folder / "light")
    outcome = cli("train", "--config", recipe, "--data", folder, "--best-metric", "f1_binary")
    assert outcome.code == 2 and "found 3: dark, day, light" in " ".join(outcome.err.split())


# Which F1 it is


def test_which_class_f1_is_of_is_said_at_the_start_at_each_validation_and_at_the_end(
    cli: Cli, recipe: Path, noisy: Path, tmp_path: Path
) -> None:
    flags = ("--data", noisy, "--best-metric", "f1_binary", "--max-steps", 4, "--out", tmp_path / "run")
    said = cli("train", "--config", recipe, *flags).err
    [labels] = [line for line in said.splitlines() if line.startswith("labels (2): animal, tool")]
    assert labels.endswith("; f1_binary is the F1 of 'tool'")
    [line] = [line for line in said.splitlines() if "valid loss" in line]
    assert " of 'tool'" in line and "macro F1" in line
    assert any(line.startswith("quality   F1 ") and " of 'tool'" in line for line in said.splitlines())
    other = ("--set", "data.labels=[tool,animal]", "--dry-run")
    assert "f1_binary is the F1 of 'animal'" in cli("train", "--config", recipe, *flags[:4], *other).err
    assert "f1_binary 0." in (shown := cli("evaluate", tmp_path / "run").out) and "of 'tool'" in shown


def test_a_label_with_braces_and_markup_is_shown_as_it_is(cli: Cli, recipe: Path, tmp_path: Path) -> None:
    rows = [({"animal": "[red]", "tool": "{x}"}[label], text) for label, text in NOISY]
    table = write_table(tmp_path / "data.tsv", ("label", "text"), [*rows])
    said = cli("train", "--config", recipe, "--data", table, "--max-steps", 2, "--out", tmp_path / "run")
    assert said.code == 0 and "of '{x}'" in said.err


def test_a_model_that_always_answers_the_positive_class_is_no_better_than_that_guess(train: Train, noisy: Path) -> None:
    labels = np.array([0] * 11 + [1] * 9)
    baselines = constant_baselines("classes", ("neg", "pos"), labels.tolist(), labels)
    assert baselines["constant"]["f1_binary"] == 0 and baselines["constant"]["guess"] == "always answering 'neg'"
    f1 = baselines["positive"]["f1_binary"]
    assert f1 == pytest.approx(2 * 9 / 29) and baselines["positive"]["guess"] == "always answering 'pos'"
    values = {"loss": 0.7, "accuracy": 0.45, "f1_binary": f1, "f1_macro": f1 / 2}
    formats = formats_of(tformer.load(train("--data", noisy, "--max-steps", 2)).recipe)
    found = compare(values, baselines, best_metric="f1_binary", formats=formats)
    assert found == (f"F1 {f1:.4f} of 'tool'; not yet better than always answering 'pos' ({f1:.4f})", True)
    swapped = constant_baselines("classes", ("neg", "pos"), (1 - labels).tolist(), labels)
    assert swapped.keys() == {"constant"}  # the most frequent class is the positive one


def test_a_resumed_run_with_another_metric_compares_no_values_of_the_former(
    train: Train, cli: Cli, noisy: Path
) -> None:
    run = train("--data", noisy, "--best-metric", "accuracy", "--max-steps", 8, "--set", "training.eval_every=4")
    again = cli("train", "--resume", "--out", run, "--max-steps", 12, "--best-metric", "loss")
    assert again.code == 0, again.err
    assert metrics(run)[-1]["is_best"]  # an accuracy of -0.5 is lower than every loss
