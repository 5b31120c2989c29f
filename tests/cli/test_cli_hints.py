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
                yield node.lineno, "".join(str(one.value) if isinstance(one, ast.Constant) else "§" for one in parts)


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
