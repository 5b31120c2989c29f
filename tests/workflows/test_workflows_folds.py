"""Cross-validation: its plan, its table, its devices, and trainings at the same time; the trainings are played."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.end_to_end.conftest import ENCODER
from tests.end_to_end.labelled_examples import sentences, write_table
from tests.workflows.played import WAITS, Children
from tformer.metrics.statistics import Stat, student_t
from tformer.support.errors import InputError, Interrupted
from tformer.training.options import TrainOptions
from tformer.training.request import find_training
from tformer.workers.work import Work
from tformer.workflows.folds import default_folder, fold_table, plan_of_folds, slots_of
from tformer.workflows.sweep import cells
from tformer.workflows.sweep.cells import Result
from tformer.workflows.sweep.run import resolve_plan, run_sweep

NAMES = [f"fold-{number}-seed1337" for number in range(1, 5)]


@pytest.fixture
def options(tmp_path: Path) -> TrainOptions:
    recipe = tmp_path / "encoder.yaml"
    recipe.write_text(ENCODER)
    table = write_table(tmp_path / "data.tsv", ("label", "text"), [*sentences(40, 0)])
    return TrainOptions(config=recipe, data=(str(table),), folds=4, device="cpu")


Run = Callable[..., tuple[Any, list[Result], Children]]


@pytest.fixture
def played(options: TrainOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """`played(slots, ...)`: the table and the results of the four folds, and their trainings: fold n has an accuracy of
    n / 10."""

    def figures(run: str) -> dict[str, Any]:
        return {"accuracy": int(run.split("-")[1]) / 10, "loss": 1.0, "examples": 20, "run": "x"}

    def run(slots: int = 1, **how: Any) -> tuple[Any, list[Result], Children]:
        children, plan = Children(figures=figures, **how), plan_of_folds(options)
        monkeypatch.setattr(cells, "run_child", children)
        each = [{"OMP_NUM_THREADS": str(number)} for number in range(slots)]
        work = Work(should_stop=lambda: WAITS in children.codes.values() and len(children.trained) == 4)
        found = run_sweep(plan, resolve_plan(plan), tmp_path / "out", slots=each, tabulate=fold_table, work=work)
        return *found, children

    return run


# The table


def test_the_table_has_a_row_for_each_fold_and_mean_deviation_and_interval(played: Run, tmp_path: Path) -> None:
    table = played()[0]
    values = [0.1, 0.2, 0.3, 0.4]
    mean, deviation = statistics.fmean(values), statistics.stdev(values)
    reach = 3.182446 * deviation / 2  # Student's t with 3 degrees of freedom
    expected = {"1": 0.1, "2": 0.2, "3": 0.3, "4": 0.4, "mean": mean, "deviation": deviation,
                "95 % low": mean - reach, "95 % high": mean + reach}  # fmt: skip
    found = table.summary["folds"]
    assert {name: row["accuracy"] for name, row in found.items()} == pytest.approx(expected, abs=1e-6)
    lines = (tmp_path / "out" / "table.md").read_text().splitlines()
    assert lines[0] == "| fold | examples | accuracy | loss |"
    assert lines[2] == "| 1 | 20 | 0.1000 | 1.0000 |" and lines[6] == "| mean |  | 0.2500 | 1.0000 |"
    assert "Student's t" in lines[-1]
    written = json.loads((tmp_path / "out" / "table.json").read_text())
    assert written["folds"]["mean"]["accuracy"] == pytest.approx(mean)
    assert (tmp_path / "out" / "table.tex").read_text().count(r"\\") == 9
    assert "95 % low" in (tmp_path / "out" / "table.csv").read_text()


@pytest.mark.parametrize("degrees", [1, 2, 4, 9, 30, 500])
def test_student_s_t_is_that_of_scipy(degrees: int) -> None:
    stats = pytest.importorskip("scipy.stats")
    assert student_t(degrees) == pytest.approx(stats.t.ppf(0.975, degrees), rel=1e-6)


def test_an_interval_holds_the_mean_of_a_normal_distribution_19_times_of_20() -> None:
    draws = np.random.default_rng(0).normal(size=(400, 5))
    intervals = [Stat.of(list(row)).interval for row in draws]  # type: ignore[union-attr]
    assert 0.92 < np.mean([low < 0 < high for low, high in intervals]) < 0.98  # type: ignore[misc]
    assert Stat.of([1.0]).interval is None  # type: ignore[union-attr]


def test_a_fold_that_failed_is_named_and_the_others_are_averaged(played: Run) -> None:
    table, results, _ = played(codes={NAMES[1]: 4})
    found = table.summary["folds"]
    assert found["2 (diverged)"] == {} and found["mean"]["accuracy"] == pytest.approx((0.1 + 0.3 + 0.4) / 3)
    assert [result.status for result in results] == ["done", "diverged", "done", "done"]


# The plan


def test_each_training_is_one_that_a_user_could_start_alone(played: Run) -> None:
    children = played()[2]
    assert children.trained == NAMES
    for number, words in enumerate((words for words in children.commands if words[0] == "train"), 1):
        assert f"data.fold={number}" in words and "data.folds=4" in words and "--tokenizer" not in words


def test_the_same_command_goes_on(played: Run) -> None:
    played(codes={NAMES[2]: 1})
    _, results, again = played()
    assert again.trained == [NAMES[2]] and all(result.status == "done" for result in results)


def test_the_default_folder_is_that_of_the_same_plan_or_a_new_one(
    options: TrainOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cells, "run_child", Children())
    plan = plan_of_folds(options)
    assert default_folder(plan) == Path("runs/folds-1")
    run_sweep(plan, resolve_plan(plan), default_folder(plan), tabulate=fold_table)
    assert default_folder(plan) == Path("runs/folds-1")
    assert default_folder(plan_of_folds(replace(options, folds=3))) == Path("runs/folds-2")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"folds": 1}, "--folds: found 1, expected at least 2"),
        ({"folds": -3}, "--folds: found -3, expected at least 2"),
        ({"folds": 5000}, "data.folds: found 5000, expected at most 1000"),
        ({"data": ("-",)}, "--folds reads the data several times, standard input only once"),
        ({"stop_at_step": 3}, "--stop-at-step: a sweep sets this flag of its trainings itself"),
        ({"config": None, "arch": "gpt"}, "data.folds: found 4, expected null: only labelled examples are cut into"),
        ({"sets": ("data.fold=9", "data.folds=3"), "folds": None}, "data.fold: found 9, expected at most data.folds"),
    ],
)
def test_what_cannot_be_cross_validated_is_refused(
    changes: dict[str, Any], message: str, options: TrainOptions
) -> None:
    wrong = replace(options, **changes)
    with pytest.raises(InputError) as caught:
        find_training(wrong) if wrong.folds is None else resolve_plan(plan_of_folds(wrong))
    assert message in caught.value.message


# Several at the same time


def test_trainings_run_at_the_same_time_one_in_each_slot(played: Run) -> None:
    table, results, children = played(slots=2, together=2)  # each waits for another one
    assert children.most == 2 and sorted(children.trained) == NAMES
    assert {slot["OMP_NUM_THREADS"] for slot in children.slots} == {"0", "1"}
    assert [result.choices["fold"] for result in results] == ["1", "2", "3", "4"]  # in the order of the folds
    assert table.summary["folds"]["mean"]["accuracy"] == pytest.approx(0.25)


def test_the_result_does_not_depend_on_the_number_of_slots(played: Run, tmp_path: Path) -> None:
    played(slots=3)
    several = (tmp_path / "out" / "table.csv").read_text()
    (tmp_path / "out").rename(tmp_path / "several")
    played()
    assert (tmp_path / "out" / "table.csv").read_text() == several


def test_a_refusal_of_one_stops_the_others_which_save(played: Run) -> None:
    stopped: list[str] = []
    with pytest.raises(InputError, match="fold-1-seed1337: it went wrong"):
        played(slots=2, together=2, codes={NAMES[0]: 2, NAMES[1]: WAITS}, stopped=stopped)
    assert stopped == [NAMES[1]]


def test_an_interrupt_stops_all_and_says_how_many_are_finished(played: Run) -> None:
    stopped: list[str] = []
    with pytest.raises(Interrupted, match="interrupted: 2 of 4 trainings are finished"):
        played(slots=2, codes={NAMES[2]: WAITS, NAMES[3]: WAITS}, stopped=stopped)
    assert sorted(stopped) == NAMES[2:]


def test_devices_give_each_training_its_threads_or_its_gpu(
    options: TrainOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    assert list(slots_of(options)) == [{}]
    assert list(slots_of(replace(options, devices="2"))) == [{"OMP_NUM_THREADS": "4"}] * 2
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    gpus = replace(options, devices="auto", device=None)
    assert list(slots_of(gpus)) == [{"CUDA_VISIBLE_DEVICES": str(number)} for number in range(3)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7")
    assert list(slots_of(replace(gpus, devices="2"))) == [{"CUDA_VISIBLE_DEVICES": "4"}, {"CUDA_VISIBLE_DEVICES": "6"}]
    assert "CUDA_VISIBLE_DEVICES" in os.environ
