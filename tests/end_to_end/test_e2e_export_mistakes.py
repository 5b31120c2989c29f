"""`tformer export` asked for what it cannot do: one clear line, exit code 2, nothing written; and interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.translate_runs import DECODER, refusal


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--shard-size", "big"], "--shard-size"),
        (["--shard-size", "0GB"], "--shard-size"),
        (["--dtype", "fp8"], "--dtype"),
        (["--dtype", "int8"], "CTranslate2"),
        (["--to", "onnx"], "--to"),
        (["--as", "gtp2"], "'gtp2'"),
        (["--as", "opt"], "OPTForCausalLM comes nearest: model.decoder.positions.offset"),
        (["--checkpoint", "step-99"], "step-99"),
    ],
)
def test_a_mistake_is_one_clear_line_and_nothing_is_written(
    cli: Callable[..., Any], trained: Callable[[str], Path], tmp_path: Path, options: list[str], word: str
) -> None:
    assert word in refusal(cli("export", trained("gpt"), "--out", tmp_path / "hf", *options))
    assert not list(tmp_path.iterdir())


def test_a_model_that_neither_a_class_nor_the_own_code_computes_is_refused_by_field(
    cli: Callable[..., Any], random_run: Callable[..., Path], tmp_path: Path
) -> None:
    stack = "{num_layers: 1, num_heads: 2, feedforward: {d_ff: 16}"
    run = random_run(DECODER.replace(stack, f"{stack}, positions: {{kind: shaw}}"))
    message = refusal(cli("export", run, "--out", tmp_path / "hf"))
    assert "no class of Hugging Face" in message and "model.decoder.positions.kind: shaw" in message


def test_out_is_asked_for_and_never_replaced(
    cli: Callable[..., Any], trained: Callable[[str], Path], tmp_path: Path
) -> None:
    assert "--out is missing" in refusal(cli("export", trained("gpt")))
    assert "exists already" in refusal(cli("export", trained("gpt"), "--out", tmp_path))
    inside = trained("gpt") / "checkpoints" / "hf"
    assert "among the checkpoints of a run" in refusal(cli("export", trained("gpt"), "--out", inside))


def test_a_signal_leaves_nothing(trained: Callable[[str], Path], tmp_path: Path) -> None:
    """Sent while the weights are being written, which here takes for ever."""
    slow = (
        "import sys, time\nfrom tformer import files\nwrite = files.write\n"
        "def crawl(descriptor, data):\n    write(descriptor, data)\n    print('.', flush=True)\n    time.sleep(0.2)\n"
        "files.write = crawl\nfrom tformer.cli.app import main\nmain(sys.argv[1:])\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", slow, "export", str(trained("gpt")), "--out", str(tmp_path / "hf")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    for _ in range(4):
        assert process.stdout.readline() == ".\n"
    assert [path.name for path in tmp_path.iterdir()] == [".tmp-hf"]
    process.send_signal(signal.SIGINT)
    start = time.monotonic()
    _, talk = process.communicate(timeout=60)
    assert process.returncode == 130 and "nothing written" in talk and "Traceback" not in talk
    assert time.monotonic() - start < 30 and not list(tmp_path.iterdir())
