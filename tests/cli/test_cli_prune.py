"""`tformer prune`: its options are checked before anything is loaded, and what it reports is complete."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import RECIPE
from tformer.cli.prune import report_lines
from tformer.workflows.prune.plan import Plan

Cli = Callable[..., Any]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rate", 0.5], "--out is missing"),
        (["--out", "new"], "nothing to prune: give one of --keep-layers"),
        (["--out", "new", "--rate", 0.5, "--keep", 2], "--keep and --rate exclude each other"),
        (["--out", "new", "--keep-layers", "0", "--drop-layers", "1"], "--keep-layers and --drop-layers exclude"),
        (["--out", "new", "--rate", 1], "--rate must be above 0 and below 1, found 1"),
        (["--out", "new", "--rate", -0.5], "--rate must be above 0 and below 1, found -0.5"),
        (["--out", "new", "--rate", "nan"], "--rate must be a finite number, found nan"),
        (["--out", "new", "--keep", 0], "--keep must be at least 1, found 0"),
        (["--out", "new", "--keep", 2, "--strategy", "best"], "Invalid value for '--strategy': 'best' is not one of"),
        (["--out", "new", "--drop-layers", "1", "--strategy", "search"], "--strategy search needs --keep N or --rate"),
        (
            ["--out", "new", "--keep", 2, "--stack", "both ends"],
            "Invalid value for '--stack': 'both ends' is not one of",
        ),
        (
            ["--out", "new", "--drop-layers", "1,x"],
            "--drop-layers: expected numbers of layers such as 0,2,4, found 'x'",
        ),
        (["--out", "new", "--drop-layers", ""], "--drop-layers: expected numbers of layers"),
        (
            ["--out", "new", "--drop-heads", "1.5"],
            "--drop-heads: expected a share between 0 and 1, or a number of heads",
        ),
        (
            ["--out", "new", "--drop-heads", "few"],
            "--drop-heads: expected a share between 0 and 1, or a number of heads",
        ),
        (["--out", "new", "--drop-heads", "0"], "--drop-heads: expected a share between 0 and 1, or a number of heads"),
        (
            ["--out", "new", "--drop-heads", "0.3", "--heads-per-layer", "odd"],
            "Invalid value for '--heads-per-layer': 'odd' is not one of",
        ),
        (["--out", "new", "--rate", 0.5, "--heads-per-layer", "free"], "--heads-per-layer needs --drop-heads"),
        (["--out", "new", "--rate", 0.5, "--max-trials", 9], "--max-trials needs --strategy search"),
        (["--out", "new", "--rate", 0.5, "--max-examples", 0], "--max-examples must be at least 1, found 0"),
        (["--out", "new", "--rate", 0.5, "--source", "a"], "--source without --target"),
    ],
)
def test_bad_usage_is_one_line_and_exit_2(words: list[object], message: str, cli: Cli, tmp_path: Path) -> None:
    outcome = cli("prune", tmp_path / "missing", *words)
    assert outcome.code == 2 and outcome.out == "", outcome.err
    [line] = [line for line in outcome.err.splitlines() if line.startswith("error: ")]
    assert message in line


def test_options_of_a_plan() -> None:
    plan = Plan(keep=3, strategy="search", max_trials=7, heads="0.25")
    plan.check()
    assert plan.head_amount == 0.25 and plan.needs_data and plan.cuts_layers
    named = Plan(drop_layers=" 1, 3")
    named.check()
    assert named.dropped_layers == (1, 3) and not named.needs_data
    assert Plan(heads="4", heads_per_layer="free").head_amount == 4


@pytest.fixture
def deep_run(make_run: Callable[..., Path]) -> Path:
    return make_run(RECIPE.replace("num_layers: 1", "num_layers: 3"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--drop-layers", "3"], "--drop-layers: the decoder has no layer 3: its layers are 0 to 2"),
        (["--keep-layers", "0,1,2"], "nothing would be removed: the decoder has 3 layers"),
        (["--drop-layers", "0,1,2"], "--drop-layers: no layer of the decoder is left"),
        (["--keep", "4"], "--keep 4: the decoder has 3 layers"),
        (["--keep", "2", "--stack", "encoder"], "--stack encoder: the model has no encoder"),
        (["--keep", "2", "--strategy", "learned"], "--strategy learned: model.decoder.layerdrop"),
        (["--keep", "2", "--label-column", "label"], "--label-column has no meaning here"),
        (["--drop-heads", "5"], "--drop-heads 5: at most 3 of 6 heads can be removed"),
    ],
)
def test_what_does_not_fit_the_model_is_one_line_and_nothing_is_written(
    words: list[str], message: str, cli: Cli, deep_run: Path, text_file: Path, tmp_path: Path
) -> None:
    outcome = cli("prune", deep_run, *words, "--data", text_file, "--out", tmp_path / "new")
    assert outcome.code == 2 and message in outcome.err, outcome.err
    assert not (tmp_path / "new").exists()


def test_an_existing_folder_stays(cli: Cli, deep_run: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    outcome = cli("prune", deep_run, "--rate", 0.5, "--no-evaluate", "--out", tmp_path / "file")
    assert outcome.code == 2 and "exists already" in outcome.err and (tmp_path / "file").read_text() == "mine"


def test_a_model_of_one_layer_has_none_to_spare(cli: Cli, random_run: Path, tmp_path: Path) -> None:
    outcome = cli("prune", random_run, "--rate", 0.5, "--no-evaluate", "--out", tmp_path / "new")
    assert outcome.code == 2 and "the decoder has 1 layer, which must stay" in outcome.err


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
