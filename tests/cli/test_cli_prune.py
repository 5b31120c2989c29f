"""`tformer prune`: its options are checked before anything is loaded, and what it reports is complete."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import RECIPE
from tformer.cli.prune import report_lines
from tformer.workflows.prune.plan import PrunePlan

Cli = Callable[..., Any]


def test_options_of_a_plan() -> None:
    plan = PrunePlan(keep=3, strategy="search", max_trials=7, heads="0.25")
    plan.check()
    assert plan.head_amount == 0.25 and plan.needs_data and plan.cuts_layers
    named = PrunePlan(drop_layers=" 1, 3")
    named.check()
    assert named.dropped_layers == (1, 3) and not named.needs_data
    assert PrunePlan(heads="4", heads_per_layer="free").head_amount == 4


@pytest.fixture
def deep_run(make_run: Callable[..., Path]) -> Path:
    return make_run(RECIPE.replace("num_layers: 1", "num_layers: 3"))


def test_missing_data_says_how_to_go_without(cli: Cli, deep_run: Path, tmp_path: Path) -> None:
    outcome = cli("prune", deep_run, "--keep", 1, "--data", tmp_path / "none.txt", "--out", tmp_path / "new")
    assert outcome.code == 2 and "none.txt" in outcome.err and "--no-evaluate" in outcome.err
    outcome = cli("prune", deep_run, "--drop-heads", 1, "--data", tmp_path / "none.txt", "--out", tmp_path / "new")
    assert outcome.code == 2 and "--no-evaluate" not in outcome.err


def test_the_path_is_on_stdout_and_the_table_on_stderr(
    cli: Cli, deep_run: Path, text_file: Path, tmp_path: Path
) -> None:
    text_file.write_text("abc fed\n" * 40)
    outcome = cli("prune", deep_run, "--rate", 0.5, "--data", text_file, "--out", tmp_path / "new")
    assert outcome.code == 0 and outcome.out == f"{tmp_path / 'new'}\n", outcome.err
    lines = outcome.err.splitlines()
    assert "decoder: 1 of 3 layers stay: 1 (every-other)" in lines
    rows = {line.split()[0]: line.split()[1:] for line in lines if len(line.split()) == 4}
    assert {"parameters", "flops_per_token", "loss", "accuracy", "perplexity"} <= rows.keys()
    assert rows["parameters"][2].startswith("-") and rows["parameters"][2].endswith("%")


def test_costs_alone_without_evaluation(cli: Cli, deep_run: Path, tmp_path: Path) -> None:
    outcome = cli("prune", deep_run, "--rate", 0.5, "--no-evaluate", "--out", tmp_path / "new")
    assert outcome.code == 0 and "loss" not in outcome.err and "parameters" in outcome.err


@pytest.mark.parametrize("given", [("--data", "x.txt"), ("--max-examples", "3"), ("--batch-size", "2")])
def test_options_of_data_that_nothing_reads_are_refused(cli: Cli, given: tuple[str, str]) -> None:
    outcome = cli("prune", "run", "--rate", 0.5, "--no-evaluate", *given, "--out", "new")
    assert outcome.code == 2
    assert outcome.err == f"error: --no-evaluate and {given[0]} exclude each other\nhint: nothing is measured on data\n"
    needed = cli("prune", "run", "--drop-heads", 1, "--no-evaluate", *given, "--out", "new")  # measures the heads
    assert "exclude each other" not in needed.err


def test_report_names_layers_heads_and_notes() -> None:
    from tformer.workflows.prune.heads import HeadChoice, LayerHeads
    from tformer.workflows.prune.layers import LayerChoice
    from tformer.workflows.prune.pruning import Pruned

    made = Pruned(
        Path("new"),
        7,
        {"encoder": LayerChoice(4, (0, 3), "search", "greedy", 9)},
        HeadChoice({"encoder": [LayerHeads((0, 2)), LayerHeads((1,))]}, 8, 3, "free"),
        {},
        {"parameters": 2000, "flops_per_token": 4000.0, "loss": 1.0, "examples": 5},
        {"parameters": 1000, "flops_per_token": 3000.0, "loss": 1.25, "examples": 5},
        "loss",
        "valid.txt",
        ["a note"],
    )
    assert list(report_lines(made)) == [
        "encoder: 2 of 4 layers stay: 0, 3 (search, greedy, 9 evaluations)",
        "heads: 3 of 8 stay (free)",
        "encoder heads by layer: 2, 1",
        "note: a note",
        "measured on valid.txt",
        "                 before   after",
        "parameters        2,000   1,000   -50.0%",
        "flops_per_token   4,000   3,000   -25.0%",
        "loss             1.0000  1.2500  +0.2500",
    ]
