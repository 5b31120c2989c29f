"""What a sweep is asked for: flags and files make one plan, and every mistake is told with its place."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tformer.errors import InputError
from tformer.workflows.sweep.flags import parse_vary, plan_of_flags
from tformer.workflows.sweep.plan import Plan, list_plans, read_plan
from tformer.workflows.sweep.run import resolve_plan

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


def of_flags(**changes: Any) -> Plan:
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


def written(folder: Path, text: str) -> Plan:
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
    ("vary", "words"),
    [
        (["optimizer.lr"], "expected KEY=value,value"),
        (["optimizer.lr="], "expected KEY=value,value"),
        (["optimizer.lr=1,{"], "optimizer.lr: the values '1,{' are no YAML list"),
        (["a,b=1,2"], "found 1, expected a list of 2: a value for each key"),
        (["a,=1,2"], "expected KEY or KEY1,KEY2"),
        (["optimizer.lr=1,1"], "the value 1 twice"),
        (["optimizer.lr=1", "optimizer.lr=2"], "optimizer.lr is given twice"),
        (["seed=1,2"], "seed is no axis: --seeds N"),
    ],
)
def test_a_wrong_axis_is_one_line_that_names_it(vary: list[str], words: str) -> None:
    with pytest.raises(InputError, match=re.escape(words)) as caught:
        of_flags(vary=vary)
    assert "\n" not in caught.value.message


def test_wrong_flags_are_told(tmp_path: Path) -> None:
    for changes, words in (
        ({"evaluate": ["--data x"]}, "expected LABEL=flags"),
        ({"evaluate": ["test='x"]}, "--evaluate test: No closing quotation"),
        ({"sets": ["lr"]}, "--set: found 'lr', expected key=value"),
    ):
        with pytest.raises(InputError, match=re.escape(words)):
            of_flags(**changes)


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


def test_an_unknown_plan_suggests_the_nearest() -> None:
    with pytest.raises(InputError, match="unknown plan 'position'") as caught:
        read_plan("position")
    assert "did you mean 'positions'" in (caught.value.hint or "")


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
    assert len(grid.works) == plan.seeds * sum(variants) and not grid.invalid
    names = {work.cell.name for work in grid.works}
    assert len(names) == len(grid.works)


def test_the_tears_plan_varies_what_the_paper_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """LayerNorm or ScaleNorm x pre or post x FixNorm x warm-up or none; all else is equal."""
    monkeypatch.setenv("DATA", "data")
    seen = set()
    others = set()
    for work in resolve_plan(read_plan("tears")).works:
        recipe = work.recipe
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
