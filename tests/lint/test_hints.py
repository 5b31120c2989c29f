"""Hints speak in flags: a recipe key that has a flag is named by it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import pytest

import tformer
from tformer.cli.app import COMMANDS, FLAG, flags_of, hint_for
from tformer.recipe.overrides import FLAG_NAMES
from tformer.support.decoding import SETTINGS
from tformer.support.options import Option, facts_of
from tformer.training.options import Key, TrainOptions

SOURCE = Path(tformer.__file__).parent


def flags_of_keys() -> dict[str, str]:
    """{key of the recipe: flag} of `tformer train` and `tformer generate`."""
    found = dict(FLAG_NAMES)
    hints = get_type_hints(TrainOptions, include_extras=True)
    for field in fields(TrainOptions):
        facts = facts_of(hints[field.name])
        [option] = [fact for fact in facts if isinstance(fact, Option)]
        found |= {fact.path: option.flags[0] for fact in facts if isinstance(fact, Key)}
    decoding = {name: [fact for fact in facts if isinstance(fact, Option)] for name, facts in SETTINGS.items()}
    return found | {f"generation.{name}": option.flags[0] for name, [option] in decoding.items()}


def hints(file: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of every `hint=` in a file; a value in the text is a `§`."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        for keyword in node.keywords if isinstance(node, ast.Call) else ():
            if keyword.arg == "hint":
                parts = [one for one in ast.walk(keyword.value) if isinstance(one, ast.Constant | ast.FormattedValue)]
                yield node.lineno, " ".join(str(one.value) if isinstance(one, ast.Constant) else "§" for one in parts)


@pytest.mark.parametrize("package", sorted(path.name for path in SOURCE.iterdir() if path.is_dir()))
def test_a_hint_names_the_flag_of_a_key_that_has_one(package: str) -> None:
    for file in (SOURCE / package).rglob("*.py"):
        for line, text in hints(file):
            for key, flag in flags_of_keys().items():
                if re.search(rf"(?<![\w.]){re.escape(key)}(?![\w.])", text):
                    assert flag in text, f"{file.relative_to(SOURCE)}:{line}: {text}"


def test_hints_and_flags_are_found() -> None:
    flags = flags_of_keys()
    assert flags["training.batch_size"] == "--batch-size" and flags["generation.beam_size"] == "--beam-size"
    assert sum(1 for file in SOURCE.rglob("*.py") for _ in hints(file)) > 300


TRAINS = {"sweep": flags_of(("train",))}  # whose options it passes on
OTHER_PROGRAMS = {"--upgrade", "--merge"}  # of pip and llama-gguf-split
ALL_HINTS = sorted({text for file in SOURCE.rglob("*.py") for _, text in hints(file) if FLAG.search(text)})
PATHS = [(name, *more) for name in COMMANDS for more in ([(one,) for one in COMMANDS[name].subcommands()] or [()])]


def test_every_flag_of_a_hint_exists() -> None:
    known = {flag for path in PATHS for flag in flags_of(path)} | OTHER_PROGRAMS
    for text in ALL_HINTS:
        assert set(FLAG.findall(text)) <= known, text


@pytest.mark.parametrize("name", [name for name in COMMANDS if not COMMANDS[name].is_group])
def test_the_hints_of_a_command_name_its_own_flags(name: str) -> None:
    file = SOURCE / "cli" / f"{COMMANDS[name].module}.py"
    for line, text in hints(file):
        if "tformer " not in text:
            assert set(FLAG.findall(text)) <= flags_of((name,)) | TRAINS.get(name, set()), f"{file}:{line}: {text}"


@pytest.mark.parametrize("path", PATHS, ids=" ".join)
def test_a_flag_of_another_command_comes_with_its_name(path: tuple[str, ...]) -> None:
    """Any hint of the program in any command: a flag is the command's own, or the hint says whose it is."""
    own = (
        {flag for each in PATHS if each[0] == path[0] for flag in flags_of(each)}
        | TRAINS.get(path[0], set())
        | OTHER_PROGRAMS
    )
    for text in ALL_HINTS:
        shown = hint_for(text, path)
        assert shown.startswith(text)
        for flag in () if "tformer " in text else set(FLAG.findall(text)) - own:
            [other] = re.findall(rf"\({flag}: tformer ([\w -]+)\)", shown)
            assert flag in flags_of(tuple(other.split()))
