"""A place to import to; after the parity tests how many classes agree, with `--classes` the tables of all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.interop.classes import NOTES, tables
from tests.interop.parity import TOLERANCE

KEY = "noted"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--classes", action="store_true", help="print what was found of every class of transformers")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """A test's notes go with its report, from another process too."""
    if call.when == "call":
        item.user_properties.extend((KEY, one) for one in NOTES)
    NOTES.clear()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    passed = [one for one in terminalreporter.getreports("passed") if one.when == "call"]
    notes = [value for one in passed for key, value in one.user_properties if key == KEY]
    if errors := [value for _, column, value in notes if column == "largest error"]:
        terminalreporter.section("models of transformers, there and back")
        terminalreporter.write_line(f"largest error / largest logit: {max(errors):.1e} of {TOLERANCE:.0e} allowed")
        if config.getoption("classes", False):
            terminalreporter.write_line(tables(notes))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "new" / "imported"
