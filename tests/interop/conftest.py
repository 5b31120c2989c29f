"""A place to import to; after the parity tests the largest error of each class, as in the README's table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.interop.parity import LARGEST_ERRORS, TOLERANCE


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if LARGEST_ERRORS:
        terminalreporter.section("logits: largest error / largest logit")
    for name, error in sorted(LARGEST_ERRORS.items()):
        terminalreporter.write_line(f"{name:44} {error:.1e} of {TOLERANCE:.0e} allowed")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "new" / "imported"
