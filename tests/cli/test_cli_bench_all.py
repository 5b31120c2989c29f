"""`tformer bench all` with the measuring replaced."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tformer.bench import suite
from tformer.bench.speed import Row, SpeedBench

Cli = Callable[..., Any]


@pytest.fixture(autouse=True)
def failing(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(bench: SpeedBench, *, on_row: Callable[[Row], None], **_: Any) -> list[Row]:
        rows = [Row(entry, bench.batch_sizes[0], failed="out of memory") for entry in bench.entries]
        for row in rows:
            on_row(row)
        return rows

    monkeypatch.setattr(suite, "run_speed", run)


@pytest.mark.slow
def test_progress_on_stderr_a_report_of_what_failed_and_one_document(cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "report.md"
    done = cli("bench", "all", "--quick", "--device", "cpu", "--out", out, "--json")
    assert done.code == 1
    assert "1 of 6  Training" in done.err and "tformer bench train --arch gpt" in done.err
    page = out.read_text()
    assert page.startswith("# Speed of tformer") and page.count("\n## ") == 6 and "out of memory" in page
    found = json.loads(done.out)
    assert len(found["cases"]) == 6 and all(case["command"] for case in found["cases"])


def test_a_folder_is_no_report(cli: Cli, tmp_path: Path) -> None:
    done = cli("bench", "all", "--out", tmp_path)
    assert done.code == 2 and "expected a file" in done.err
