"""`tformer bench all` with the measuring replaced."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tformer.bench import all_report
from tformer.bench.speed import Row, SpeedBench

Cli = Callable[..., Any]


@pytest.fixture(autouse=True)
def failing(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(bench: SpeedBench, *, told: Callable[[Row], None], **_: Any) -> list[Row]:
        rows = [Row(entry, bench.batch_sizes[0], failed="out of memory") for entry in bench.entries]
        for row in rows:
            told(row)
        return rows

    monkeypatch.setattr(all_report, "run_speed", run)


def test_progress_on_stderr_and_a_report_of_what_failed(cli: Cli, tmp_path: Path) -> None:
    done = cli("bench", "all", "--quick", "--device", "cpu", "--out", tmp_path / "report.md")
    assert done.code == 1 and done.out.strip() == str(tmp_path / "report.md")
    assert "1 of 6  Training" in done.err and "tformer bench train --arch gpt" in done.err
    page = (tmp_path / "report.md").read_text()
    assert page.startswith("# Speed of tformer") and page.count("\n## ") == 6 and "out of memory" in page


def test_json_is_one_document(cli: Cli, tmp_path: Path) -> None:
    done = cli("bench", "all", "--quick", "--device", "cpu", "--out", tmp_path / "report.md", "--json")
    found = json.loads(done.out)
    assert len(found["cases"]) == 6 and all(case["command"] for case in found["cases"])


def test_the_folder_of_the_report_is_made(cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "missing" / "dir" / "r.md"
    assert cli("bench", "all", "--quick", "--device", "cpu", "--out", out).code == 1
    assert out.read_text().startswith("# Speed of tformer")


def test_a_folder_is_no_report(cli: Cli, tmp_path: Path) -> None:
    done = cli("bench", "all", "--out", tmp_path)
    assert done.code == 2 and "expected a file" in done.err
