"""`--help` is quick, loads no torch, shows examples, and the examples are valid command lines."""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import yaml

COMMANDS = (
    "",
    "train-tokenizer",
    "train",
    "generate",
    "classify",
    "evaluate",
    "sweep",
    "average",
    "prune",
    "export",
    "import",
    "inspect",
    "viz-pe",
    "viz-attention",
    "plot",
    "bench",
    "bench attention",
    "bench train",
    "bench generate",
    "bench classify",
    "bench translate",
    "bench tokenize",
    "bench quality",
    "bench all",
    "config",
    "config show",
    "config validate",
    "runs",
    "runs list",
    "runs show",
    "runs compare",
)
COMMANDS_WITH_EXAMPLES = tuple(command for command in COMMANDS if command not in ("", "config", "runs"))


def test_help_of_every_command_is_quick_and_loads_no_torch() -> None:
    code = (
        "import sys\nfrom tformer.cli.app import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules, 'heavy import'\n"
    )
    for command in COMMANDS:
        times = []
        for _ in range(3):
            start = time.perf_counter()
            run = subprocess.run(
                [sys.executable, "-c", code, *command.split(), "--help"], capture_output=True, text=True, check=False
            )
            times.append(time.perf_counter() - start)
            assert run.returncode == 0, run.stderr
        # The promise is 0.3 s on an idle machine (measured by hand); here a loaded one must pass too.
        assert statistics.median(times) < 2.0, f"{command} --help took {times}"


@pytest.mark.parametrize("command", COMMANDS_WITH_EXAMPLES)
def test_help_shows_three_examples_that_parse(command: str, cli: Callable[..., Any], monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shown = cli(*command.split(), "--help").out
    examples = [" ".join(line.split()) for line in shown.splitlines() if line.strip().startswith("tformer ")]
    assert len(examples) >= 3, shown
    for example in examples:
        words = re.findall(r'"([^"]*)"|(\S+)', example)
        arguments = [quoted or plain for quoted, plain in words][1:]
        assert arguments[: len(command.split())] == command.split()
        outcome = cli(*arguments, "--help")  # parses everything before it shows the help
        assert outcome.code == 0, outcome.err


def test_version(cli: Callable[..., Any]) -> None:
    assert cli("--version").out.startswith("tformer ")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [(["trian"], "train"), (["train", "--archh", "gpt"], "--arch"), (["train", "--max-steps", "many"], "max-steps")],
)
def test_a_mistyped_command_line_is_one_clear_line(arguments: list[str], word: str, cli: Callable[..., Any]) -> None:
    outcome = cli(*arguments)
    assert outcome.code == 2 and outcome.out == ""
    assert outcome.err.startswith("error: ") and word in outcome.err
    assert len(outcome.err.splitlines()) <= 2 and "Traceback" not in outcome.err


def test_config_show_prints_yaml_alone(cli: Callable[..., Any]) -> None:
    outcome = cli("config", "show", "--arch", "gpt", "--preset", "char-cpu")
    assert outcome.code == 0 and yaml.safe_load(outcome.out)["model"]["d_model"] == 128
