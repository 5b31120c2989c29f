"""Successive halving: rungs and budget, which variants go on, failures, resuming, and the weights of the whole grid."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.workflows.played import SUMMARY
from tformer.support.errors import InputError, Interrupted
from tformer.workers.work import ShouldStop, Work
from tformer.workflows.sweep import cells
from tformer.workflows.sweep.cells import Ended, Result, Slot
from tformer.workflows.sweep.halving import Ladder, best_variants, rungs_of
from tformer.workflows.sweep.plan import Plan, Task
from tformer.workflows.sweep.run import Grid, resolve_plan, run_sweep
from tformer.workflows.sweep.table import document, make_table, markdown

SIZES = tuple(range(1, 10))
"""Values of the axis; the synthetic loss of each is known."""


@dataclass
class Trainings:
    """Plays `tformer train` for sweeps of a recipe: the loss of a run after a step, by its value on the axis.

    steps: reached by each run; trained: in all; commands: a list of words each; failing: exit codes by (value, step).
    """

    recipe: Path
    folder: Path
    loss: Callable[[int, int], float] = lambda value, step: abs(value - 7) + 100 / step
    steps: dict[str, int] = field(default_factory=dict)
    trained: int = 0
    commands: list[tuple[int, int]] = field(default_factory=list)
    failing: dict[tuple[int, int], int] = field(default_factory=dict)
    stop_after: int | None = None

    def plan(self, *, steps: int = 90, values: tuple[int, ...] = SIZES, **more: Any) -> Plan:
        task = Task(config=str(self.recipe), vary={"schedule.warmup_steps": values})
        return Plan(**{"max_steps": steps, "halving": 3, **more}, tasks=(task,))

    def sweep(self, asked: Plan | None = None, out: str = "out") -> tuple[list[Result], Grid]:
        asked, work = asked or self.plan(), Work(should_stop=lambda: self.stopping)
        grid = resolve_plan(asked)
        return run_sweep(asked, grid, self.folder / out, work=work)[1], grid

    @property
    def stopping(self) -> bool:
        return self.stop_after is not None and len(self.commands) > self.stop_after

    def __call__(self, words: list[str], log: Path, should_stop: ShouldStop, slot: Slot) -> Ended:
        run = Path(words[words.index("--out") + 1])
        sets = dict(word.split("=", 1) for word in words if "=" in word)
        value, end = int(sets["schedule.warmup_steps"]), int(sets["training.max_steps"])
        goal = int(words[words.index("--stop-at-step") + 1]) if "--stop-at-step" in words else end
        assert ("--resume" in words) == (run.name in self.steps)  # it goes on from its checkpoint
        self.commands.append((value, goal))
        code = self.failing.get((value, goal), 130 if self.stopping else 0)
        run.mkdir(exist_ok=True)
        (run / "recipe.yaml").write_text("seed: 1\n")
        if code == 0:
            self.trained += goal - self.steps.get(run.name, 0)
            self.steps[run.name] = goal
            records = [
                {"split": "train", "step": goal, "loss": 2.0, "tokens": 10, "seconds": 1.0},
                {"split": "valid", "step": goal, "loss": self.loss(value, goal), "is_best": True},
            ]
            with (run / "metrics.jsonl").open("a") as file:
                file.writelines(json.dumps(record) + "\n" for record in records)
        return Ended(code, json.dumps(SUMMARY), "played", 2**20, self.stopping)


@pytest.fixture
def trainings(tiny_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trainings:
    fake = Trainings(tiny_recipe, tmp_path)
    monkeypatch.setattr(cells, "run_child", fake)
    return fake


def rungs(results: list[Result]) -> dict[int, list[int]]:
    """The steps of the rungs that each value of the axis reached."""
    return {int(result.choices["warmup_steps"]): [int(step) for step, _ in result.rungs] for result in results}


def finished(results: list[Result]) -> list[int]:
    return [int(result.choices["warmup_steps"]) for result in results if result.status == "done"]


# --- rungs and budget -------------------------------------------------------------------------------------------------


def test_nine_variants_are_three_rungs_of_a_third_each_and_three_times_the_steps() -> None:
    made = rungs_of(9, max_steps=900, eta=3)
    assert [(rung.variants, rung.steps, rung.last) for rung in made] == [
        (9, 100, False),
        (3, 300, False),
        (1, 900, True),
    ]
    ladder = Ladder("sweep", 3, 1, made)
    assert (ladder.steps, ladder.grid_steps, ladder.trainings) == (9 * 100 + 3 * 200 + 600, 8100, 13)


@given(st.integers(1, 200), st.integers(1, 5000), st.integers(2, 5))
def test_rungs_grow_in_steps_shrink_in_variants_and_cost_no_more_than_the_grid(
    variants: int, steps: int, eta: int
) -> None:
    made = rungs_of(variants, max_steps=steps, eta=eta)
    assert made[0].variants == variants and made[-1].steps == steps and [rung.last for rung in made].count(True) == 1
    for one, above in itertools.pairwise(made):
        assert one.steps < above.steps and above.variants == one.variants // eta >= 1
    ladder = Ladder("sweep", eta, 2, made)
    assert ladder.steps <= ladder.grid_steps == 2 * variants * steps


def test_the_line_before_the_start_states_rungs_budget_and_the_whole_grids() -> None:
    ladder = Ladder("sweep", 3, 2, rungs_of(9, max_steps=900, eta=3))
    assert ladder.describe() == (
        "successive halving, eta 3: 9 variants to step 100, 3 to 300, 1 to 900, 2 seeds each; 4,200 steps, 26% of the "
        "16,200 of the whole grid"
    )


def test_the_budget_is_what_was_said(trainings: Trainings) -> None:
    results, grid = trainings.sweep(trainings.plan(seeds=2))
    assert trainings.trained == grid.ladders[0].steps == sum(result.steps or 0 for result in results)
    assert len(trainings.commands) == grid.trainings


# --- which variants go on ---------------------------------------------------------------------------------------------


def test_the_best_of_a_synthetic_objective_survives(trainings: Trainings) -> None:
    results, _ = trainings.sweep()
    assert rungs(results) == {
        1: [10], 2: [10], 3: [10], 4: [10], 5: [10], 6: [10, 30], 7: [10, 30, 90], 8: [10, 30], 9: [10]
    }  # fmt: skip
    assert finished(results) == [7] and {result.status for result in results} == {"done", "dropped"}


def test_a_variant_is_judged_at_its_rung_not_by_what_it_reached_later(trainings: Trainings) -> None:
    trainings.loss = lambda value, step: float(value) if step == 10 else 100.0 - value
    results, _ = trainings.sweep()
    assert [value for value, steps in rungs(results).items() if len(steps) > 1] == [1, 2, 3]
    assert finished(results) == [3]


def test_of_equal_variants_the_earlier_ones_go_on(trainings: Trainings) -> None:
    trainings.loss = lambda value, step: 1.0
    results, _ = trainings.sweep()
    assert [value for value, steps in rungs(results).items() if len(steps) > 1] == [1, 2, 3] and finished(results) == [
        1
    ]


def test_seeds_of_a_variant_go_on_together_by_their_mean() -> None:
    assert best_variants({"a": [1.0, 9.0], "b": [4.0, 4.0], "c": [6.0, 6.0]}, 1) == {"b"}


def test_a_training_that_failed_counts_as_worst_and_none_is_taken() -> None:
    assert best_variants({"a": [None, 0.0], "b": [5.0, 5.0], "c": [math.nan, 1.0]}, 2) == {"b"}
    assert best_variants({"a": [None], "b": [None]}, 1) == set()


def test_a_child_that_fails_is_dropped_with_its_word_and_the_others_go_on(trainings: Trainings) -> None:
    trainings.failing = {(7, 10): 4, (8, 30): 5}
    results, _ = trainings.sweep()
    status = {int(result.choices["warmup_steps"]): result.status for result in results}
    assert (status[7], status[8]) == ("diverged", "out of memory")
    assert finished(results) == [6]


def test_higher_is_better_where_the_metric_says_so(trainings: Trainings) -> None:
    trainings.loss = lambda value, step: float(value)
    asked = trainings.plan()
    grid = resolve_plan(asked)
    for cell in grid.cells:
        training = cell.recipe.training.model_copy(update={"best_metric": "accuracy"})
        object.__setattr__(cell, "recipe", cell.recipe.model_copy(update={"training": training}))
    played = trainings.__call__

    def with_accuracy(words: list[str], *more: Any) -> Ended:
        ended = played(words, *more)
        file = Path(words[words.index("--out") + 1]) / "metrics.jsonl"
        file.write_text(file.read_text().replace('"loss"', '"accuracy"'))
        return ended

    cells.run_child = with_accuracy  # type: ignore[assignment]  # the fixture restores it
    _, results = run_sweep(asked, grid, trainings.folder / "out")
    assert finished(results) == [9]


# --- resuming ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop_after", [0, 4, 9, 11, 12])
def test_an_interrupted_halving_goes_on_and_ends_as_one_that_was_not(trainings: Trainings, stop_after: int) -> None:
    straight, _ = trainings.sweep(out="straight")
    trainings.steps, trainings.commands, trainings.trained = {}, [], 0
    trainings.stop_after = stop_after
    with pytest.raises(Interrupted, match=f"{stop_after} of 13 trainings are finished"):
        trainings.sweep()
    before, trainings.stop_after = trainings.commands[:stop_after], None
    trainings.commands.clear()
    begun = dict.fromkeys((run.name for run in (trainings.folder / "out" / "runs").iterdir()), 0)
    trainings.steps = begun | trainings.steps
    results, grid = trainings.sweep()
    assert [result.rungs for result in results] == [result.rungs for result in straight]
    assert not set(before) & set(trainings.commands) and trainings.trained == grid.ladders[0].steps


def test_the_same_command_again_trains_nothing(trainings: Trainings) -> None:
    first, _ = trainings.sweep()
    trainings.commands.clear()
    again, _ = trainings.sweep()
    assert trainings.commands == [] and again == first


def test_a_folder_of_another_eta_is_refused(trainings: Trainings) -> None:
    trainings.sweep()
    with pytest.raises(InputError, match="halving is 3 in the folder, null in this command"):
        trainings.sweep(trainings.plan(halving=None))


# --- the table --------------------------------------------------------------------------------------------------------


def test_the_table_shows_every_rung_what_was_dropped_and_the_budget(trainings: Trainings) -> None:
    asked = trainings.plan()
    results, grid = trainings.sweep(asked)
    table = make_table(asked, results, grid.ladders)
    rows = {row.choices["warmup_steps"]: dict(zip(table.headings, table.cells(row), strict=True)) for row in table.rows}
    at = [f"loss at step {step}" for step in (10, 30, 90)]
    assert [rows["7"][key] for key in (*at, "loss")] == ["10.0000", "3.3333", "1.1111", "1.1111"]
    assert [rows["8"][key] for key in (*at, "loss")] == ["11.0000", "4.3333", "", "dropped"]
    assert [rows["1"][key] for key in (*at, "loss")] == ["16.0000", "", "", "dropped"]
    written = (trainings.folder / "out" / "table.md").read_text()
    assert markdown(table) in written and grid.ladders[0].describe() in written
    found = document(asked, table, results)
    assert found["halving"] == [ladder.to_json() for ladder in grid.ladders]
    assert "failed" in (trainings.folder / "out" / "table.csv").read_text().splitlines()[0]


def test_a_sweep_without_halving_has_none_of_it(trainings: Trainings) -> None:
    asked = trainings.plan(halving=None, values=(1, 2))
    results, grid = trainings.sweep(asked)
    assert grid.ladders == () and all(result.rungs == [] for result in results)
    assert "halving" not in document(asked, make_table(asked, results), results)


# --- what is refused, and draws ---------------------------------------------------------------------------------------


def test_draws_are_different_variants_fixed_by_the_seed_in_the_order_of_the_grid(trainings: Trainings) -> None:
    asked = trainings.plan(values=tuple(range(1, 31)), draws=9)
    drawn = [int(cell.variant.choices["warmup_steps"]) for cell in resolve_plan(asked).cells]
    assert len(set(drawn)) == 9 and drawn == sorted(drawn) and drawn != list(range(1, 10))
    assert drawn == [int(cell.variant.choices["warmup_steps"]) for cell in resolve_plan(asked).cells]
    assert len(resolve_plan(trainings.plan(draws=100)).cells) == len(SIZES)


@pytest.mark.slow
def test_the_last_rung_has_the_weights_that_the_whole_grid_gives(
    tiny_recipe: Path, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = Task(
        config=str(tiny_recipe),
        train=("--data", str(text_file)),
        vary={"optimizer.lr": (1e-5, 3e-3, 1e-6)},
        set={"schedule.kind": "linear"},
    )
    weights, results = [], []
    for name, halving in (("halving", 3), ("grid", None)):
        asked = Plan(max_steps=12, halving=halving, tasks=(task,))
        out = tmp_path / name
        _, found = run_sweep(asked, resolve_plan(asked), out)
        results.append(found)
        run = out / "runs" / found[1].cell
        latest = (run / "checkpoints" / "latest").read_text().strip()
        weights.append((run / "checkpoints" / latest / "model.safetensors").read_bytes())
    assert [result.status for result in results[0]] == ["dropped", "done", "dropped"]
    assert [result.steps for result in results[0]] == [4, 12, 4] and weights[0] == weights[1]
    assert results[0][1].best == results[1][1].best
