"""Same command, same result: every command that makes numbers is a function of its inputs, its recipe and its seed.

Programs of their own run the commands of `same_commands` in one and in the opposite order, with other hash seeds of
Python and other numbers of threads of the tokenizer trainer, each time in the same empty directory. All files and all
standard output must be equal, apart from times, rates and memory: weights, optimizer states, recipes, tokenizers,
metrics, samples, caches of token ids, exported and pruned models, pages, JSON documents.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.same_commands import MODELS
from tformer.recipe import DEFAULT_PRESETS

ROOT = Path(__file__).parents[2]


def hashes(names: str, folder: Path, *, number: int) -> dict[str, str]:
    """SHA-256 by file of what the commands of a set write, as their run `number` (1, 2, ...) in a fresh process."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "TFORMER_CACHE": str(folder / "cache"), "TFORMER_KERNELS": "off",
        "PYTHONHASHSEED": str(number), "RAYON_NUM_THREADS": str(2 ** (number - 1)), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    words = [sys.executable, "-m", "tests.end_to_end.same_commands", names, *["--reverse"] * (number % 2 == 0)]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(line.rsplit(" ", 1) for line in done.stdout.splitlines() if line[-64:].isalnum())


def unequal(first: dict[str, str], second: dict[str, str]) -> list[str]:
    return sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name))


def test_a_second_training_in_the_same_process_gives_the_same_weights(
    cli: Callable[..., Any], tmp_path: Path, text_file: Path, tiny_recipe: Path
) -> None:
    """The quick part of the slow tests below; tests/tokenizer/test_tokenizer_train.py has that of the tokenizers."""
    weights = []
    for name in ("first", "second"):
        words = ("--config", tiny_recipe, "--data", text_file, "--max-steps", 4, "--seed", 7, "--out", tmp_path / name)
        assert cli("train", *words).code == 0
        weights.append((tmp_path / name / "checkpoints" / "step-00000004" / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]


@pytest.mark.slow
def test_the_six_tokenizer_models_give_the_same_file_in_three_processes(tmp_path: Path) -> None:
    first = hashes("tokenizers", tmp_path / "work", number=1)
    assert {f"{model}.json" for model in MODELS} <= first.keys()
    for number in (2, 3):
        assert unequal(first, hashes("tokenizers", tmp_path / "work", number=number)) == []


@pytest.mark.slow
def test_each_default_training_gives_the_same_weights_and_metrics_in_two_processes(tmp_path: Path) -> None:
    first, second = (hashes("trainings", tmp_path / "work", number=number) for number in (1, 2))
    for arch in (*DEFAULT_PRESETS, "two-threads"):
        assert f"{arch}/checkpoints/step-00000002/model.safetensors" in first
        assert f"{arch}/metrics.jsonl" in first
    assert any(name.startswith("cache/") for name in first)
    assert unequal(first, second) == []


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], dict[str, str]]:
    folder = tmp_path_factory.mktemp("commands") / "work"
    return hashes("commands", folder, number=1), hashes("commands", folder, number=2)


@pytest.mark.slow
def test_no_command_opens_a_socket_to_a_network_or_loads_a_logging_service(commands: Any) -> None:
    """The program of the commands refuses and lists every attempt; loggers are loaded by --log-to alone."""
    assert "sample.out" in commands[0] and "network.txt" not in commands[0] | commands[1]


@pytest.mark.slow
def test_commands_that_work_with_a_run_give_the_same_bytes_in_two_processes(commands: Any) -> None:
    first, second = commands
    expected = ("averaged/model.safetensors", "exported/model.safetensors", "pruned/model.safetensors")
    assert {*expected, "positions.json", "attention.json", "sample.out", "swept/table.json"} <= first.keys()
    assert unequal(first, second) == []
