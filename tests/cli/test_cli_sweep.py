"""The command line of `tformer sweep`: what it lists, what it refuses before any training, how it shows a table."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tformer.cli import trainings as sweep_report
from tformer.workflows.sweep.cells import Result
from tformer.workflows.sweep.plan import SweepPlan, SweepTask
from tformer.workflows.sweep.table import SweepTable, make_table

VARY = ("--vary", "model.*.norm.place=pre,post")


def test_a_dry_run_lists_the_trainings_and_writes_nothing(
    tiny_recipe: Path, tmp_path: Path, cli: Callable[..., Any]
) -> None:
    out = tmp_path / "out"
    shown = cli("sweep", "--config", tiny_recipe, *VARY, "--seeds", 2, "--dry-run", "--out", out)
    assert shown.code == 0 and not out.exists()
    assert shown.out.splitlines() == [
        f"{place}-seed{seed}\tnorm.place={place}" for seed in (1337, 1338) for place in ("pre", "post")
    ]
    assert "4 trainings" in shown.err


def test_a_dry_run_as_json_has_each_command(tiny_recipe: Path, cli: Callable[..., Any]) -> None:
    heads = ("--vary", "model.decoder.num_heads=2,3", "--skip-invalid")
    shown = cli("sweep", "--config", tiny_recipe, *heads, "--dry-run", "--json", "--data", "x", "--", "--lr", "0.1")
    document = json.loads(shown.out)
    assert [cell["cell"] for cell in document["cells"]] == ["num_heads-2-seed1337"]
    assert document["cells"][0]["command"] == [
        *("tformer", "train", "--config", str(tiny_recipe), "--data", "x", "--lr", "0.1"),
        *("--set", "model.decoder.num_heads=2", "--set", "seed=1337"),
    ]
    assert document["left_out"][0]["message"].startswith("model.decoder.num_heads: 3 heads")


def test_seeds_and_steps_of_the_command_line_are_the_plans(
    tmp_path: Path, cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATA", "data")
    shown = cli("sweep", "--plan", "positions", "--seeds", 2, "--max-steps", 5, "--dry-run", "--json")
    cells = json.loads(shown.out)["cells"]
    assert len(cells) == 28 and all("training.max_steps=5" in cell["command"] for cell in cells)


def table() -> SweepTable:
    task = SweepTask(vary={"optimizer.lr": (0.1, 0.2), "model.heads": (["[bold]"],)})
    results = [
        Result(f"c{lr}", "sweep", {"lr": lr, "heads": "[bold]x[/]"}, 1, status="done", best=best, parameters=12345)
        for lr, best in (("0.1", 1.0), ("0.2", 2.0))
    ]
    return make_table(SweepPlan(tasks=(task,)), results)


@pytest.mark.parametrize(("columns", "wide"), [(120, True), (20, False)])
def test_a_narrow_terminal_gets_a_block_for_each_variant(
    columns: int, wide: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    sweep_report.show_table(table())
    shown = capsys.readouterr().out
    assert ("parameters: 12,345" in shown) == (not wide) and ("┃" in shown) == wide
    assert shown.count("12,345") == 2 and shown.count("[bold]x[/]") == 2  # what a person wrote is no markup


def test_what_is_piped_is_markdown(capsys: pytest.CaptureFixture[str]) -> None:
    sweep_report.show_table(table())
    assert capsys.readouterr().out.splitlines()[0] == "| lr | heads | parameters | loss |"
