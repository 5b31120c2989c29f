"""Options declared once: the command of a function that takes a frozen dataclass."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import typer
from typer.testing import CliRunner

from tformer.cli.command import takes_options
from tformer.support.options import Device, Panel, argument, option

WORK = Panel("The work")


@dataclass(frozen=True)
class Machine:
    device: Device = "auto"
    threads: Annotated[int | None, WORK("--threads", metavar="N", help="Number of threads.")] = None


@dataclass(frozen=True)
class Options(Machine):
    """The fields of a base class come first, those of a field in its place."""

    run: Annotated[str | None, argument("RUN", help="A run.")] = None
    kind: Annotated[Literal["one", "two"], WORK("--kind", help="Which."), "a fact"] = "one"
    files: Annotated[tuple[Path, ...], WORK("--file", help="Any number.")] = ()
    as_json: Annotated[bool, option("--json", help="JSON.")] = False


@dataclass(frozen=True)
class Nested:
    steps: Annotated[int, WORK("--steps", help="How many.")]
    machine: Machine = Machine()


@pytest.fixture
def called() -> list[Any]:
    return []


def run_words(options_type: type, called: list[Any], *words: str) -> Any:
    def work(options: Any) -> None:
        """What it does."""
        called.append(options)

    work.__annotations__["options"] = options_type
    app = typer.Typer()
    app.command("work")(takes_options(work).for_typer())
    app.command("other")(lambda: None)
    return CliRunner().invoke(app, ["work", *words])


def test_values_of_the_command_line_fill_the_dataclass(called: list[Any]) -> None:
    assert run_words(Options, called).exit_code == 0
    words = ("r", "--kind", "two", "--file", "a", "--file", "b", "--json", "--device", "cpu", "--threads", "3")
    assert run_words(Options, called, *words).exit_code == 0
    filled = Options(run="r", kind="two", files=(Path("a"), Path("b")), as_json=True, device="cpu", threads=3)
    assert called == [Options(), filled]


def test_a_dataclass_inside_adds_its_fields(called: list[Any]) -> None:
    assert run_words(Nested, called, "--steps", "2", "--device", "cpu").exit_code == 0
    assert called == [Nested(2, Machine(device="cpu"))]
    assert run_words(Nested, called).exit_code == 2  # --steps has no default


def test_a_word_that_is_no_choice_is_refused(called: list[Any]) -> None:
    refused = run_words(Options, called, "--kind", "three")
    assert refused.exit_code == 2 and "three" in refused.output and not called


def test_a_command_takes_ready_options_in_python(called: list[Any]) -> None:
    def work(options: Options) -> None:
        called.append(options)

    takes_options(work)(Options(run="x"))
    assert called == [Options(run="x")]
