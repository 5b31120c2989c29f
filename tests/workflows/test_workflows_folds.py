"""Cross-validation: its plan, its table, its devices, and trainings at the same time; the trainings are played."""

from __future__ import annotations

import json
import os
import statistics
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.end_to_end.conftest import ENCODER
from tests.end_to_end.labelled_examples import sentences, write_table
from tformer.metrics.statistics import Stat, student_t
from tformer.support.errors import InputError, Interrupted, TformerError
from tformer.training.options import TrainOptions
from tformer.workers.work import ShouldStop, Work
from tformer.workflows import folds
from tformer.workflows.folds import default_folder, fold_table, plan_of_folds, slots_of
from tformer.workflows.sweep import cells
from tformer.workflows.sweep.cells import Ended, Result, Slot
from tformer.workflows.sweep.grid import Cell
from tformer.workflows.sweep.run import resolve_plan, run_sweep


@dataclass
class Trainings:
    """Plays `tformer train` and `tformer evaluate`: fold n has an accuracy of n / 10."""

    together: int = 1  # trainings that wait for each other
    codes: dict[str, int] = field(default_factory=dict)
    commands: list[tuple[list[str], Slot]] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)
    most: int = 0

    def __post_init__(self) -> None:
        self.barrier, self.running, self.lock = threading.Barrier(self.together), 0, threading.Lock()

    def __call__(self, words: list[str], log: Path, should_stop: ShouldStop, slot: Slot) -> Ended:
        with self.lock:
            self.commands.append((list(words), slot))
            self.running += 1
            self.most = max(self.most, self.running)
        run = Path(words[words.index("--out") + 1] if words[0] == "train" else words[1])
        number = int(run.name.split("-")[1])
        try:
            if words[0] == "evaluate":
                figures = {"accuracy": number / 10, "loss": 1.0, "examples": 20, "run": "x"}
                return Ended(0, json.dumps(figures), "", 1)
            if self.together > 1:
                self.barrier.wait(timeout=20)
            code = self.codes.get(run.name, 0)
            while code == WAITS:
                if should_stop():
                    self.stopped.append(run.name)
                    return Ended(130, "", "interrupted", 1, True)
            run.mkdir(exist_ok=True)
            (run / "recipe.yaml").write_text("seed: 1\n")
            best = {"split": "valid", "step": 2, "loss": 1.5, "is_best": True}
            (run / "metrics.jsonl").write_text(json.dumps(best) + "\n")
            summary = {"parameters": 10, "flops_per_token": 60.0, "peak_device_bytes": None}
            return Ended(code, json.dumps(summary), "it went wrong" if code else "", 2**20)
        finally:
            with self.lock:
                self.running -= 1

    @property
    def trained(self) -> list[str]:
        return [Path(words[words.index("--out") + 1]).name for words, _ in self.commands if words[0] == "train"]


WAITS = -1
"""Code of a training that goes on until it is stopped."""


class Quiet:
    def begins(self, cell: Cell, number: int, total: int, log: Path) -> None: ...
    def ended(self, result: Result, number: int, total: int, *, seconds: float | None) -> None: ...


@pytest.fixture
def options(tmp_path: Path) -> TrainOptions:
    recipe = tmp_path / "encoder.yaml"
    recipe.write_text(ENCODER)
    table = write_table(tmp_path / "data.tsv", ("label", "text"), [*sentences(40, 0)])
    return TrainOptions(config=recipe, data=(str(table),), folds=4, device="cpu")


Run = Callable[..., tuple[Any, list[Result]]]


@pytest.fixture
def played(options: TrainOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """`played(trainings, slots)`: the table and the results of the four folds."""

    def run(trainings: Trainings, slots: int = 1, stop: ShouldStop = lambda: False) -> tuple[Any, list[Result]]:
        monkeypatch.setattr(cells, "run_child", trainings)
        plan = plan_of_folds(options)
        each = [{"OMP_NUM_THREADS": str(number)} for number in range(slots)]
        return run_sweep(plan, resolve_plan(plan), tmp_path / "out", observer=Quiet(), slots=each, tabulate=fold_table,
                         work=Work(should_stop=stop))  # fmt: skip

    return run


# The table


def test_the_table_has_a_row_for_each_fold_and_mean_deviation_and_interval(played: Run, tmp_path: Path) -> None:
    table, _ = played(Trainings())
    values = [0.1, 0.2, 0.3, 0.4]
    mean, deviation = statistics.fmean(values), statistics.stdev(values)
    reach = 3.182446 * deviation / 2  # Student's t with 3 degrees of freedom
    expected = {"1": 0.1, "2": 0.2, "3": 0.3, "4": 0.4, "mean": mean, "deviation": deviation,
                "95 % low": mean - reach, "95 % high": mean + reach}  # fmt: skip
    found = table.summary()["folds"]
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
    table, results = played(Trainings(codes={"fold-2-seed1337": 4}))
    found = table.summary()["folds"]
    assert found["2 (diverged)"] == {} and found["mean"]["accuracy"] == pytest.approx((0.1 + 0.3 + 0.4) / 3)
    assert [result.status for result in results] == ["done", "diverged", "done", "done"]


# The plan


def test_each_training_is_one_that_a_user_could_start_alone(played: Run) -> None:
    trainings = Trainings()
    played(trainings)
    words = [words for words, _ in trainings.commands if words[0] == "train"]
    assert trainings.trained == [f"fold-{number}-seed1337" for number in range(1, 5)]
    for number, each in enumerate(words, 1):
        assert f"data.fold={number}" in each and "data.folds=4" in each and "--tokenizer" not in each


def test_the_same_command_goes_on(played: Run) -> None:
    played(Trainings(codes={"fold-3-seed1337": 1}))
    again = Trainings()
    _, results = played(again)
    assert again.trained == ["fold-3-seed1337"] and all(result.status == "done" for result in results)


def test_the_default_folder_is_that_of_the_same_plan_or_a_new_one(
    options: TrainOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cells, "run_child", Trainings())
    monkeypatch.setattr(folds, "write_predictions", lambda out, results: "")
    plan = plan_of_folds(options)
    assert default_folder(plan) == Path("runs/folds-1")
    run_sweep(plan, resolve_plan(plan), default_folder(plan), observer=Quiet(), tabulate=fold_table)
    assert default_folder(plan) == Path("runs/folds-1")
    other = plan_of_folds(TrainOptions(config=options.config, data=options.data, folds=3))
    assert default_folder(other) == Path("runs/folds-2")


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
    from dataclasses import replace

    from tformer.training.request import find_start

    wrong = replace(options, **changes)
    with pytest.raises(InputError) as caught:
        find_start(wrong) if wrong.folds is None else resolve_plan(plan_of_folds(wrong))
    assert message in caught.value.message


# Several at the same time


def test_trainings_run_at_the_same_time_one_in_each_slot(played: Run) -> None:
    trainings = Trainings(together=2)  # each waits for another one
    table, results = played(trainings, slots=2)
    assert trainings.most == 2 and sorted(trainings.trained) == [f"fold-{number}-seed1337" for number in range(1, 5)]
    assert {slot["OMP_NUM_THREADS"] for _, slot in trainings.commands} == {"0", "1"}
    assert [result.choices["fold"] for result in results] == ["1", "2", "3", "4"]  # in the order of the folds
    assert table.summary()["folds"]["mean"]["accuracy"] == pytest.approx(0.25)


def test_the_result_does_not_depend_on_the_number_of_slots(played: Run, tmp_path: Path) -> None:
    played(Trainings(), slots=3)
    several = (tmp_path / "out" / "table.csv").read_text()
    (tmp_path / "out").rename(tmp_path / "several")
    played(Trainings())
    assert (tmp_path / "out" / "table.csv").read_text() == several


def test_a_refusal_of_one_stops_the_others_which_save(played: Run) -> None:
    trainings = Trainings(together=2, codes={"fold-1-seed1337": 2, "fold-2-seed1337": WAITS})
    with pytest.raises(InputError, match="fold-1-seed1337: it went wrong"):
        played(trainings, slots=2)
    assert trainings.stopped == ["fold-2-seed1337"] and len(trainings.trained) == 2


def test_an_interrupt_stops_all_and_says_how_many_are_finished(played: Run) -> None:
    trainings = Trainings(codes={"fold-3-seed1337": WAITS, "fold-4-seed1337": WAITS})
    with pytest.raises(Interrupted, match="interrupted: 2 of 4 trainings are finished"):
        played(trainings, slots=2, stop=lambda: len(trainings.trained) == 4)
    assert sorted(trainings.stopped) == ["fold-3-seed1337", "fold-4-seed1337"]
    with pytest.raises(TformerError):
        raise Interrupted("x", signal_number=2)


def test_devices_give_each_training_its_threads_or_its_gpu(
    options: TrainOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    import torch

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
