"""`tformer bench train`, `generate` and `classify` as a user runs them, on tiny models: real processes."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.interrupting import interrupt_with_its_child

Start = Callable[..., "subprocess.Popen[str]"]
QUICK = ("--repeats", 1, "--max-seconds", 600, "--device", "cpu", "--precision", "fp32")
WORKS = {
    "train": ("--batch-size", 2, "--length", 8),
    "generate": ("--prompt-length", 3, "--new-tokens", 4),
    "classify": ("--texts", 10, "--batch-size", 4),
}
BERT = """\
arch: bert
model: {d_model: 16, max_seq_len: 16, vocab_size: 40, encoder: {num_layers: 1, num_heads: 2, feedforward: {d_ff: 32}},
        heads: [{kind: classifier, num_labels: 2}]}
objectives: [{kind: classification}]
"""


def measured(cli_process: Start, folder: Path, recipe: Path, work: str, *words: object) -> dict[str, Any]:
    if work == "classify":
        recipe.write_text(BERT)
    command = ("bench", work, "--config", recipe, *WORKS[work], *QUICK, *words, "--json")
    process = cli_process(*command, cwd=folder)
    out, err = process.communicate(timeout=1800)
    assert process.returncode == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


@pytest.mark.parametrize("work", WORKS)
def test_a_short_bench(cli_process: Start, tmp_path: Path, tiny_recipe: Path, work: str) -> None:
    peers = ("--peer", "transformers", "--peer-precision", "fp32") if importlib.util.find_spec("transformers") else ()
    found = measured(cli_process, tmp_path, tiny_recipe, work, *peers, "--out", "report.md")
    assert [(row["name"], row["precision"]) for row in found["rows"]] == [
        ("tformer", "fp32"), *([("transformers", "fp32")] if peers else []),
    ]  # fmt: skip
    for row in found["rows"]:
        assert row["tokens_per_second"] > 0 and row["step_ms"] > 0 and row["peak_rss_bytes"] > 0
        assert row["share_of_peak"] > 0 and row["bound"] in ("arithmetic", "memory", "overhead")
    assert found["ceilings"][0]["flops_per_second"]["fp32"] > 0
    assert "tformer fp32" in (tmp_path / "report.md").read_text()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for the process in /proc")
def test_an_interrupt_ends_the_measuring_process_and_writes_nothing(cli_process: Start, tmp_path: Path) -> None:
    command = ("bench", "train", "--arch", "gpt", "--preset", "small", "--device", "cpu", "--out", "report.md")
    process = cli_process(*command, cwd=tmp_path)
    interrupt_with_its_child(process)
    assert not (tmp_path / "report.md").exists()
