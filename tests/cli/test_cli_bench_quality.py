"""`tformer bench quality` with the training replaced: what is shown, and every mistake."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tformer.bench.quality import QualityBench, QualityRow

Cli = Callable[..., Any]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[QualityBench]:
    benches: list[QualityBench] = []

    def run(bench: QualityBench, *, on_row: Callable[[QualityRow], None], **_: Any) -> list[QualityRow]:
        benches.append(bench)
        rows = [QualityRow(seed, seconds=10.0 + seed, loss=1.4, reached=seed != 2) for seed in bench.seeds]
        for row in rows:
            on_row(row)
        return rows

    monkeypatch.setattr("tformer.bench.quality.run_quality", run)
    return benches


def test_a_table_on_stdout_and_a_line_for_each_seed_on_stderr(
    cli: Cli, asked: list[QualityBench], text_file: Path
) -> None:
    words = ("--data", text_file, "--valid", text_file, "--target-loss", 1.5, "--device", "cpu")
    done = cli("bench", "quality", "--preset", "char-6m", *words, "--seed", "1,2")
    assert done.code == 0 and "| mean ± std | 11.5 ± 0.7 | 1.4000 ± 0.0000 |" in done.out
    assert done.err.splitlines()[1:] == [
        "seed 1: loss 1.4000 after 11.0 s", "seed 2: loss 1.4000 after 12.0 s, target not reached",
    ]  # fmt: skip
    assert asked[0].preset == "char-6m" and asked[0].target == 1.5 and asked[0].seeds == (1, 2)


def test_json_is_one_document(cli: Cli, asked: list[QualityBench], text_file: Path) -> None:
    done = cli("bench", "quality", "--data", text_file, "--valid", text_file, "--device", "cpu", "--json")
    found = json.loads(done.out)
    assert done.code == 0 and found.keys() == {"command", "environment", "settings", "rows", "spread"}
    assert [row["seconds"] for row in found["rows"]] == [11.0, 12.0, 13.0]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--valid", "x"), "--data: found none"),
        (("--data", "x"), "--valid: found none"),
        (("--data", "x", "--valid", "x", "--seed", "one"), "--seed: found 'one'"),
        (("--data", "x", "--valid", "x", "--seed", ","), "--seed: found none"),
        (("--data", "x", "--valid", "x", "--target-loss", "nan"), "--target-loss must be a finite number, found nan"),
        (("--data", "x", "--valid", "x", "--target-loss", "-1"), "--target-loss: found -1.0"),
        (("--data", "x", "--valid", "x", "--max-seconds", "0"), "--max-seconds: found 0"),
        (("--data", "no-such-file", "--valid", "x"), "no-such-file"),
        (("--data", "x", "--valid", "x", "--preset", "no-such"), "no-such"),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_trained(
    cli: Cli, asked: list[QualityBench], words: tuple[str, ...], told: str
) -> None:
    done = cli("bench", "quality", *words, "--device", "cpu")
    assert done.code == 2 and done.out == "" and asked == []
    assert done.err.startswith("error: ") and told in done.err and len(done.err.splitlines()) <= 2
