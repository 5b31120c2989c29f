"""`--json` with an error: one object on standard output, of every command, with the message and the code of stderr."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tformer.cli.app import COMMANDS

Cli = Callable[..., Any]

FAILS = {
    "train-tokenizer": ("missing.txt", "--vocab-size", "300", "--out", "tokenizer.json"),
    "train": ("--arch", "gpt", "--data", "missing.txt"),
    "config show": ("--preset", "none/such"),
    "config explain": ("model.none",),
    "config list": ("--none",),
    "config schema": ("--none",),
    "average": ("missing", "--out", "new"),
    "prune": ("missing", "--rate", "0.5", "--out", "new"),
    "generate": ("missing", "--prompt", "a"),
    "classify": ("missing", "--text", "a"),
    "sweep": ("--arch", "gpt", "--vary", "none=1,2"),
    "runs list": ("missing",),
    "runs show": ("missing",),
    "runs compare": ("missing", "missing"),
    "plot": ("missing", "-o", "a.html"),
    "inspect": ("missing",),
    "data": ("missing",),
    "tokenize": ("missing", "--text", "a"),
    "viz-pe": ("--encoding", "none"),
    "viz-attention": ("missing", "--text", "a"),
    "import": ("missing", "--out", "new"),
    "export": ("missing", "--out", "new"),
    "evaluate": ("missing",),
    "doctor": ("--none",),
    "bench train": ("--preset", "none/such"),
    "guide": ("--none",),
}


def commands_with_json() -> set[str]:
    """The commands, and those of groups, that have `--json`."""
    found = set()
    for name, command in COMMANDS.items():
        for inner in command.subcommands() or (None,):
            page = command.page(name, inner)
            if any("--json" in entry.name for entry in page.entries):
                found.add(f"{name} {inner}" if inner else name)
    return found


def test_every_command_with_json_is_tried() -> None:
    assert len(commands_with_json()) > 20
    assert {name for name in commands_with_json() if not name.startswith("bench ")} - {
        "config validate"
    } <= FAILS.keys()


@pytest.mark.parametrize("name", FAILS)
def test_an_error_is_one_object_with_message_hint_and_code(
    name: str, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = cli(*name.split(), *FAILS[name], "--json")
    [line] = outcome.out.splitlines()
    found = json.loads(line)
    assert found.keys() == {"error", "hint", "code"} and found["code"] == outcome.code == 2
    [message] = [each for each in outcome.err.splitlines() if each.startswith("error: ")]
    assert message == f"error: {found['error']}"
    assert found["hint"] is None or f"hint: {found['hint']}" in outcome.err.splitlines()
    assert not list(tmp_path.iterdir())


def test_recipes_that_fail_are_listed_with_their_errors(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("arch: gpt\nnone: 1\n")
    outcome = cli("config", "validate", tmp_path / "bad.yaml", "--json")
    [found] = json.loads(outcome.out)
    assert outcome.code == 2 and found["ok"] is False and "none" in found["error"]


def test_an_error_of_several_processes_is_one_object(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes answer together and fail together."""
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("a\n")
    outcome = cli("classify", "missing", "--input", "a.txt", "--devices", "2", "--device", "cpu", "--json")
    [line] = outcome.out.splitlines()
    assert json.loads(line)["code"] == outcome.code == 2 and "missing" in json.loads(line)["error"]
