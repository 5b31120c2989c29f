"""`tformer bench` as a user runs it, on tiny models: real processes, reports, and interrupts in the middle of one."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.end_to_end.interrupting import interrupt_with_its_child

Start = Callable[..., "subprocess.Popen[str]"]
SHARED = ("--repeats", 1, "--threads", 1, "--max-seconds", 600, "--out", "report.md", "--json")
FP32 = ("--device", "cpu", "--precision", "fp32")
TRANSLATE = ("--set", "model.vocab_size=60", "--set", "model.d_model=128", "--new-tokens", 3, "--beam-size", 2)
pytestmark = pytest.mark.slow  # quick: tests/bench, tests/cli/test_cli_bench_speed.py
in_proc = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for the process in /proc")


@pytest.mark.parametrize(
    ("work", "words"),
    [
        ("generate", ("--prompt-length", 3, "--new-tokens", 4, *FP32)),
        ("train", ("--batch-size", 2, "--length", 8, *FP32)),
        ("translate", (*TRANSLATE, "--sentences", 2, "--batch-size", 2, *FP32)),
    ],
)
def test_a_short_bench(
    cli_process: Start, tmp_path: Path, tiny_recipe: Path, work: str, words: tuple[object, ...]
) -> None:
    model = ("--preset", "tiny") if work == "translate" else ("--config", tiny_recipe)
    process = cli_process("bench", work, *model, *words, *SHARED, cwd=tmp_path)
    out, err = process.communicate(timeout=1800)
    assert process.returncode == 0, err
    found = json.loads(out)
    assert [(row["name"], row["precision"]) for row in found["rows"]] == [("tformer", "fp32")]
    for row in found["rows"]:
        assert row["tokens_per_second"] > 0 and row["step_ms"] > 0 and row["peak_rss_bytes"] > 0
        assert row["share_of_peak"] > 0 and row["bound"] in ("arithmetic", "memory", "overhead")
    assert found["ceilings"][0]["flops_per_second"]["fp32"] > 0
    assert "tokens/s" in err and "tformer fp32" in (tmp_path / "report.md").read_text()


@in_proc
def test_an_interrupt_ends_the_measuring_process_and_writes_nothing(cli_process: Start, tmp_path: Path) -> None:
    words = ("train", "--arch", "gpt", "--preset", "small", "--out", "report")
    interrupt_with_its_child(cli_process("bench", *words, "--device", "cpu", cwd=tmp_path))
    assert not (tmp_path / "report").exists()
