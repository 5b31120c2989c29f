"""`tformer prune` as a user runs it: on every kind of model, and what comes out goes in wherever a run can."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TINY_RECIPE
from tests.end_to_end.translate_runs import SEQ2SEQ
from tests.quick import first_is_quick

Cli = Callable[..., Any]
DEEP = TINY_RECIPE.replace("num_layers: 2", "num_layers: 4, layerdrop: {rate: 0.3, learned: true}")


@pytest.fixture
def deep(cli: Cli, tmp_path: Path, text_file: Path) -> Path:
    """A trained decoder of four layers with learned drop rates, and its text."""
    recipe = tmp_path / "deep.yaml"
    recipe.write_text(DEEP)
    outcome = cli("train", "--config", recipe, "--data", text_file, "--out", tmp_path / "run")
    assert outcome.code == 0, outcome.err
    return tmp_path / "run"


def pruned(cli: Cli, *words: object) -> dict[str, Any]:
    outcome = cli("prune", *words, "--json")
    assert outcome.code == 0, outcome.err
    [line] = outcome.out.splitlines()
    document: dict[str, Any] = json.loads(line)
    return document


@first_is_quick(
    ("words", "expected"),
    [
        (["--rate", 0.5], {"kept": [1, 3], "strategy": "every-other"}),
        (["--keep", 3], {"kept": [1, 2, 3], "strategy": "every-other"}),
        (["--keep", 2, "--strategy", "search"], {"method": "exhaustive", "evaluations": 6}),
        (["--keep", 1, "--strategy", "search", "--max-trials", 3], {"method": "greedy", "evaluations": 9}),
        (["--keep", 2, "--strategy", "learned"], {"strategy": "learned", "after": 2}),
        (["--keep-layers", "0,2"], {"kept": [0, 2], "dropped": [1, 3], "strategy": "named"}),
    ],
    quick=2,
)
def test_every_strategy_reports_quality_before_and_after(
    words: list[object], expected: dict[str, Any], deep: Path, cli: Cli, tmp_path: Path
) -> None:
    told = pruned(cli, deep, *words, "--out", tmp_path / "small")
    layers = told["layers"]["decoder"]
    assert expected.items() <= layers.items() and len(layers["kept"]) == layers["after"]
    assert told["after"]["parameters"] < told["before"]["parameters"] and told["metric"] == "loss"
    for when, where in (("before", deep), ("after", tmp_path / "small")):
        measured = json.loads(cli("evaluate", where, "--json").out)
        assert told[when]["loss"] == pytest.approx(measured["loss"], rel=1e-5)
        assert told[when]["accuracy"] == pytest.approx(measured["accuracy"])


def test_a_search_is_at_least_as_good_as_any_named_choice(deep: Path, cli: Cli, tmp_path: Path) -> None:
    best = pruned(cli, deep, "--keep", 3, "--strategy", "search", "--out", tmp_path / "best")
    for layer in range(4):
        other = pruned(cli, deep, "--drop-layers", layer, "--out", tmp_path / f"without-{layer}")
        assert best["after"]["loss"] <= other["after"]["loss"] + 1e-6


def test_the_result_generates_and_is_fine_tuned_but_not_resumed(
    deep: Path, cli: Cli, text_file: Path, tmp_path: Path
) -> None:
    small = tmp_path / "small"
    pruned(cli, deep, "--rate", 0.5, "--drop-heads", 0.5, "--out", small)
    assert cli("generate", small, "--prompt", "the", "--greedy", "--max-new-tokens", 5).code == 0
    more = ["--max-steps", 3, "--out", tmp_path / "tuned"]
    outcome = cli("train", "--init-from", small, "--data", text_file, *more)
    assert outcome.code == 0, outcome.err
    again = pruned(cli, tmp_path / "tuned", "--keep", 1, "--no-evaluate", "--out", tmp_path / "again")
    assert again["layers"]["decoder"]["before"] == 2
    refused = cli("train", "--resume", "--out", small)
    assert refused.code == 2 and "Traceback" not in refused.err


@first_is_quick("kind", ["single", "pair", "multi", "score", "image", "masked", "sentences", "electra"], quick=2)
def test_heads_of_every_kind_of_encoder(
    kind: str, encoder_run: Callable[[str], Path], cli: Cli, tmp_path: Path
) -> None:
    run = encoder_run(kind)
    told = pruned(cli, run, "--drop-heads", 1, "--max-examples", 40, "--out", tmp_path / "small")
    assert (told["heads"]["before"], told["heads"]["after"]) == (2, 1)
    [layer] = told["heads"]["encoder"]
    importance = layer["self_attention"]["importance"]
    assert layer["self_attention"]["kept"] == [importance.index(max(importance))]
    assert told["before"]["loss"] != told["after"]["loss"]
    outcome = cli("evaluate", tmp_path / "small", "--json")
    assert outcome.code == 0, outcome.err


def test_a_translator_loses_layers_of_both_stacks_or_of_one(
    random_run: Callable[..., Path], cli: Cli, tmp_path: Path
) -> None:
    run = random_run(SEQ2SEQ.replace("num_layers: 1", "num_layers: 3") + "objectives: [{kind: seq2seq}]\n")
    for side, texts in (("source", ["abc", "fed cab", "h"]), ("target", ["cba", "bac def", "h"])):
        (tmp_path / side).write_text("\n".join(texts) + "\n")
    data = ["--source", tmp_path / "source", "--target", tmp_path / "target"]
    both = pruned(cli, run, "--keep", 2, "--strategy", "search", *data, "--out", tmp_path / "both")
    assert {side: choice["after"] for side, choice in both["layers"].items()} == {"encoder": 2, "decoder": 2}
    one = pruned(cli, run, "--drop-layers", "0", "--stack", "decoder", *data, "--out", tmp_path / "one")
    assert list(one["layers"]) == ["decoder"]
    heads = pruned(cli, run, "--drop-heads", 0.5, *data, "--out", tmp_path / "heads")
    assert {"self_attention", "cross_attention"} == heads["heads"]["decoder"][0].keys()
    for small in ("both", "one", "heads"):
        outcome = cli("generate", tmp_path / small, "--prompt", "abc", "--max-new-tokens", 4)
        assert outcome.code == 0, outcome.err


def test_a_hugging_face_folder_is_pruned_and_goes_back(folders: Path, cli: Cli, tmp_path: Path) -> None:
    outcome = cli("prune", folders / "gpt2", "--rate", 0.5, "--out", tmp_path / "small")
    assert outcome.code == 2 and "it has no training data" in outcome.err and "--no-evaluate" in outcome.err
    told = pruned(cli, folders / "gpt2", "--rate", 0.5, "--no-evaluate", "--out", tmp_path / "small")
    assert told["metric"] is None and "loss" not in told["before"]
    outcome = cli("export", tmp_path / "small", "--out", tmp_path / "hf")
    assert outcome.code == 0, outcome.err
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["n_layer"] == told["layers"]["decoder"]["after"]
    outcome = cli("evaluate", tmp_path / "small")
    assert outcome.code == 2 and "it has no training data" in outcome.err


def test_nothing_named_means_the_newest_run(deep: Path, cli: Cli, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "home" / "runs").mkdir(parents=True)
    deep.rename(tmp_path / "home" / "runs" / "gpt-1")
    monkeypatch.chdir(tmp_path / "home")
    told = pruned(cli, "--keep", 1, "--no-evaluate", "--out", "small")
    assert told["path"] == "small" and Path("small", "manifest.json").is_file()
