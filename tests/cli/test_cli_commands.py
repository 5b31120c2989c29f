"""The list of commands: each stands in it under the first sentence of its own help, and only one is imported."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import typer

from tformer.cli import app as program
from tformer.cli.app import COMMANDS, make_program


@pytest.mark.parametrize("name", COMMANDS)
def test_a_summary_is_the_first_sentence_of_the_commands_help(name: str) -> None:
    assert COMMANDS[name].page(name).about[0] == COMMANDS[name].summary.replace("`", "")


@pytest.mark.parametrize("words", [[], ["train", "--seed", "1"], ["--debug", "runs"], ["no-such-command"]])
def test_every_command_is_known_whatever_is_called(words: list[str]) -> None:
    assert set(make_program(words).commands) == set(COMMANDS)


def test_only_the_called_command_is_imported() -> None:
    code = (
        "import sys; from tformer.cli.app import make_program; make_program(['--debug', 'plot', 'runs'])\n"
        "print(*(name for name in sys.modules if name.startswith('tformer.cli.')))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    modules = {f"tformer.cli.{command.module}" for command in COMMANDS.values()}
    assert modules & set(found) == {"tformer.cli.plot"}


@pytest.mark.parametrize("words", [(), ("bench",), ("runs",), ("config",)])
def test_help_without_a_command_ends_with_words(cli: Callable[..., Any], words: tuple[str, ...]) -> None:
    done = cli(*words)
    assert done.code == 2 and "error: no command was given" in done.err
    assert f"see '{' '.join(['tformer', *words])} --help'" in done.err


def test_an_interrupt_within_a_command_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    def add_commands(app: typer.Typer, words: list[str]) -> None:
        app.command("one")(interrupted)

    monkeypatch.setattr(program, "add_commands", add_commands)
    with pytest.raises(SystemExit) as exit_info:
        program.main(["one"])
    assert exit_info.value.code == 130
    assert capsys.readouterr().err == "error: interrupted\n"
