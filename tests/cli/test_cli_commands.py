"""The list of commands: each stands in it under the first sentence of its own help, and only one is imported."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import typer

from tformer.cli import app as program
from tformer.cli.app import COMMANDS, make_app


@pytest.mark.parametrize("name", COMMANDS)
def test_a_summary_is_the_first_sentence_of_the_commands_help(name: str) -> None:
    command = COMMANDS[name]
    module = import_module(f"tformer.cli.{command.module}")
    text = module.app.info.help if command.is_group else getattr(module, command.module).__doc__
    assert " ".join(text.partition("\n\n")[0].split()) == command.summary


@pytest.mark.parametrize("words", [[], ["--help"], ["train", "--help"], ["--debug", "runs"], ["no-such-command"]])
def test_every_command_is_listed_whatever_is_called(words: list[str]) -> None:
    app = make_app(words)
    listed = {one.name for one in app.registered_commands} | {one.name for one in app.registered_groups}
    assert listed == set(COMMANDS)


def test_only_the_called_command_is_imported() -> None:
    code = (
        "import sys; from tformer.cli.app import make_app; make_app(['--debug', 'plot', 'runs'])\n"
        "print(*(name for name in sys.modules if name.startswith('tformer.cli.')))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    modules = {f"tformer.cli.{command.module}" for command in COMMANDS.values()}
    assert modules & set(found) == {"tformer.cli.plot"}


def test_help_shows_no_type_beside_a_flag_without_a_value(
    cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    shown = cli("doctor", "--help").out
    assert "--clean" in shown and "<bool>" not in shown
    assert re.search(r"│ +RUN +Run, checkpoint", cli("evaluate", "--help").out)
    shown = cli("train", "--help").out
    for flag, value in (("--max-steps", "N"), ("--max-minutes", "X"), ("--preset", "TEXT"), ("--out", "PATH")):
        assert re.search(rf"{flag} +{value} ", shown), "a flag with a value has a name for it"


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
