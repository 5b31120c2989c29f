"""Plans of a sweep: flags and files, axes and cells, resolved recipes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tformer.recipe.yaml_text import parse_value
from tformer.support.errors import InputError
from tformer.workflows.sweep.cells import train_words
from tformer.workflows.sweep.grid import (
    as_text,
    axes_of,
    expand_key,
    start_of,
    train_options,
    variants_of,
)
from tformer.workflows.sweep.plan import SweepPlan, SweepTask, list_plans, parse_vary, plan_of_flags, read_plan
from tformer.workflows.sweep.run import resolve_plan

BOTH: dict[str, Any] = {"model": {"encoder": {"norm": {}}, "decoder": {"norm": {}}}}
DECODER: dict[str, Any] = {"model": {"encoder": None, "decoder": {"norm": {}}}}


def of(vary: dict[str, list[Any]], recipe: dict[str, Any] = BOTH) -> list[Any]:
    return variants_of(SweepTask(vary={key: tuple(values) for key, values in vary.items()}), recipe=recipe, prefix="")


def test_axes_make_their_product_with_the_last_axis_fastest() -> None:
    variants = of({"optimizer.lr": [0.1, 0.2], "optimizer.kind": ["adam", "adamw", "muon"]})
    assert [variant.choices for variant in variants] == [
        {"lr": lr, "optimizer.kind": kind} for lr in ("0.1", "0.2") for kind in ("adam", "adamw", "muon")
    ]
    assert variants[1].sets == ("optimizer.lr=0.1", "optimizer.kind=adamw")


def test_no_axis_is_one_variant() -> None:
    [variant] = of({})
    assert (variant.sets, variant.choices, variant.slug) == ((), {}, "base")


def test_a_star_stands_for_the_stacks_that_the_recipe_has() -> None:
    [variant] = of({"model.*.norm.place": ["post"]})
    assert variant.sets == ("model.encoder.norm.place=post", "model.decoder.norm.place=post")
    [variant] = of({"model.*.norm.place": ["post"]}, DECODER)
    assert variant.sets == ("model.decoder.norm.place=post",)
    assert expand_key("training.*.x", BOTH) == ["training.*.x"]  # for the recipe to refuse


def test_coupled_keys_change_together_and_show_the_first_where_it_tells_all() -> None:
    axis = {"model.*.norm.place,model.*.final_norm": [["pre", True], ["post", False]]}
    first, second = of(axis, DECODER)
    assert first.sets == ("model.decoder.norm.place=pre", "model.decoder.final_norm=true")
    assert second.sets == ("model.decoder.norm.place=post", "model.decoder.final_norm=false")
    assert (first.choices, second.choices) == ({"norm.place": "pre"}, {"norm.place": "post"})
    assert (first.slug, second.slug) == ("pre", "post")
    ambiguous = {"optimizer.lr,schedule.warmup_steps": [[0.1, 0], [0.1, 5]]}
    assert [variant.choices for variant in of(ambiguous)] == [
        {"lr + warmup_steps": "0.1 + 0"},
        {"lr + warmup_steps": "0.1 + 5"},
    ]


def test_labels_are_short_but_never_the_same() -> None:
    axes = axes_of(
        SweepTask(vary={"model.encoder.dropout": (0, 1), "model.decoder.dropout": (0, 1), "optimizer.lr": (1, 2)})
    )
    assert [axis.label for axis in axes] == ["model.encoder.dropout", "model.decoder.dropout", "lr"]


def test_a_mapping_is_shown_by_its_kind() -> None:
    variants = of({"model.*.positions": [{"kind": "rope"}, {"kind": "rope", "base": 100}]}, DECODER)
    assert [variant.choices["positions"] for variant in variants] == ["rope", "rope (base 100)"]
    assert variants[1].sets == ('model.decoder.positions={"kind": "rope", "base": 100}',)


def test_slugs_are_safe_names_and_unlike_one_another() -> None:
    odd = ["a/b", "a b", "../x", "ü", "", "y" * 300, "y" * 301]
    slugs = [variant.slug for variant in of({"tokenizer.path": odd})]
    assert len(set(slugs)) == len(odd)
    for slug in slugs:
        assert 0 < len(slug) <= 90 and "/" not in slug and not slug.startswith(".")


def test_slugs_keep_the_signs_of_numbers() -> None:
    slugs = [variant.slug for variant in of({"optimizer.lr": [1e30, 1e-30, 1, -1, 0.001]})]
    assert slugs == ["lr-1e+30", "lr-1e-30", "lr-1", "lr--1", "lr-0.001"]


SCALARS = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
)
TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc", "Zl", "Zp")), max_size=12)


@given(
    st.recursive(SCALARS | TEXTS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3))
)
def test_a_value_survives_the_command_line(value: Any) -> None:
    """What `--set` reads of the text is the value, of the same type."""
    try:
        read = parse_value(as_text(value), name="--set")
    except Exception as error:  # a text that YAML itself refuses, as a lone byte-order mark
        assert "not valid YAML" in str(error)
        return
    assert read == value and type(read) is type(value)


@pytest.mark.parametrize("text", ["true", "1e-3", "null", "", " x", "[a]", "{a: 1}", "'q'", '"q"', "on", "a=b", "a, b"])
def test_texts_that_look_like_something_else_stay_texts(text: str) -> None:
    assert parse_value(as_text(text), name="--set") == text


PLAN = """\
name: norms
seeds: 2
max_steps: 10
tasks:
  - name: sweep
    arch: gpt
    preset: tiny
    set: {optimizer.lr: 0.01}
    train: [--data, text.txt]
    vary:
      model.*.norm.place,model.*.final_norm: [[pre, true], [post, false]]
      model.decoder.dropout: [0.0, 0.1]
    evaluate: {longer: [--seq-len, "32"]}
"""


def of_flags(**changes: Any) -> SweepPlan:
    options: dict[str, Any] = {
        "config": None,
        "arch": "gpt",
        "preset": "tiny",
        "sets": ["optimizer.lr=0.01"],
        "train": ["--data", "text.txt"],
        "vary": ["model.*.norm.place,model.*.final_norm=[pre,true],[post,false]", "model.decoder.dropout=0.0,0.1"],
        "evaluate": ["longer=--seq-len 32"],
        "seeds": 2,
        "max_steps": 10,
    }
    return plan_of_flags(**{**options, **changes})


def written(folder: Path, text: str) -> SweepPlan:
    path = folder / "plan.yaml"
    path.write_text(text, encoding="utf-8")
    return read_plan(str(path))


def refusal(folder: Path, text: str) -> str:
    with pytest.raises(InputError) as caught:
        written(folder, text)
    return f"{caught.value.message}\n{caught.value.hint}"


def test_flags_and_a_file_make_the_same_plan(tmp_path: Path) -> None:
    assert written(tmp_path, PLAN) == of_flags().model_copy(update={"name": "norms"})


@pytest.mark.parametrize(
    ("text", "keys", "values"),
    [
        ("optimizer.lr=1e-3,3e-4", "optimizer.lr", [1e-3, 3e-4]),
        ("model.*.positions={kind: rope, base: 100},{kind: alibi}", "model.*.positions",
         [{"kind": "rope", "base": 100}, {"kind": "alibi"}]),
        ("a.b , c.d = [x, true], [y, false]", "a.b,c.d", [["x", True], ["y", False]]),
        ("data.labels=[]", "data.labels", [[]]),
        ("model.tie.output=true,false", "model.tie.output", [True, False]),
    ],
)  # fmt: skip
def test_values_of_an_axis_are_yaml(text: str, keys: str, values: list[Any]) -> None:
    assert parse_vary(text) == (keys, values)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("seeds: 2", "seads: 2", r"plan.yaml:2: seads: unknown key\ndid you mean 'seeds'"),
        ("    preset:", "    prezet:", r"plan.yaml:7: tasks.0.prezet: unknown key\ndid you mean 'preset'"),
        ("seeds: 2", "seeds: two", "plan.yaml:2: seeds: found the text 'two', expected an integer"),
        ("seeds: 2", "seeds: 0", "plan.yaml:2: seeds: found 0, expected more than 0"),
        ("name: norms", "name: a/b", "plan.yaml:1: name: found 'a/b', expected letters"),
        ("[pre, true]", "[pre]", r"plan.yaml:5: tasks.0: vary: .*found a list of 1, expected a list of 2"),
        ("text.txt", '"${NOWHERE}/text.txt"', "plan.yaml:9: tasks.0.train.1: the environment variable NOWHERE is not"),
    ],
)
def test_a_wrong_file_is_told_with_line_and_key(tmp_path: Path, old: str, new: str, words: str) -> None:
    assert re.search(words, refusal(tmp_path, PLAN.replace(old, new)))


def test_tasks_are_there_and_have_names_of_their_own(tmp_path: Path) -> None:
    assert "expected at least one" in refusal(tmp_path, "tasks: []")
    assert "two are called 'a'" in refusal(tmp_path, "tasks: [{name: a, arch: gpt}, {name: a, arch: bert}]")


def test_texts_are_expanded_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERE", "/data")
    plan = written(tmp_path, PLAN.replace("text.txt", '"${HERE}/text.txt"'))
    assert plan.tasks[0].train == ("--data", "/data/text.txt")


@pytest.mark.parametrize("name", ["tears", "positions"])
def test_a_shipped_plan_resolves_in_every_cell_and_says_what_it_is_for(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATA", "data")
    head = list_plans()[name].read_text(encoding="utf-8").split(f"name: {name}")[0]
    for word in ("Purpose", "Command", "Expected", "Time", "Hardware"):
        assert f"# {word} " in head, word
    plan = read_plan(name)
    grid = resolve_plan(plan)
    variants = {"tears": [16], "positions": [7, 7]}[name]
    assert len(grid.cells) == plan.seeds * sum(variants) and not grid.invalid
    assert len({cell.name for cell in grid.cells}) == len(grid.cells)


KINDS = ["sinusoidal", "learned", "rope", "alibi", "t5_bias"]


@pytest.mark.parametrize("preset", ["gpt/tiny", "gpt/char-cpu", "bert/classify", "bert/tiny", "transformer/tiny",
                                    "transformer/base", "transformer/dates", "t5/tiny", "t5/small"])  # fmt: skip
def test_the_kinds_of_positions_vary_in_every_family_as_they_stand(preset: str) -> None:
    """Each kind has its own defaults, whatever options the preset's kind has; what is dropped is said once."""
    arch, name = preset.split("/")
    plan = of_flags(arch=arch, preset=name, sets=[], train=[], vary=[f"model.*.positions.kind={','.join(KINDS)}"])
    grid = resolve_plan(plan)
    assert [cell.variant.choices["positions.kind"] for cell in grid.cells] == KINDS * 2
    for cell in grid.cells:
        for stack in cell.recipe.model.stacks.values():
            assert stack.positions.kind == cell.variant.choices["positions.kind"]
    dropped = [note for note in grid.notes if "dropped" in note and "kind" in note]
    assert len(dropped) == (preset == "transformer/tiny"), dropped
    scaled = any("model.embedding.scale is true" in note for note in grid.notes)
    assert scaled == (preset in ("gpt/char-cpu", "bert/classify", "bert/tiny"))


@pytest.mark.parametrize(
    ("preset", "changes", "every"),
    [
        ("gpt/char-cpu", {"max_steps": 300}, 0.1),  # every 250 steps: two points
        ("gpt/char-cpu", {"max_steps": 2500}, None),  # ten
        ("gpt/char-cpu", {"max_steps": 300, "sets": ["training.eval_every=300"]}, None),
        ("gpt/char-cpu", {"max_steps": 300, "train": ["--set", "training.eval_every=300"]}, None),
        ("gpt/char-cpu", {"max_steps": 300, "vary": ["training.eval_every=100,300"]}, None),
        ("bert/classify", {"max_steps": None}, 0.1),  # three epochs
        ("bert/classify", {"max_steps": None, "sets": ["training.max_epochs=12"]}, None),
        ("gpt/tiny", {"max_steps": None, "sets": ["training.minutes=2"]}, 0.1),
    ],
)
def test_curves_have_at_least_ten_points(preset: str, changes: dict[str, Any], every: float | None) -> None:
    arch, name = preset.split("/")
    plan = of_flags(**{"arch": arch, "preset": name, "sets": [], "train": [], "vary": ["optimizer.lr=1e-3"]} | changes)
    grid = resolve_plan(plan)
    assert {"training.eval_every=0.1" in cell.sets for cell in grid.cells} == {every is not None}
    assert any("validating 10 times in each training" in note for note in grid.notes) == (every is not None)


def test_a_file_that_says_how_often_to_validate_is_followed(tiny_recipe: Path) -> None:
    made = plan(tiny_recipe, {"optimizer.lr": [0.5]})
    assert ["training.eval_every=0.1" in cell.sets for cell in resolve_plan(made).cells] == [False] * 2
    tiny_recipe.write_text(tiny_recipe.read_text().replace("eval_every: 6, ", ""))
    assert ["training.eval_every=0.1" in cell.sets for cell in resolve_plan(made).cells] == [True] * 2


def test_the_tears_plan_varies_what_the_paper_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """LayerNorm or ScaleNorm x pre or post x FixNorm x warm-up or none; all else is equal."""
    monkeypatch.setenv("DATA", "data")
    seen = set()
    others = set()
    for cell in resolve_plan(read_plan("tears")).cells:
        recipe = cell.recipe
        stacks = [recipe.model.encoder, recipe.model.decoder]
        assert all(stack is not None for stack in stacks)
        kinds = {(stack.norm.kind, stack.norm.place, stack.final_norm) for stack in stacks if stack is not None}
        [(kind, place, final_norm)] = kinds
        assert final_norm == (place == "pre")
        seen.add((kind, place, recipe.model.embedding.fixnorm, recipe.schedule.warmup_steps > 0, recipe.seed))
        data = yaml.safe_dump(recipe.model_dump(mode="json"))
        for pattern in (
            r"(kind: )(layernorm|scalenorm)",
            r"(place: )(pre|post)",
            r"(fixnorm: )\w+",
            r"(final_norm: )\w+",
        ):
            data = re.sub(pattern, r"\1", data)
        others.add(re.sub(r"(warmup_steps|seed): \d+", r"\1", data))
    assert len(seen) == 32 and len(others) == 1


def plan(recipe: Path, vary: dict[str, list[Any]], **more: Any) -> SweepPlan:
    axes = {key: tuple(values) for key, values in vary.items()}
    return SweepPlan(tasks=(SweepTask(config=str(recipe), vary=axes, **more),), seeds=2)


def test_cells_have_recipes_of_their_own_and_seeds_that_count_on(tiny_recipe: Path) -> None:
    grid = resolve_plan(plan(tiny_recipe, {"model.*.positions.kind": ["rope", "alibi"]}, set={"seed": 5}))
    found = [(cell.recipe.model.decoder.positions.kind, cell.recipe.seed) for cell in grid.cells]  # type: ignore[union-attr]
    assert found == [("rope", 5), ("alibi", 5), ("rope", 6), ("alibi", 6)]
    assert grid.order == ("rope-seed5", "rope-seed6", "alibi-seed5", "alibi-seed6")


def test_such_variants_can_be_left_out_and_are_named(tiny_recipe: Path) -> None:
    grid = resolve_plan(plan(tiny_recipe, {"model.decoder.num_heads": [2, 3]}), skip_invalid=True)
    assert [cell.name for cell in grid.cells] == ["num_heads-2-seed1337", "num_heads-2-seed1338"]
    assert [(result.cell, result.status) for result in grid.invalid] == [
        ("num_heads-3-seed1337", "left out"),
        ("num_heads-3-seed1338", "left out"),
    ]
    with pytest.raises(InputError, match="no variant is left"):
        resolve_plan(plan(tiny_recipe, {"model.decoder.num_heads": [3]}), skip_invalid=True)


def test_flags_of_train_decide_on_the_recipe_as_they_do_there() -> None:
    words = ["--data", "a.tsv", "--valid=b.tsv", "--objective", "regression", "--lr", "0.5", "--set", "data.seq_len=9"]
    recipe = start_of(SweepTask(arch="bert", preset="tiny", train=tuple(words)), (), max_steps=7, seed=3).recipe
    assert [spec.path for spec in (*recipe.data.train, *recipe.data.valid)] == ["a.tsv", "b.tsv"]
    assert recipe.objectives[0].kind == "regression" and recipe.model.heads[0].kind == "regression"
    assert (recipe.optimizer.lr, recipe.data.seq_len, recipe.training.max_steps, recipe.seed) == (0.5, 9, 7, 3)


def test_aligned_files_are_pairs() -> None:
    options = train_options(["--source", "a", "--target", "b", "--source", "c", "--target", "d", "--valid-source", "e",
                             "--valid-target", "f"])  # fmt: skip
    values = options.recipe_values()
    assert values["data.train"] == [{"path": "a", "target_path": "b"}, {"path": "c", "target_path": "d"}]
    assert values["data.valid"] == [{"path": "e", "target_path": "f"}]


def test_the_command_of_a_cell_is_what_was_resolved(tiny_recipe: Path) -> None:
    made = plan(tiny_recipe, {"optimizer.lr": [0.5]}, set={"model.d_model": 32}, train=("--data", "x"))
    cell = resolve_plan(made.model_copy(update={"max_steps": 4})).cells[0]
    sets = ("model.d_model=32", "optimizer.lr=0.5", "training.max_steps=4", "seed=1337")
    assert train_words(cell) == [
        *("--config", str(tiny_recipe), "--data", "x"),
        *(word for text in sets for word in ("--set", text)),
    ]


def test_the_sweeps_own_steps_win_over_those_of_a_plan(tiny_recipe: Path) -> None:
    made = plan(tiny_recipe, {}, set={"training.max_steps": 100, "seed": 3}, train=("--max-steps", "50"))
    for max_steps, expected in ((None, 100), (4, 4)):
        cells = resolve_plan(made.model_copy(update={"max_steps": max_steps})).cells
        assert [(cell.recipe.training.max_steps, cell.recipe.seed) for cell in cells] == [(expected, 3), (expected, 4)]
