"""Runs on disk: states, damage, lookup, order, details, comparison."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.workflows.run_makers import VOCABULARY, make_run, train_line, valid_line
from tformer.build import count_parameters
from tformer.checkpoint.run import RunDirectory, writer
from tformer.recipe import load_recipe, recipe_to_yaml
from tformer.support.errors import InputError
from tformer.workflows.runs.compare import compare_runs, describe_run
from tformer.workflows.runs.summary import ORDERS, find_run, find_runs, in_order, summarize_run


def test_a_finished_run(tmp_path: Path) -> None:
    run = summarize_run(make_run(tmp_path / "run"))
    assert (run.state, run.problems, run.kind) == ("finished", [], "gpt/tiny")
    assert (run.step, run.max_steps) == (12, 12)
    assert run.best is not None and (run.best.metric, run.best.value, run.best.step) == ("loss", 2.06, 6)
    assert (run.seconds, run.tokens, run.tokens_per_second) == (24.0, 1200, 50.0)
    assert run.size_bytes == sum(path.stat().st_size for path in (tmp_path / "run").rglob("*") if path.is_file())
    assert run.recipe is not None
    assert run.parameters == count_parameters(run.recipe.model, vocab_size=VOCABULARY)


def test_parameters_are_those_of_the_model_not_its_buffers(tmp_path: Path) -> None:
    """Batch norm stores running statistics beside its parameters."""
    run = summarize_run(make_run(tmp_path / "run", norm="batchnorm", steps=(12,)))
    assert run.problems == [] and run.recipe is not None
    assert run.parameters == count_parameters(run.recipe.model, vocab_size=VOCABULARY)


@pytest.mark.parametrize(
    ("steps", "finished", "state"),
    [((4,), False, "stopped"), ((4, 8), True, "finished"), ((12,), False, "finished"), ((), False, "no checkpoint")],
)
def test_states(steps: tuple[int, ...], finished: bool, state: str, tmp_path: Path) -> None:
    assert summarize_run(make_run(tmp_path / "run", steps=steps, finished=finished)).state == state


def test_a_run_in_use_tells_how_far_its_metrics_are(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", steps=(4,))
    assert writer(path) is None
    with RunDirectory.open(path, lock=True) as run:
        run.append_metrics(train_line(7))
        assert writer(path) is not None
        found = summarize_run(path)
        assert (found.state, found.step) == ("in use", 7)
    assert writer(path) is None
    assert summarize_run(path).step == 4  # what is not saved would be trained again


def test_looking_at_a_run_changes_nothing(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    (path / ".lock").unlink()

    def state() -> dict[Path, int]:
        return {entry: entry.stat().st_mtime_ns for entry in path.rglob("*")}

    before = state()
    summarize_run(path)
    assert state() == before


def test_the_best_of_another_metric(tmp_path: Path) -> None:
    records = [
        valid_line(4, 2.0, is_best=True, accuracy=0.5),
        valid_line(8, 1.9, is_best=True, accuracy=0.7),
        valid_line(12, 1.8, is_best=False, accuracy=0.6),
    ]
    run = summarize_run(make_run(tmp_path / "run", metric="accuracy", records=records))
    assert run.best is not None and (run.best.metric, run.best.value, run.best.step) == ("accuracy", 0.7, 8)


def cut_off(run: Path) -> None:
    path = run / "checkpoints" / "step-00000012" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-9])


def garble_manifest(run: Path) -> None:
    (run / "checkpoints" / "step-00000006" / "manifest.json").write_text("{]")


def garble_recipe(run: Path) -> None:
    (run / "recipe.yaml").write_bytes(b"model: {d_model: \xff}")


def older_recipe(run: Path) -> None:
    (run / "recipe.yaml").write_text("schema: 99\n")


def pipe_for_environment(run: Path) -> None:
    (run / "environment.json").unlink()
    os.mkfifo(run / "environment.json")


def garble_environment(run: Path) -> None:
    (run / "environment.json").write_text("[1, 2]")


def lose_checkpoints(run: Path) -> None:
    (run / "checkpoints").rename(run.parent.parent / "elsewhere")


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (cut_off, "model.safetensors is truncated"),
        (garble_manifest, "step-00000006/manifest.json is damaged"),
        (garble_recipe, "recipe.yaml is damaged: not UTF-8"),
        (older_recipe, "recipe.yaml"),
        (pipe_for_environment, "environment.json is not an ordinary file"),
        (garble_environment, "environment.json is damaged"),
        (lose_checkpoints, "has no checkpoints/"),
    ],
)
def test_a_damaged_run_says_what_is_wrong_and_the_rest_is_told(
    damage: Callable[[Path], None], word: str, tmp_path: Path
) -> None:
    folder = tmp_path / "runs"
    path = make_run(folder / "run")
    make_run(folder / "sound")
    damage(path)
    found = {run.path.name: run for run in map(summarize_run, find_runs([folder]))}
    assert found.keys() == {"run", "sound"}
    assert found["run"].state == "damaged"
    assert any(word in problem for problem in found["run"].problems), found["run"].problems
    assert found["sound"].state == "finished" and found["sound"].problems == []
    json.dumps(found["run"].to_json(), allow_nan=False)


def test_an_older_checkpoint_serves_where_the_latest_is_damaged(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    cut_off(path)
    assert summarize_run(path).parameters is not None


def test_odd_lines_in_the_metrics_do_no_harm(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    with (path / "metrics.jsonl").open("ab") as stream:
        stream.write(b'{"split": "valid", "step": "x", "loss": "low", "is_best": true}\nnot json\n\xff\xfe\n[3]\n')
        stream.write(b'{"split": "train", "step": 13, "seconds": null, "tokens": true}\n{"half')
    run = summarize_run(path)
    assert (run.state, run.best, run.seconds, run.tokens) == ("finished", None, None, None)
    for order in ORDERS:
        assert in_order([run, run], order) == [run, run]


def test_runs_are_found_in_folders_of_folders_each_once(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    plain = make_run(root / "a", steps=())
    nested = [make_run(root / "sweep" / cell / "seed-1", steps=()) for cell in ("x", "y")]
    (root / "sweep" / "again").symlink_to(nested[0])
    (root / "sweep" / "circle").symlink_to(root)
    (root / ".hidden").mkdir()
    (root / "notes").mkdir()
    (root / "notes" / "todo.txt").write_text("x")
    (root / "averaged").mkdir()
    (root / "averaged" / "manifest.json").write_text("{}")
    assert {os.path.realpath(path) for path in find_runs([root])} == {str(path) for path in (plain, *nested)}
    assert find_runs([plain, root / "a"]) == [plain]


def test_a_run_by_folder_by_name_and_by_what_is_inside(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "one")
    for name in (run, "one", run / "checkpoints", run / "checkpoints" / "step-00000006", None):
        assert find_run(name, runs_dir=tmp_path / "runs") == run
    with pytest.raises(InputError, match="does not exist"):
        find_run("two", runs_dir=tmp_path / "runs")
    alone = (run / "checkpoints" / "step-00000006").rename(tmp_path / "alone")
    with pytest.raises(InputError, match="checkpoint on its own, expected a run"):
        find_run(alone)


def test_orders_put_first_what_is_looked_for_and_unknown_last(tmp_path: Path) -> None:
    small = make_run(tmp_path / "small", records=[valid_line(6, 1.0, is_best=True)])
    wide = make_run(tmp_path / "wide", d_model=16, records=[valid_line(6, 2.0, is_best=True), train_line(6)])
    empty = make_run(tmp_path / "empty", steps=(), records=[])
    for age, path in enumerate((small, empty, wide)):
        for entry in path.rglob("*"):
            os.utime(entry, (1e9 - age, 1e9 - age))
    runs = [summarize_run(path) for path in (empty, small, wide)]

    def names(order: str) -> list[str]:
        return [run.path.name for run in in_order(runs, order)]

    assert names("newest") == ["small", "empty", "wide"]
    assert names("name") == ["empty", "small", "wide"]
    assert names("metric") == ["small", "wide", "empty"]
    assert names("parameters") == ["wide", "small", "empty"]
    assert names("seconds")[0] == "wide"
    assert names("size") == ["wide", "small", "empty"]
    assert names("step")[-1] == "empty"


def test_a_higher_accuracy_is_better(tmp_path: Path) -> None:
    paths = [
        make_run(tmp_path / str(value), metric="accuracy", records=[valid_line(6, 1.0, is_best=True, accuracy=value)])
        for value in (0.2, 0.9, 0.5)
    ]
    assert [run.path.name for run in in_order(map(summarize_run, paths), "metric")] == ["0.9", "0.5", "0.2"]


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
    lines = [tuple(line[key] for key in ("step", "latest", "best", "score")) for line in detail.checkpoints]
    assert lines == [(6, False, True, 2.06), (12, True, False, 2.12)]
    sizes = [sum(p.stat().st_size for p in Path(line["path"]).iterdir()) for line in detail.checkpoints]
    named = [line["size_bytes"] for line in detail.checkpoints]
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
    with pytest.raises(InputError, match="at least two runs to compare, found 1"):
        compare_runs([run])
    with pytest.raises(InputError, match="named twice"):
        compare_runs([run, tmp_path / "." / "a"])
