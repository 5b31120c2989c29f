"""`--help` of every command as a user calls it: examples that parse, and no import of torch."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tformer.cli import app

COMMANDS = (
    "",
    *(f"{name} {inner}".strip() for name, command in app.COMMANDS.items() for inner in ("", *command.subcommands())),
)
COMMANDS_WITH_EXAMPLES = tuple(command for command in COMMANDS if command not in ("", "config", "runs"))


def test_help_of_every_command_loads_no_torch() -> None:
    """One process for all: what the help of one command imports stays imported for the next."""
    code = (
        "import sys\nfrom tformer.cli.app import main\n"
        "for command in sys.argv[1:]:\n"
        "    try:\n        main([*command.split(), '--help'])\n"
        "    except SystemExit as end:\n        assert end.code == 0, command\n"
        "    heavy = {'torch', 'numpy', 'matplotlib', 'tokenizers'} & set(sys.modules)\n"
        "    assert not heavy, f'{command} --help imports {heavy}'\n"
    )
    run = subprocess.run([sys.executable, "-c", code, *COMMANDS], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("command", COMMANDS_WITH_EXAMPLES)
def test_help_shows_examples_that_parse(command: str, cli: Callable[..., Any], monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shown = cli(*command.split(), "--help-all").out
    examples = [" ".join(line.split()) for line in shown.splitlines() if line.strip().startswith("tformer ")]
    assert len(examples) >= 3, shown
    for example in examples:
        words = re.findall(r'"([^"]*)"|(\S+)', re.split(" [|>] ", example)[0])
        arguments = [quoted or plain for quoted, plain in words][1:]
        assert arguments[: len(command.split())] == command.split()
        outcome = cli(*arguments, "--help")  # parses everything before it shows the help
        assert outcome.code == 0, outcome.err


def test_the_program_alone_shows_three_first_steps(cli: Callable[..., Any]) -> None:
    shown = cli()
    steps = re.findall(r"^ *tformer (.*)$", shown.out.partition("First steps")[2], re.MULTILINE)
    assert [step.split()[0] for step in steps] == ["train", "generate", "viz-attention"] and shown.code == 2
    for step in steps:
        assert cli(*shlex.split(step), "--help").code == 0


def test_version(cli: Callable[..., Any]) -> None:
    assert cli("--version").out.startswith("tformer ")


BEYOND_TORCH_SECONDS = 2.0
"""What one token may take beyond `import torch`; the promise is 3 s in all on an idle machine with two cores."""

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


@pytest.mark.slow
def test_one_token_of_the_tiny_model_takes_little_more_than_importing_torch(tiny_gpt: Path) -> None:
    words = ("-m", "tformer", "generate", "run", "--prompt", "line", "--max-new-tokens", "1", "--device", "cpu")
    torch_alone = best_of_three(lambda: python("-c", "import torch", cwd=tiny_gpt))
    one_token = best_of_three(lambda: python(*words, cwd=tiny_gpt))
    assert one_token < torch_alone + BEYOND_TORCH_SECONDS, f"{one_token:.2f} s, import torch {torch_alone:.2f} s"
