"""`tformer bench` as a user runs it, on tiny models: real processes, reports, and interrupts in the middle of one."""

from __future__ import annotations

import importlib.util
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
BERT = """\
arch: bert
model: {d_model: 16, max_seq_len: 16, vocab_size: 40, encoder: {num_layers: 1, num_heads: 2, feedforward: {d_ff: 32}},
        heads: [{kind: classifier, num_labels: 2}]}
objectives: [{kind: classification}]
"""
pytestmark = pytest.mark.slow  # quick: tests/bench, tests/cli/test_cli_bench_speed.py
in_proc = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for the process in /proc")


@pytest.mark.parametrize(
    ("work", "words"),
    [
        ("generate", ("--prompt-length", 3, "--new-tokens", 4, *FP32)),
        ("train", ("--batch-size", 2, "--length", 8, *FP32)),
        ("classify", ("--texts", 10, "--batch-size", 4, *FP32)),
        ("translate", (*TRANSLATE, "--sentences", 2, "--batch-size", 2, *FP32)),
    ],
)
def test_a_short_bench(
    cli_process: Start, tmp_path: Path, tiny_recipe: Path, work: str, words: tuple[object, ...]
) -> None:
    if work == "classify":
        tiny_recipe.write_text(BERT)
    model = ("--preset", "tiny") if work == "translate" else ("--config", tiny_recipe)
    has_peer = work == "train" and importlib.util.find_spec("transformers") is not None
    peers = ("--peer", "transformers", "--peer-precision", "fp32") if has_peer else ()
    process = cli_process("bench", work, *model, *words, *peers, *SHARED, cwd=tmp_path)
    out, err = process.communicate(timeout=1800)
    assert process.returncode == 0, err
    found = json.loads(out)
    names = ["tformer", *(["transformers"] if has_peer else [])]
    assert [(row["name"], row["precision"]) for row in found["rows"]] == [(name, "fp32") for name in names]
    for row in found["rows"]:
        assert row["tokens_per_second"] > 0 and row["step_ms"] > 0 and row["peak_rss_bytes"] > 0
        assert row["share_of_peak"] > 0 and row["bound"] in ("arithmetic", "memory", "overhead")
    assert found["ceilings"][0]["flops_per_second"]["fp32"] > 0
    assert "tokens/s" in err and "tformer fp32" in (tmp_path / "report.md").read_text()


def test_attention_against_length(cli_process: Start, tmp_path: Path) -> None:
    command = ("bench", "attention", "--kinds", "full", "--lengths", "32", "--num-heads", 2, "--head-dim", 8,
               "--repeats", 1, "--max-seconds", 600, "--device", "cpu", "--out", "report", "--json")  # fmt: skip
    out, err = cli_process(*command, cwd=tmp_path).communicate(timeout=1800)
    found = json.loads(out)
    assert [(cell["kind"], cell["length"], cell["failed"]) for cell in found["cells"]] == [
        ("full", 32, None)
    ]  # fmt: skip
    assert all(cell["median"] > 0 and cell["peak_rss_bytes"] > 0 for cell in found["cells"])
    assert "1 of 1  full at 32" in err and (tmp_path / "report" / "table.md").is_file()


@in_proc
@pytest.mark.parametrize(
    "words",
    [
        ("train", "--arch", "gpt", "--preset", "small", "--out", "report"),
        ("attention", "--kinds", "full", "--lengths", 65536, "--out", "report"),
    ],
    ids=lambda words: words[0],
)
def test_an_interrupt_ends_the_measuring_process_and_writes_nothing(
    cli_process: Start, tmp_path: Path, words: tuple[object, ...]
) -> None:
    interrupt_with_its_child(cli_process("bench", *words, "--device", "cpu", cwd=tmp_path))
    assert not (tmp_path / "report").exists()
