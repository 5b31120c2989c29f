"""Waiting for a page: its policy forbids `eval`, and with it playwright's own `wait_for_function`."""

from __future__ import annotations

import time
from typing import Any


def until(page: Any, condition: str, *, seconds: float = 60) -> None:
    """Ask again and again until a JavaScript expression is true."""
    end = time.monotonic() + seconds
    while not page.evaluate(f"() => Boolean({condition})"):
        assert time.monotonic() < end, f"not so after {seconds} s: {condition}"
        page.wait_for_timeout(25)
