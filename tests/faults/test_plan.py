"""The table of tests/faults/README.md names a test of each of the 72 cases and each further class, and they exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parents[1]
TABLES = (Path(__file__).parent / "README.md").read_text().split("\n## ")[1:]
ROW = re.compile(r"^\| (?!-|class|\|)(.+) \|$", re.M)
NAME = re.compile(r"`([\w/]+\.py)::(test_\w+)`")


@cache
def names_in(path: str) -> set[str]:
    tree = ast.parse((TESTS / path).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_every_case_from_1_to_72_has_a_row_and_every_row_a_test() -> None:
    cases, classes = ([match[1].split(" | ") for match in ROW.finditer(table)] for table in TABLES)
    assert [row[0] for row in cases] == [str(number) for number in range(1, 73)]
    assert len(classes) >= 18
    for row in [*cases, *classes]:
        assert NAME.search(row[-1]), row


def test_every_named_test_exists() -> None:
    named = [match for table in TABLES for match in NAME.findall(table)]
    assert len(named) > 120
    assert [f"{path}::{name}" for path, name in named if name not in names_in(path)] == []
