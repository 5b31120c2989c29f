"""`tformer config` as a user runs it: data on stdout, talk on stderr, exit code 2 for a mistake."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tformer.cli import config
from tformer.recipe import list_presets, load_recipe, recipe_from_yaml

Cli = Callable[..., Any]
MODEL = "model: {d_model: 16, max_seq_len: 8, decoder: {num_layers: 1, num_heads: 2}}\n"
EXAMPLES = [examples for _, examples in config.app.commands.values()]


def test_show_prints_yaml_that_loads_to_the_same_recipe(cli: Cli) -> None:
    done = cli("config", "show", "--arch", "gpt", "--preset", "char-cpu", "--set", "optimizer.lr=0.5")
    assert done.code == 0
    expected = load_recipe(arch="gpt", preset="char-cpu", sets=["optimizer.lr=0.5"]).recipe
    assert recipe_from_yaml(done.out, name="stdout") == expected
    assert done.err == ""


def test_show_says_what_it_chose_on_stderr(cli: Cli) -> None:
    done = cli("config", "show", "--arch", "gpt")
    assert done.code == 0
    assert "note: model size: preset gpt/tiny" in done.err
    assert "preset: tiny\n" in done.out


def test_show_origin_says_where_each_value_came_from(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text(MODEL + "preset: char-cpu\n")
    done = cli("config", "show", file, "--origin", "--set", "seed=3")
    assert done.code == 0
    lines = {line.split("#")[0].strip(): line.partition("#")[2].strip() for line in done.out.splitlines()}
    assert lines["seed: 3"] == "--set"
    assert lines["num_layers: 1"] == f"file {file}:1"
    assert lines["preset: char-cpu"] == f"file {file}:2"
    assert lines["lr: 0.001"] == "preset gpt/char-cpu"
    assert lines["momentum: 0.95"] == "default"
    assert recipe_from_yaml(done.out, name="stdout").seed == 3


def test_show_json_is_one_document(cli: Cli) -> None:
    done = cli("config", "show", "--arch", "llama", "--set", "seed=3", "--json")
    document = json.loads(done.out)
    assert done.code == 0 and done.out.count("\n") == 1
    assert document["recipe"]["arch"] == "llama"
    assert document["origins"]["seed"] == "--set"
    [chosen] = document["notes"]
    assert chosen.startswith("model size: preset llama/tiny")


def test_show_takes_an_objective_as_train_does(cli: Cli) -> None:
    done = cli("config", "show", "--arch", "bert", "--preset", "tiny", "--objective", "classification", "--json")
    document = json.loads(done.out)["recipe"]
    assert [objective["kind"] for objective in document["objectives"]] == ["classification"]
    assert [head["kind"] for head in document["model"]["heads"]] == ["classifier"]


def test_explain_prints_type_default_meaning_paper_and_presets(cli: Cli) -> None:
    done = cli("config", "explain", "model.encoder.norm.place")
    assert done.code == 0 and done.err == ""
    labels = [line.split()[0] for line in done.out.splitlines() if line]
    assert labels[0] == "model.encoder.norm.place"
    assert {"type", "default", "meaning", "paper", "presets"} <= set(labels)
    assert "https://arxiv.org/abs/2002.04745" in done.out and "transformer/base" in done.out
    [document] = json.loads(cli("config", "explain", "model.encoder.norm.place", "--json").out)
    assert document["explanations"][0]["default"] == "pre" and "bert/base" in document["presets"]['"post"']
    refused = cli("config", "explain", "model.encoder.norm.plac")
    assert refused.code == 2 and refused.out == "" and "did you mean 'place'" in refused.err


def test_explain_without_a_key_lists_every_key(cli: Cli) -> None:
    listed = json.loads(cli("config", "explain", "--json").out)
    assert {"seed", "optimizer.lr", "model.decoder.attention.window"} <= listed.keys() and all(listed.values())


def test_validate_says_ok_for_each_file(cli: Cli, tmp_path: Path) -> None:
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text(MODEL)
    second.write_text("preset: char-cpu\n")
    done = cli("config", "validate", first, second)
    assert (done.code, done.out) == (0, f"{first}: ok\n{second}: ok\n")


def test_validate_tells_every_bad_file_and_exits_2(cli: Cli, tmp_path: Path) -> None:
    good, bad, worse = (tmp_path / name for name in ("good.yaml", "bad.yaml", "worse.yaml"))
    good.write_text(MODEL)
    bad.write_text(MODEL + "seed: many\n")
    worse.write_text(MODEL.replace("d_model: 16", "d_model: 15"))
    done = cli("config", "validate", good, bad, worse)
    assert done.code == 2
    assert done.out == f"{good}: ok\n"
    assert f"{bad}:2: seed: found the text 'many', expected an integer" in done.err
    assert f"{worse}: model.decoder" in done.err
    assert "Traceback" not in done.err


def test_validate_json_gives_a_verdict_for_each_file(cli: Cli, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text(MODEL)
    bad.write_text("modle: {}\n")
    done = cli("config", "validate", good, bad, "--json")
    assert done.code == 2
    verdicts = json.loads(done.out)
    assert [verdict["ok"] for verdict in verdicts] == [True, False]
    assert verdicts[1]["error"].startswith(f"{bad}:1: modle: unknown key, did you mean 'model'?")


def test_schema_prints_a_json_schema(cli: Cli) -> None:
    done = cli("config", "schema")
    assert done.code == 0
    assert json.loads(done.out)["properties"]["optimizer"]


def test_list_names_every_preset_with_its_headline(cli: Cli) -> None:
    done = cli("config", "list")
    names = [line.split()[0] for line in done.out.splitlines()]
    assert names == [f"{arch}/{preset}" for arch, presets in list_presets().items() for preset in presets]
    assert all(len(line.split()) > 2 for line in done.out.splitlines())
    rows = json.loads(cli("config", "list", "--arch", "llama", "--json").out)
    assert {row["arch"] for row in rows} == {"llama"}


def test_every_command_shows_three_examples() -> None:
    assert [len(examples) for examples in EXAMPLES] == [3] * len(EXAMPLES)


@pytest.mark.parametrize("example", [example for examples in EXAMPLES for example in examples])
def test_each_example_in_the_help_works(
    example: str, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("my.yaml", "first.yaml", "second.yaml", "runs/gpt-tiny-1/recipe.yaml"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(MODEL)
    command = re.split(r" [|>] ", example)[0]  # what a shell does with the output is not ours
    program, *arguments = shlex.split(command)
    assert program == "tformer"
    done = cli(*arguments)
    assert done.code == 0 and done.out
