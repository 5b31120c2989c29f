"""tests/faults/cases.txt names a test of each of the 72 cases and each further class, and they exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parents[1]
CASES = [case.splitlines() for case in (Path(__file__).parent / "cases.txt").read_text().split("\n\n")]


@cache
def names_in(path: str) -> set[str]:
    tree = ast.parse((TESTS / path).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_every_case_from_1_to_72_and_each_further_class_names_its_tests() -> None:
    numbers = [match[1] for title, *_ in CASES if (match := re.match(r"(\d+)\. ", title))]
    assert numbers == [str(number) for number in range(1, 73)]
    assert len(CASES) - len(numbers) >= 18
    for title, *tests in CASES:
        assert tests and all(re.fullmatch(r"  [\w/]+\.py::test_\w+", test) for test in tests), title


def test_every_named_test_exists() -> None:
    named = [test.strip().split("::") for _, *tests in CASES for test in tests]
    assert len(named) > 120
    assert [f"{path}::{name}" for path, name in named if name not in names_in(path)] == []
