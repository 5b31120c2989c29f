"""How soon a command answers: the best of three, beside what `import torch` alone takes on the same machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

BEYOND_TORCH_SECONDS = 2.0
"""What one token may take beyond `import torch`; the promise is 3 s in all on an idle machine with two cores."""

HELP_SECONDS = 1.0
"""What `--help` may take beyond Python's own start; the promise is 0.3 s in all on an idle machine."""

CORPUS_LINES = 400


def best_of_three(run: Callable[[], subprocess.CompletedProcess[str]]) -> float:
    times = []
    for _ in range(3):
        start = time.perf_counter()
        done = run()
        times.append(time.perf_counter() - start)
        assert done.returncode == 0, done.stderr
    return min(times)


def python(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, check=False, cwd=cwd, env=environment
    )


@pytest.fixture(scope="module")
def tiny_gpt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of `gpt/tiny` after one step."""
    folder = tmp_path_factory.mktemp("startup")
    (folder / "text.txt").write_text("".join(f"line {number} of a small text\n" for number in range(CORPUS_LINES)))
    words = ("--arch", "gpt", "--preset", "tiny", "--data", "text.txt", "--max-steps", "1", "--device", "cpu")
    sets = ("--set", "training.batch_size=2", "--set", "tokenizer.train.vocab_size=300", "--precision", "fp32")
    done = python("-m", "tformer", "train", *words, *sets, "--out", "run", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_one_token_of_the_tiny_model_takes_little_more_than_importing_torch(tiny_gpt: Path) -> None:
    words = ("-m", "tformer", "generate", "run", "--prompt", "line", "--max-new-tokens", "1", "--device", "cpu")
    torch_alone = best_of_three(lambda: python("-c", "import torch", cwd=tiny_gpt))
    one_token = best_of_three(lambda: python(*words, cwd=tiny_gpt))
    assert one_token < torch_alone + BEYOND_TORCH_SECONDS, f"{one_token:.2f} s, import torch {torch_alone:.2f} s"


def test_help_answers_at_once(tmp_path: Path) -> None:
    bare = best_of_three(lambda: python("-c", "", cwd=tmp_path))
    took = best_of_three(lambda: python("-m", "tformer", "--help", cwd=tmp_path))
    assert took < bare + HELP_SECONDS, f"{took:.2f} s, Python alone {bare:.2f} s"
