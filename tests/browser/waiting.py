"""Waiting for a page: its policy forbids `eval`, and with it playwright's own `wait_for_function`."""

from __future__ import annotations

import time
from typing import Any


def until(page: Any, condition: str, *, seconds: float = 60) -> None:
    """Ask again and again until a JavaScript expression is true, also of a page that loads itself again meanwhile."""
    end = time.monotonic() + seconds
    while not holds(page, condition):
        assert time.monotonic() < end, f"not so after {seconds} s: {condition}"
        page.wait_for_timeout(25)


def holds(page: Any, condition: str) -> bool:
    """Whether the expression is true now; it is not in a page that is being left, which has no context to ask."""
    from playwright.sync_api import Error

    try:
        return bool(page.evaluate(f"() => Boolean({condition})"))
    except Error as error:
        if "Execution context was destroyed" not in error.message:
            raise
        return False
