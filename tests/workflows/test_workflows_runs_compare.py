"""Where a recipe departs from its preset, and where recipes differ from one another."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.workflows.run_makers import make_run
from tformer.errors import InputError
from tformer.recipe import load_recipe, recipe_to_yaml
from tformer.workflows.runs import compare_runs, describe_run
from tformer.workflows.runs.compare import short_names


def test_a_recipe_is_held_against_its_preset(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    recipe = load_recipe(arch="gpt", preset="tiny", sets=["optimizer.lr=0.5", "model.decoder.num_layers=3"]).recipe
    (path / "recipe.yaml").write_text(recipe_to_yaml(recipe))
    original = load_recipe(arch="gpt", preset="tiny").recipe
    detail = describe_run(path)
    assert detail.base == "preset gpt/tiny"
    assert detail.differences == {
        "model.decoder.num_layers": {"run": 3, "base": original.model.decoder and original.model.decoder.num_layers},
        "optimizer.lr": {"run": 0.5, "base": original.optimizer.lr},
    }


def test_a_recipe_without_a_known_preset_is_held_against_the_defaults(tmp_path: Path) -> None:
    detail = describe_run(make_run(tmp_path / "run", preset="of-somebody-else"))
    assert detail.base == "the defaults"
    assert detail.differences["model.d_model"] == {"run": 8}
    assert "seed" not in detail.differences and "optimizer.lr" not in detail.differences


def test_all_of_a_run(tmp_path: Path) -> None:
    detail = describe_run(make_run(tmp_path / "run"))
    assert detail.environment is not None and detail.environment["data_fingerprint"] == "f00d"
    assert detail.metrics["train"]["first"]["step"] == 6 and detail.metrics["train"]["last"]["step"] == 12
    assert [detail.metrics["valid"][which]["step"] for which in ("first", "best", "last")] == [6, 6, 12]
    assert "best" not in detail.metrics["train"]
    lines = [(line.step, line.is_latest, line.is_best, line.score) for line in detail.checkpoints]
    assert lines == [(6, False, True, 2.06), (12, True, False, 2.12)]
    sizes = [sum(p.stat().st_size for p in line.path.iterdir()) for line in detail.checkpoints]
    named = [line.size_bytes for line in detail.checkpoints]
    assert all(0 < size <= whole for size, whole in zip(named, sizes, strict=True) if size is not None)
    json.dumps(detail.to_json(), allow_nan=False)


def test_only_keys_that_differ_are_told_and_those_of_one_side(tmp_path: Path) -> None:
    a = make_run(tmp_path / "a")
    b = make_run(tmp_path / "b", norm="scalenorm", d_model=16)
    comparison = compare_runs([a, b])
    assert comparison.names == ["a", "b"]
    assert comparison.keys["model.d_model"] == {0: 8, 1: 16}
    assert comparison.keys["model.decoder.norm.kind"] == {0: "layernorm", 1: "scalenorm"}
    assert "model.max_seq_len" not in comparison.keys and "seed" not in comparison.keys
    assert all(len(row) < 2 or row[0] != row[1] for row in comparison.keys.values())
    assert comparison.metrics == {"loss": {0: 2.06, 1: 2.06}, "accuracy": {0: 0.44, 1: 0.44}}
    document = comparison.to_json()
    assert document["recipe"]["model.d_model"] == {str(a): 8, str(b): 16}


def test_equal_recipes_differ_in_nothing(tmp_path: Path) -> None:
    assert compare_runs([make_run(tmp_path / "a"), make_run(tmp_path / "b")]).keys == {}


def test_a_damaged_run_is_compared_as_far_as_it_goes(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name) for name in "abc"]
    (runs[1] / "recipe.yaml").write_text("]")
    (runs[2] / "metrics.jsonl").unlink()
    comparison = compare_runs(runs)
    assert comparison.keys == {}
    assert comparison.metrics["loss"].keys() == {0, 1}
    assert comparison.runs[1].state == "damaged"


def test_comparing_takes_two_different_runs(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    with pytest.raises(InputError, match="two runs or more, found 1"):
        compare_runs([run])
    with pytest.raises(InputError, match="named twice"):
        compare_runs([run, tmp_path / "." / "a"])


def test_names_lose_the_folders_that_all_share() -> None:
    paths = [Path("sweeps/x/norm=a/seed-1"), Path("sweeps/x/norm=b/seed-1")]
    assert short_names(paths) == ["norm=a/seed-1", "norm=b/seed-1"]
    assert short_names([Path("runs/a"), Path("runs/a2")]) == ["a", "a2"]
