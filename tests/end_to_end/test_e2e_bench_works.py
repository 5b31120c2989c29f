"""`tformer bench translate` and `tokenize` as a user runs them: real processes, one contender, tiny work."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TINY = ("--set", "model.vocab_size=60", "--set", "model.d_model=128", "--new-tokens", 3, "--beam", 2)


@pytest.mark.parametrize(
    "words",
    [
        ("translate", "--preset", "tiny", *TINY, "--sentences", 2, "--batch-size", 2, "--device", "cpu"),
        ("tokenize", "--set", "tokenizer.train.vocab_size=300", "--megabytes", 0.01),
    ],
    ids=lambda words: words[0],
)
def test_a_short_bench(cli_process: Callable[..., Any], tmp_path: Path, words: tuple[Any, ...]) -> None:
    shared = ("--repeats", 1, "--threads", 1, "--max-seconds", 600, "--out", "report.md", "--json")
    out, err = cli_process("bench", *words, *shared, cwd=tmp_path).communicate(timeout=1800)
    [row] = json.loads(out)["rows"]
    assert row["name"] == "tformer" and row["tokens_per_second"] > 0 and row["peak_rss_bytes"] > 0
    assert {"step_ms", "share_of_peak", "spread"} <= row.keys()
    assert "tokens/s" in err and "| tformer" in (tmp_path / "report.md").read_text()
