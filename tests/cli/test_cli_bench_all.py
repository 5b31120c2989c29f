"""`tformer bench all` with the measuring replaced."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tformer.bench import suite
from tformer.bench.quality import QualityBench, QualityRow
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


def test_time_to_quality_needs_text_and_text_to_validate_on(cli: Cli, tmp_path: Path) -> None:
    done = cli("bench", "all", "--quick", "--data", tmp_path, "--out", tmp_path / "r.md")
    assert done.code == 2 and "--data: found without --valid" in done.err
    (tmp_path / "a.txt").write_text("some text\n")
    words = ("--data", tmp_path / "a.txt", "--valid", tmp_path / "missing.txt", "--out", tmp_path / "r.md")
    done = cli("bench", "all", "--quick", "--device", "cpu", *words)
    assert done.code == 2 and "missing.txt" in done.err and "Training" not in done.err


def test_with_text_the_seconds_to_a_loss_are_reported(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reached(bench: QualityBench, *, on_row: Callable[[QualityRow], None], **_: Any) -> list[QualityRow]:
        rows = [QualityRow(seed, seconds=11.5, loss=1.84, reached=True) for seed in bench.seeds]
        for row in rows:
            on_row(row)
        return rows

    monkeypatch.setattr(suite, "run_quality", reached)
    monkeypatch.setattr(suite, "CPU_CASES", suite.CPU_CASES[:1])
    (tmp_path / "a.txt").write_text("some text\n")
    words = ("--data", tmp_path / "a.txt", "--valid", tmp_path / "a.txt", "--out", tmp_path / "r.md")
    done = cli("bench", "all", "--quick", "--device", "cpu", *words)
    assert (
        done.code == 0
        and done.out.strip() == str(tmp_path / "r.md")
        and "2 of 2  Time to quality, gpt/char-12s" in done.err
    )
    assert "seed 1: loss 1.8400 after 11.5 s" in done.err
    assert "## Time to quality, gpt/char-12s to a validation loss of 1.88" in (tmp_path / "r.md").read_text()


def test_a_folder_is_no_report(cli: Cli, tmp_path: Path) -> None:
    done = cli("bench", "all", "--out", tmp_path)
    assert done.code == 2 and "expected a file" in done.err
