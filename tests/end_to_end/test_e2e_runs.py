"""`tformer runs` on what `tformer train` really leaves behind: trained, interrupted, damaged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Cli = Callable[..., Any]


@pytest.fixture
def home(cli: Cli, tmp_path: Path, text_file: Path, tiny_recipe: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three runs under runs/: the first, a wider one, and one that has steps to go."""
    monkeypatch.chdir(tmp_path)
    for out, options in (
        ("runs/first", ()),
        ("runs/group/wide", ("--set", "model.d_model=32")),
        ("runs/begun", ("--max-steps", 4)),
    ):
        outcome = cli("train", "--config", tiny_recipe, "--data", text_file, "--out", out, *options)
        assert outcome.code == 0, outcome.err
    recipe = Path("runs/begun/recipe.yaml")
    recipe.write_text(recipe.read_text().replace("max_steps: 4", "max_steps: 40"))
    return tmp_path


def test_list_show_and_compare(home: Path, cli: Cli) -> None:
    listed = json.loads(cli("runs", "list", "--json").out)
    assert {Path(run["run"]).name: run["state"] for run in listed} == {
        "begun": "stopped",
        "wide": "finished",
        "first": "finished",
    }
    first = next(run for run in listed if run["run"] == "runs/first")
    trained = json.loads(cli("train", "--resume", "--out", "runs/first", "--dry-run", "--json").out)
    assert first["parameters"] == trained["parameters"]
    assert (first["step"], first["max_steps"], first["best"]["metric"]) == (12, 12, "loss")
    assert first["seconds"] > 0 and first["tokens_per_second"] > 0
    assert first["size_bytes"] == sum(path.stat().st_size for path in Path("runs/first").rglob("*") if path.is_file())

    table = cli("runs", "list", "--sort", "name", "--limit", 2)
    assert [line.split()[0] for line in table.out.splitlines()] == ["run", "runs/begun", "runs/first"]
    assert "2 of 3 runs" in table.err

    shown = cli("runs", "show", "first")
    assert shown.code == 0 and "differs from" in shown.out and "bits_per_byte" in shown.out
    detail = json.loads(cli("runs", "show", "runs/first", "--json").out)
    assert detail["environment"]["data_fingerprint"] and len(detail["checkpoints"]) >= 2

    compared = json.loads(cli("runs", "compare", "first", "runs/group/wide", "--json").out)
    assert compared["recipe"] == {  # feed-forward and heads follow the width
        f"model.{key}": {"runs/first": first, "runs/group/wide": wide}
        for key, first, wide in (("d_model", 16, 32), ("decoder.num_heads", 2, 4), ("decoder.feedforward.d_ff", 32, 64))
    }
    assert compared["metrics"]["loss"].keys() == {"runs/first", "runs/group/wide"}
    assert "model.d_model" in cli("runs", "compare", "first", "runs/group/wide").out


def test_damaged_runs_are_listed_with_what_is_wrong(home: Path, cli: Cli) -> None:
    shutil.rmtree("runs/first/checkpoints")
    for path in Path("runs/begun/checkpoints").glob("step-*/model.safetensors"):
        path.write_bytes(b"")
    Path("runs/group/wide/recipe.yaml").write_text("model: {d_model: [}")
    for name in (("list",), ("list", "--sort", "metric"), *(("show", run) for run in ("first", "begun"))):
        outcome = cli("runs", *name)
        assert outcome.code == 0, outcome.err
        assert "Traceback" not in outcome.err and "damaged" in outcome.out
    listed = {Path(run["run"]).name: run for run in json.loads(cli("runs", "list", "--json").out)}
    assert {run["state"] for run in listed.values()} == {"damaged"}
    assert "has no checkpoints/" in listed["first"]["problems"][0]
    assert "model.safetensors" in listed["begun"]["problems"][0]
    assert "recipe.yaml" in listed["wide"]["problems"][0]
    assert cli("runs", "compare", "first", "begun", "runs/group/wide").code == 0


def test_no_runs_yet(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = cli("runs", "list")
    assert (outcome.code, outcome.out) == (0, "") and "no runs/" in outcome.err
    assert json.loads(cli("runs", "list", "--json").out) == []
    assert cli("runs", "show").code == 2


def test_a_run_that_trains_at_this_moment_is_in_use(home: Path, cli: Cli) -> None:
    from tformer.checkpoint.run import RunDirectory

    with RunDirectory.open("runs/begun", lock=True):
        [state] = [run["state"] for run in json.loads(cli("runs", "list", "runs/begun", "--json").out)]
        assert state == "in use"


def test_imported_models_are_listed_shown_compared_and_named_in_hints(
    cli: Cli, folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    for name, out in (("bert", "runs/bert"), ("classifier", "runs/sst")):
        assert cli("import", folders / name, "--out", out).code == 0
    listed = cli("runs", "list").out.splitlines()
    assert len(listed) == 3 and all("imported" in line for line in listed[1:])
    documents = json.loads(cli("runs", "list", "--json").out)
    assert [(each["state"], each["problems"]) for each in documents] == [("imported", [])] * 2
    assert all(each["parameters"] > 0 and each["max_steps"] is None for each in documents)
    shown = cli("runs", "show", "sst")
    assert shown.code == 0 and "imported" in shown.out and "runs/sst" in shown.out, shown.err
    assert cli("runs", "compare", "bert", "runs/sst").code == 0
    assert "did you mean 'sst'" in cli("classify", "runs/ssd", "--text", "a").err
    outcome = cli("classify", "--text", "the cat")
    assert outcome.code == 2 and "name one: runs/bert, runs/sst" in outcome.err
