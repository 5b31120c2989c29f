"""How runs look: a table that fits, blocks where none does, and words that nobody can steer a terminal with."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.workflows.run_makers import make_run
from tformer.cli.runs import compare_lines, figure, list_lines, show_lines, text_of
from tformer.support.formatting import decimal_bytes, duration, short_count
from tformer.workflows.runs.compare import compare_runs, describe_run
from tformer.workflows.runs.summary import RunSummary, summarize_run


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    make_run(root / "a")
    make_run(root / "b", norm="scalenorm", d_model=16, steps=(4,))
    return root


@pytest.fixture(scope="module")
def runs(home: Path) -> list[RunSummary]:
    return [replace(summarize_run(home / name), path=Path("runs") / name) for name in "ab"]


def test_a_line_for_each_run(runs: list[RunSummary]) -> None:
    lines = list(list_lines(runs))
    assert lines[0].split() == ["run", "recipe", "state", "step", "best", "parameters", "time", "size"]
    assert lines[1].split()[:4] == ["runs/a", "gpt/tiny", "finished", "12/12"]
    assert "loss 2.06 @ 6" in lines[1] and "24.0s" in lines[1]
    assert lines[2].split()[2:4] == ["stopped", "4/12"]
    assert list(list_lines([])) == []


@pytest.mark.parametrize("width", [30, 45, 60, 75, 90, 200])
def test_the_table_is_never_wider_than_the_terminal(width: int, runs: list[RunSummary]) -> None:
    lines = list(list_lines(runs, width=width))
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert all(word in text for word in ("runs/a", "runs/b", "finished", "stopped", "12/12", "loss 2.06 @ 6"))


def test_problems_stand_beneath_their_run(runs: list[RunSummary]) -> None:
    damaged = replace(runs[0], state="damaged", problems=["recipe.yaml is bad\nreally"], recipe=None, parameters=None)
    for width in (None, 30):
        lines = list(list_lines([damaged, runs[1]], width=width))
        [index] = [number for number, line in enumerate(lines) if line == "  ! recipe.yaml is bad\\nreally"]
        assert "runs/b" in lines[index + 1]


def test_all_of_one_run(home: Path) -> None:
    text = "\n".join(show_lines(describe_run(home / "a")))
    for words in ("differs from preset gpt/tiny", "model.d_model: 8", "data      f00d", "tformer train", "step 12"):
        assert words in text
    assert "first" in text and "latest" in text and "best" in text


def test_runs_side_by_side_or_below_one_another(home: Path) -> None:
    comparison = compare_runs([home / "a", home / "b"])
    wide = list(compare_lines(comparison))
    [row] = [line for line in wide if line.startswith("model.d_model")]
    assert row.split() == ["model.d_model", "8", "16"]
    narrow = list(compare_lines(comparison, width=40))
    index = narrow.index("model.d_model")
    assert narrow[index + 1 : index + 3] == ["  a: 8", "  b: 16"]
    equal = list(compare_lines(compare_runs([home / "a", make_run(home / "c")])))
    assert equal[1] == "the recipes are equal"
    (home / "c" / "recipe.yaml").write_text("]")
    damaged = list(compare_lines(compare_runs([home / "a", home / "c"])))
    assert damaged[1] == "no difference found: 1 of 2 recipes cannot be read"


def test_figures_are_short_and_plain() -> None:
    assert [short_count(n) for n in (999, 12_345, 124_439_808, 7 * 10**9)] == ["999", "12.3k", "124M", "7B"]
    assert [duration(s) for s in (4.26, 185, 7385)] == ["4.3s", "3:05", "2:03:05"]
    assert [decimal_bytes(n) for n in (12, 1234, 5_600_000, 2 * 10**9)] == ["12 B", "1.2 kB", "5.6 MB", "2.0 GB"]
    assert [figure(v) for v in (1234, 0.123456789, 54321.7, 10000.0)] == ["1,234", "0.12346", "54,322", "10,000"]
    assert [figure(v) for v in (None, True)] == ["-", "-"]
    assert [text_of(v) for v in (None, True, "", "a\tb", [1, "x"])] == ["null", "true", '""', "a\\tb", '[1, "x"]']


def test_what_others_wrote_cannot_steer_the_terminal(tmp_path: Path, cli: Callable[..., Any]) -> None:
    make_run(tmp_path / "\x1b[31mred\nrun")
    outcome = cli("runs", "list", tmp_path)
    assert outcome.code == 0 and "\x1b" not in outcome.out and "\\x1b[31mred\\nrun" in outcome.out
    [found] = json.loads(cli("runs", "list", tmp_path, "--json").out)
    assert found["run"].endswith("\x1b[31mred\nrun")
