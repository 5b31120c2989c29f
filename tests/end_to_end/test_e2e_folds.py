"""Cross-validation equals the same folds trained one by one; no example is predicted by a model that has read it."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

import tformer
from tests.end_to_end.conftest import ENCODER, IMAGES
from tests.end_to_end.labelled_examples import many, sentences, write_images, write_table
from tformer.workflows.sweep import cells
from tformer.workflows.sweep.cells import Ended, Slot

Cli = Callable[..., Any]
SHORT = ENCODER.replace("max_steps: 40", "max_steps: 6").replace("eval_every: 20, save_every: 20", "eval_every: 3")


@pytest.fixture
def here(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands of the trainings and evaluations, which run in this process."""
    commands: list[list[str]] = []

    def run(words: list[str], log: Path, should_stop: object, slot: Slot) -> Ended:
        commands.append(list(words))
        outcome = cli(*words)
        return Ended(outcome.code, outcome.out, outcome.err.strip().rpartition("\n")[2], 2**20)

    monkeypatch.setattr(cells, "run_child", run)
    return commands


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "short.yaml"
    path.write_text(SHORT)
    return path


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return write_table(tmp_path / "data.tsv", ("label", "text"), [*sentences(40, 0)])


@pytest.fixture
def cross_validate(here: list[list[str]], recipe: Path, tmp_path: Path) -> Callable[..., Any]:
    """`cross_validate(data, ...)`: two folds of the short recipe."""
    usual = {"folds": 2, "config": recipe, "out": tmp_path / "cv", "quiet": True}
    return lambda data, **more: tformer.cross_validate(data, **(usual | more))


def weights(run: Path) -> Any:
    [file] = (run / "checkpoints").glob("step-00000006/model.safetensors")
    return load_file(file)


def test_it_equals_the_same_folds_trained_one_by_one(
    cross_validate: Callable[..., Any], cli: Cli, recipe: Path, table: Path, tmp_path: Path
) -> None:
    found = cross_validate(table)
    for fold in (1, 2):
        alone = tmp_path / f"alone-{fold}"
        flags = ("--set", "data.folds=2", "--set", f"data.fold={fold}")
        assert cli("train", "--config", recipe, "--data", table, *flags, "--out", alone).code == 0
        first, second = weights(found.runs[fold - 1]), weights(alone)
        assert first.keys() == second.keys() and all(first[name].equal(second[name]) for name in first)
        report = json.loads(cli("evaluate", alone, "--json").out)
        assert f"fold {fold} of 2" in report["data"]
        own = found.folds[fold - 1]
        assert own == {name: report[name] for name in own} and "accuracy" in own
        assert tformer.load(alone).tokenizer.to_json() == tformer.load(found.runs[fold - 1]).tokenizer.to_json()  # type: ignore[union-attr]
    values = [each["accuracy"] for each in found.folds]
    assert found.mean["accuracy"] == pytest.approx(np.mean(values))
    assert found.deviation["accuracy"] == pytest.approx(np.std(values, ddof=1))
    low, high = found.interval["accuracy"]
    assert (low + high) / 2 == pytest.approx(found.mean["accuracy"])


def test_each_example_is_predicted_once_by_the_model_of_its_fold(
    cross_validate: Callable[..., Any], table: Path, tmp_path: Path
) -> None:
    found = cross_validate(table)
    rows = sentences(40, 0)
    assert [each["row"] for each in found.predictions] == list(range(40))
    assert [(each["label"], each["text"]) for each in found.predictions] == rows
    models = [tformer.load(run) for run in found.runs]
    for each in found.predictions[::5]:
        answer = models[each["fold"] - 1].classify(each["text"])
        assert answer.label == each["prediction"]
        assert answer.probabilities["tool"] == pytest.approx(each["probability_tool"], abs=1e-5)
        assert each["probability"] == max(each["probability_tool"], each["probability_animal"])
    for fold, figures in enumerate(found.folds, 1):
        own = [each["label"] == each["prediction"] for each in found.predictions if each["fold"] == fold]
        assert len(own) == figures["examples"] and np.mean(own) == pytest.approx(figures["accuracy"])
    with (tmp_path / "cv" / "predictions.csv").open(newline="") as file:
        written = list(csv.DictReader(file))
    assert [row["prediction"] for row in written] == [each["prediction"] for each in found.predictions]
    assert list(written[0])[-2:] == ["probability_animal", "probability_tool"]


def test_predictions_name_the_rows_of_the_data_where_bad_ones_are_dropped(
    cross_validate: Callable[..., Any], tmp_path: Path
) -> None:
    rows = sentences(40, 0)
    rows[3] = ("", rows[3][1])
    found = cross_validate(write_table(tmp_path / "gaps.tsv", ("label", "text"), rows), bad_rows="drop")
    assert [each["row"] for each in found.predictions] == [number for number in range(40) if number != 3]
    assert all(rows[each["row"]] == (each["label"], each["text"]) for each in found.predictions)


def test_columns_of_the_data_with_names_of_the_predictions_keep_their_cells(
    cross_validate: Callable[..., Any], tmp_path: Path
) -> None:
    rows = [(label, text, f"split {number}") for number, (label, text) in enumerate(sentences(40, 0))]
    found = cross_validate(write_table(tmp_path / "split.tsv", ("label", "text", "fold"), rows))
    assert [each["table_fold"] for each in found.predictions] == [cell for *_, cell in rows]
    assert {each["fold"] for each in found.predictions} == {1, 2}


def grouped(tmp_path: Path) -> Path:
    rows = [(label, text, f"author {number // 4}") for number, (label, text) in enumerate(sentences(40, 0))]
    return write_table(tmp_path / "grouped.tsv", ("label", "text", "author"), [*rows])


def test_the_rows_of_a_group_are_in_one_fold(cross_validate: Callable[..., Any], cli: Cli, tmp_path: Path) -> None:
    found = cross_validate(grouped(tmp_path), group_column="author")
    assert [each["author"] for each in found.predictions] == [f"author {number // 4}" for number in range(40)]
    assert list(found.predictions[0]) == ["row", "fold", "text", "label", "author", "prediction", "probability",
                                          "probability_animal", "probability_tool"]  # fmt: skip
    folds: dict[int, set[int]] = {}
    for each in found.predictions:
        folds.setdefault(each["row"] // 4, set()).add(each["fold"])
    assert len(folds) == 10 and all(len(own) == 1 for own in folds.values())
    other = write_table(tmp_path / "other.tsv", ("label", "text"), [*sentences(6, 3)])  # it needs no groups
    assert cli("evaluate", found.runs[0], "--data", other).code == 0
    assert cli("classify", found.runs[0], "--input", other).code == 0


def test_texts_that_occur_twice_are_in_one_fold(cross_validate: Callable[..., Any], tmp_path: Path) -> None:
    rows = [*sentences(20, 0), *((label, text.upper()) for label, text in sentences(20, 0))]
    table = write_table(tmp_path / "twice.tsv", ("label", "text"), [*rows])
    found = cross_validate(table)
    folds = [each["fold"] for each in found.predictions]
    assert folds[:20] == folds[20:] and set(folds) == {1, 2}


def test_a_held_out_part_divides_no_group(cli: Cli, recipe: Path, tmp_path: Path) -> None:
    run, listing = tmp_path / "run", tmp_path / "found.jsonl"
    flags = ("--data", grouped(tmp_path), "--group-column", "author", "--out", run)
    assert cli("train", "--config", recipe, *flags).code == 0
    assert cli("evaluate", run, "--predictions", listing).code == 0
    numbers = [json.loads(line)["example"] for line in listing.read_text().splitlines()]
    assert len(numbers) == 4 and len({number // 4 for number in numbers}) == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--group-column", "writer"), "no column 'writer'"),
        (("--group-column", "label", "--label-column", "label"), "label and group are the same column 'label'"),
        (("--group-column", "author", "--set", "data.valid_split=last"), "expected null with data.valid_split last"),
        (("--group-column", "author", "--set", "data.folds=30"), "found 10 groups, expected at least 30"),
    ],
)
def test_wrong_groups_are_refused(flags: tuple[str, ...], message: str, cli: Cli, recipe: Path, tmp_path: Path) -> None:
    outcome = cli("train", "--config", recipe, "--data", grouped(tmp_path), *flags, "--out", tmp_path / "run")
    assert outcome.code == 2 and message in " ".join(outcome.err.split()) and not (tmp_path / "run").exists()


def test_rows_in_memory_and_the_same_call_again(
    cross_validate: Callable[..., Any], here: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [(text, label) for label, text in sentences(24, 1)]
    first = cross_validate(rows, out=None)
    count = len(here)
    again = cross_validate(rows, out=None)
    assert len(here) == count and first == again and first.out == Path("runs/folds-1")


def test_a_threshold_is_chosen_on_validation_data_never_on_the_fold(
    cross_validate: Callable[..., Any], cli: Cli, table: Path
) -> None:
    found = cross_validate(table)
    report = json.loads(cli("evaluate", found.runs[0], "--threshold", "best-accuracy", "--json").out)
    assert report["examples"] == 20 and report["data"].startswith("fold 1 of 2")
    said = cli("evaluate", found.runs[0], "--threshold", "best-accuracy").err
    assert "these very examples" not in said


def test_images_and_several_labels_have_folds(cross_validate: Callable[..., Any], tmp_path: Path) -> None:
    images, folder = tmp_path / "images.yaml", write_images(tmp_path / "images", 8)
    images.write_text(IMAGES.replace("max_steps: 40", "max_steps: 4"))
    found = cross_validate(folder, config=images)
    assert {each["fold"] for each in found.predictions} == {1, 2} and "image" in found.predictions[0]
    table = write_table(tmp_path / "many.tsv", ("labels", "text"), many(24))
    several = cross_validate(table, objective="multi_label", out=tmp_path / "of-labels")
    assert "f1_micro" in several.mean and isinstance(several.predictions[0]["prediction"], list)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"folds": 1}, "folds: found 1, expected at least 2"),
        ({"resume": True}, "cross_validate takes no resume"),
        ({"folds": 60}, "expected at least 60, one for each fold"),
    ],
)
def test_python_s_refusals(
    options: dict[str, Any], message: str, cross_validate: Callable[..., Any], table: Path
) -> None:
    with pytest.raises(tformer.InputError) as caught:
        cross_validate(table, **options)
    assert message in str(caught.value) and "--skip-invalid" not in str(caught.value.hint)
    with pytest.raises(tformer.InputError, match="train takes no folds") as refused:
        tformer.train(table, folds=3)
    assert "cross_validate" in str(refused.value.hint)


@pytest.mark.slow
def test_the_command_shows_the_table_and_goes_on_after_an_interrupt(
    cli_process: Callable[..., Any], recipe: Path, table: Path, tmp_path: Path
) -> None:
    words = ("train", "--config", recipe, "--data", table, "--folds", 2, "--devices", 2, "--out", "cv")
    whole = cli_process(*words, cwd=tmp_path)
    out, err = whole.communicate(timeout=600)
    assert whole.returncode == 0, err
    assert out.startswith("| fold | examples | accuracy |") and "| 95 % high |" in out and "predictions.csv" in err
    (tmp_path / "cv" / "cells" / "fold-2-seed1337.json").unlink()
    again = cli_process(*words, "--json", cwd=tmp_path)
    out, err = again.communicate(timeout=600)
    assert again.returncode == 0 and "fold-1-seed1337  loss" in err and "finished before" in err
    assert json.loads(out)["folds"]["mean"].keys() >= {"accuracy", "loss"}


def test_the_command_lists_the_trainings_of_a_dry_run(cli: Cli, recipe: Path, table: Path, tmp_path: Path) -> None:
    outcome = cli("train", "--config", recipe, "--data", table, "--folds", 3, "--dry-run", "--json")
    assert [each["choices"] for each in json.loads(outcome.out)["cells"]] == [{"fold": str(n)} for n in (1, 2, 3)]
    assert not list(tmp_path.glob("runs"))
