"""Every cell's recipe is known before anything is trained, as `tformer train` would resolve it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer

from tformer.cli import train
from tformer.errors import InputError
from tformer.workflows.sweep.cells import train_words
from tformer.workflows.sweep.plan import Plan, Task
from tformer.workflows.sweep.resolve import BY_FLAG, OWN, PARTS, TARGETS, read_flags, start_of
from tformer.workflows.sweep.run import resolve_plan


def plan(recipe: Path, vary: dict[str, list[Any]], **more: Any) -> Plan:
    axes = {key: tuple(values) for key, values in vary.items()}
    return Plan(tasks=(Task(config=str(recipe), vary=axes, **more),), seeds=2)


def test_cells_have_recipes_of_their_own_and_seeds_that_count_on(tiny_recipe: Path) -> None:
    grid = resolve_plan(plan(tiny_recipe, {"model.*.positions.kind": ["rope", "alibi"]}, set={"seed": 5}))
    found = [(work.recipe.model.decoder.positions.kind, work.recipe.seed) for work in grid.works]  # type: ignore[union-attr]
    assert found == [("rope", 5), ("alibi", 5), ("rope", 6), ("alibi", 6)]
    assert grid.order == ("rope-seed5", "rope-seed6", "alibi-seed5", "alibi-seed6")


@pytest.mark.parametrize(
    ("vary", "words"),
    [
        ({"model.*.positions.kind": ["rope", "rops"]}, "positions.kind rops: --set: model.decoder.positions.kind"),
        ({"model.decoder.num_heads": [2, 3]}, "num_heads 3: model.decoder.num_heads: 3 heads do not divide"),
        ({"model.*.positions.kind": ["patch2d"]}, "patch2d needs model.patches"),
        ({"model.*.nonsense": [1]}, "model.decoder.nonsense: unknown key"),
        ({"training.best_metric": ["loss", "bleu"]}, "best_metric bleu: --set: training.best_metric"),
    ],
)
def test_a_variant_that_the_recipe_refuses_is_told_before_anything_is_trained(
    tiny_recipe: Path, vary: dict[str, list[Any]], words: str
) -> None:
    with pytest.raises(InputError) as caught:
        resolve_plan(plan(tiny_recipe, vary))
    assert words in caught.value.message and "\n" not in caught.value.message


def test_a_grid_without_end_is_refused_at_once(tiny_recipe: Path) -> None:
    task = Task(config=str(tiny_recipe), vary={"model.decoder.dropout": (0.0, 0.1)})
    with pytest.raises(InputError, match="make 200,000,000 trainings, expected at most 10,000"):
        resolve_plan(Plan(tasks=(task,), seeds=10**8))


def test_such_variants_can_be_left_out_and_are_named(tiny_recipe: Path) -> None:
    grid = resolve_plan(plan(tiny_recipe, {"model.decoder.num_heads": [2, 3]}), skip_invalid=True)
    assert [work.cell.name for work in grid.works] == ["num_heads-2-seed1337", "num_heads-2-seed1338"]
    assert [(result.cell, result.status) for result in grid.invalid] == [
        ("num_heads-3-seed1337", "left out"),
        ("num_heads-3-seed1338", "left out"),
    ]
    with pytest.raises(InputError, match="no variant is left"):
        resolve_plan(plan(tiny_recipe, {"model.decoder.num_heads": [3]}), skip_invalid=True)


def test_a_task_that_is_wrong_whatever_its_axes_say_is_named(tiny_recipe: Path) -> None:
    tasks = (Task(name="good", config=str(tiny_recipe)), Task(name="bad", arch="nothing"))
    with pytest.raises(InputError, match=r"task bad: .*unknown arch 'nothing'"):
        resolve_plan(Plan(tasks=tasks))


def test_flags_of_train_decide_on_the_recipe_as_they_do_there() -> None:
    words = ["--data", "a.tsv", "--valid=b.tsv", "--objective", "regression", "--lr", "0.5", "--set", "data.seq_len=9"]
    recipe = start_of(Task(arch="bert", preset="tiny", train=tuple(words)), (), max_steps=7, seed=3).recipe
    assert [spec.path for spec in (*recipe.data.train, *recipe.data.valid)] == ["a.tsv", "b.tsv"]
    assert recipe.objectives[0].kind == "regression" and recipe.model.heads[0].kind == "regression"
    assert (recipe.optimizer.lr, recipe.data.seq_len, recipe.training.max_steps, recipe.seed) == (0.5, 9, 7, 3)


def test_aligned_files_are_pairs() -> None:
    flags = read_flags(["--source", "a", "--target", "b", "--source", "c", "--target", "d", "--valid-source", "e",
                        "--valid-target", "f"])  # fmt: skip
    assert flags.keys["data.train"] == [{"path": "a", "target_path": "b"}, {"path": "c", "target_path": "d"}]
    assert flags.keys["data.valid"] == [{"path": "e", "target_path": "f"}]


@pytest.mark.parametrize("flag", ["--seed", "--out", "--resume", "--json", "--arch", "--config"])
def test_flags_that_the_sweep_gives_itself_are_refused(flag: str) -> None:
    with pytest.raises(InputError, match=f"^{flag}: a sweep gives this flag"):
        read_flags([flag, "1"])


def test_every_flag_that_is_known_here_is_one_of_train() -> None:
    app = typer.Typer()
    app.command()(train.train)
    options = {name for parameter in typer.main.get_command(app).params for name in parameter.opts}
    assert {*BY_FLAG, *PARTS, *TARGETS} <= options | {"--threads"}
    assert set(OWN) - {"--help", "-h"} <= options


def test_the_command_of_a_cell_is_what_was_resolved(tiny_recipe: Path) -> None:
    made = plan(tiny_recipe, {"optimizer.lr": [0.5]}, set={"model.d_model": 32}, train=("--data", "x"))
    work = resolve_plan(made.model_copy(update={"max_steps": 4})).works[0]
    assert train_words(work) == [
        *("--config", str(tiny_recipe), "--data", "x"),
        *(
            "--set",
            "model.d_model=32",
            "--set",
            "optimizer.lr=0.5",
            "--set",
            "training.max_steps=4",
            "--set",
            "seed=1337",
        ),
    ]


def test_the_sweeps_own_steps_win_over_those_of_a_plan(tiny_recipe: Path) -> None:
    made = plan(tiny_recipe, {}, set={"training.max_steps": 100, "seed": 3}, train=("--max-steps", "50"))
    for max_steps, expected in ((None, 100), (4, 4)):
        works = resolve_plan(made.model_copy(update={"max_steps": max_steps})).works
        assert [(work.recipe.training.max_steps, work.recipe.seed) for work in works] == [(expected, 3), (expected, 4)]
