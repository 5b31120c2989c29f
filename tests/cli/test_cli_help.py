"""`--help`: usage, three examples, options by task with their defaults; the rest with `--help-all`; at once."""

from __future__ import annotations

import os
import re
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import pytest

from tests.end_to_end.test_e2e_help import COMMANDS
from tformer.cli.app import FIRST_STEPS, help_page
from tformer.cli.command import examples, takes_options
from tformer.cli.help import COMMON_EXAMPLES, Page
from tformer.objectives import OBJECTIVES
from tformer.support.options import Device, Panel, argument, facts_of, option
from tformer.training.options import Key, TrainOptions

Cli = Callable[..., Any]
WORK = Panel("The work")
COLUMNS, LINES = 80, 60

PROGRAM_STARTS, COMMAND_STARTS = 6, 10
"""CPU time of `tformer --help` and of `tformer COMMAND --help`, in starts of an empty Python."""

PAGES: dict[str, Page] = {command: help_page(command.split()) for command in COMMANDS}
EVERY_PAGE = pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)


@dataclass(frozen=True)
class Options:
    out: Annotated[Path, WORK("--out", metavar="FILE", help="Where to.")]
    run: Annotated[str | None, argument("RUN", help="A run.", default="the newest run")] = None
    kind: Annotated[Literal["one", "two"], WORK("--kind", help="Which.")] = "one"
    files: Annotated[tuple[Path, ...], WORK("--file", help="Any number.")] = ()
    steps: Annotated[int | None, WORK("--steps", help="How many.", default="the preset's")] = None
    rate: Annotated[float, WORK("--rate", help="How fast.", rare=True)] = 0.5
    as_json: Annotated[bool, option("--json", help="JSON.")] = False
    device: Device = "auto"


@takes_options
def work(options: Options) -> None:
    """What it does.

    More about it.
    """


PAGE = work.page("tformer work", examples("`tformer work`", "`tformer work a`", "`tformer work b`", "`tformer work c`"))


def text_of(page: Page, width: int = COLUMNS, *, everything: bool = False) -> str:
    return "\n".join(page.lines(width, everything=everything))


def test_usage_stands_first_then_three_examples_then_options_by_task() -> None:
    shown = text_of(PAGE)
    assert shown.startswith("Usage: tformer work [OPTIONS] [RUN]\n\nWhat it does.\n\nExamples:\n  tformer work\n")
    order = [shown.index(title) for title in ("Usage:", "Examples:", "Arguments:", "The work:", "Options:")]
    assert order == sorted(order)
    assert shown.count("  tformer work") == COMMON_EXAMPLES and "tformer work c" in text_of(PAGE, everything=True)


def test_an_option_shows_the_name_of_its_value_its_meaning_and_its_default() -> None:
    lines = [" ".join(line.split()) for line in text_of(PAGE, 200).splitlines()]
    for line in (
        "RUN A run. Default: the newest run.",
        "--out FILE Where to.",
        "--kind one|two Which. Default: one.",
        "--file PATH Any number.",
        "--steps N How many. Default: the preset's.",
        "--json JSON.",
    ):
        assert line in lines, lines


def test_rare_options_details_and_further_examples_are_for_help_all() -> None:
    common, everything = text_of(PAGE), text_of(PAGE, everything=True)
    for text in ("--rate X", "More about it.", "tformer work c"):
        assert text not in common and text in everything
    assert "--help-all shows 1 more option and details." in common and "--help-all" not in everything


def test_the_help_of_train_shows_every_usual_limit_and_says_what_the_rare_options_are_for() -> None:
    common = text_of(PAGES["train"])
    for flag in ("--max-epochs X", "--valid-source PATH", "--valid-target PATH"):
        assert f"  {flag}" in common
    assert re.search(r"--help-all shows \d+ more options: LoRA, distillation, several machines\.$", common)


def test_narrow_terminals_get_the_meaning_below_the_name() -> None:
    assert "\n  --steps N\n      How many. Default: the preset's.\n" in text_of(PAGE, 40)


@EVERY_PAGE
def test_help_has_at_most_60_lines_of_80_columns_and_shows_three_examples(page: Page) -> None:
    lines = list(page.lines(COLUMNS, everything=False))
    assert len(lines) <= LINES, f"{page.command}: {len(lines)} lines"
    assert max(map(len, lines)) <= COLUMNS
    shown = [line.strip() for line in lines if line.startswith("  tformer ")]
    few = any(entry.rare for entry in page.entries)
    assert shown == list(page.examples[: COMMON_EXAMPLES if few else None]), (
        "an example stands on one line, to be copied"
    )
    assert len(shown) >= 2


@EVERY_PAGE
def test_no_group_of_options_is_empty_and_none_holds_only_help(page: Page) -> None:
    for everything in (False, True):
        blocks = text_of(page, everything=everything).split("\n\n")
        titled = [block.splitlines() for block in blocks if block.splitlines()[0].endswith(":")]
        assert titled and all(len(lines) > 1 for lines in titled)
        assert not any(line.split()[0] == "--help" for lines in titled for line in lines[1:])


def letters(text: str) -> str:
    return re.sub(r"[\s`]", "", text)


@EVERY_PAGE
@pytest.mark.parametrize("width", [2000, 40])
def test_help_all_shows_every_word(page: Page, width: int) -> None:
    """Nothing is taken for markup (`<stack>`), and nothing is cut: not the names of options on a narrow terminal."""
    shown = text_of(page, width, everything=True)
    for text in (*page.about, *page.examples, *(part for entry in page.entries for part in (entry.name, entry.text))):
        assert letters(text) in letters(shown), text
    assert max(map(len, shown.splitlines())) <= width


@EVERY_PAGE
def test_set_names_the_command_that_explains_keys(page: Page) -> None:
    for entry in page.entries:
        if entry.name.startswith("--set "):
            assert "tformer config explain" in entry.text


def test_options_of_train_that_the_recipe_decides_say_so() -> None:
    for field in fields(TrainOptions):
        facts = facts_of(get_type_hints(TrainOptions, include_extras=True)[field.name])
        [declared] = [fact for fact in facts if hasattr(fact, "flags")]
        if any(isinstance(fact, Key) for fact in facts):
            assert declared.default is not None, f"{declared.flags[0]} has no words for its default"


def test_the_options_of_training_stand_under_their_task() -> None:
    panels = {entry.name.split()[0]: entry.panel for entry in PAGES["train"].entries}
    chosen = {"--objective": "Objective", "--pooling": "Objective", "--lr": "Optimizer", "--teacher": "Distillation"}
    assert {flag: panels[flag] for flag in chosen} == chosen


def test_the_first_steps_are_those_of_the_readme() -> None:
    begins = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    block = next(line for line in begins.splitlines() if line.startswith("python3 "))
    assert block.split(" && ")[-2:] == list(FIRST_STEPS[:2])


@pytest.mark.parametrize("words", [("train", "--help"), ("train", "-h"), ("train", "--arch", "gpt", "--help")])
def test_help_is_the_same_alone_and_after_options(words: Sequence[str], cli: Cli) -> None:
    assert cli(*words).out.rstrip() == text_of(PAGES["train"])
    assert cli(*words[:-1], "--help-all").out.rstrip() == text_of(PAGES["train"], everything=True)


def test_a_value_that_looks_like_a_request_for_help_is_a_value(cli: Cli) -> None:
    assert "x does not exist" in cli("generate", "x", "--prompt", "--help").err


# --- speed ------------------------------------------------------------------------------------------------------------


def cpu_seconds(words: Sequence[str], environment: dict[str, str]) -> float:
    """CPU time, user and system, of a process."""

    def used() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    before = used()
    subprocess.run([sys.executable, *words], stdout=subprocess.DEVNULL, check=True, env=environment)
    return used() - before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "most"),
    [
        ("--help", PROGRAM_STARTS),
        ("--version", PROGRAM_STARTS),
        *((f"{command} --help", COMMAND_STARTS) for command in ("train", "generate", "sweep", "bench train", "config")),
    ],
)
def test_help_takes_few_starts_of_an_empty_python(words: str, most: int, tmp_path: Path) -> None:
    """CPU time, so that other work on the machine does not count; medians of runs in turns. The modules are compiled,
    as an installation leaves them.

    Its quick twin is `test_help_imports_neither_typer_nor_rich_nor_pydantic`.
    """
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(tmp_path), "PYTHONDONTWRITEBYTECODE": ""}
    command = ["-m", "tformer", *words.split()]
    cpu_seconds(command, environment)
    pairs = [(cpu_seconds(["-c", "pass"], environment), cpu_seconds(command, environment)) for _ in range(7)]
    empty, took = (statistics.median(times) for times in zip(*pairs, strict=True))
    assert took <= most * empty, f"{took / empty:.1f} starts of an empty Python"


def test_the_objectives_in_the_help_of_train_are_those_of_their_table(cli: Callable[..., Any]) -> None:
    shown = " ".join(cli("train", "--help").out.split())
    [names] = re.findall(r"--objective NAME ([^.]+)\.", shown)
    assert sorted(names.split(", ")) == sorted(OBJECTIVES)


@pytest.mark.parametrize("words", ["--help", "--version", "train --help", "runs --help", "bench train --help-all"])
def test_help_imports_neither_typer_nor_rich_nor_pydantic(words: str) -> None:
    code = (
        "import sys\nfrom tformer.cli.app import main\n"
        f"try:\n    main({words.split()!r})\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "print(*{name.partition('.')[0] for name in sys.modules}, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"typer", "rich", "pydantic", "markdown_it", "torch", "numpy"} & set(done.stderr.split())
