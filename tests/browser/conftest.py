"""A real browser, no network: `open_page(path)` fails the test on any request but the file's own, and on any error.

Of the tests with a browser one is quick, `SMOKE`; the quick twins of the others are those of the pages' texts and data
in `tests/viz`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

REQUIRED = os.environ.get("TFORMER_REQUIRE_BROWSER") == "1"


SMOKE = "test_browser_page.py"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this folder as `slow`, but for the first of `SMOKE` that is not."""
    own = [item for item in items if item.path.parent == Path(__file__).parent]
    own = [item for item in own if item.get_closest_marker("slow") is None]
    smoke = next((item for item in own if item.path.name == SMOKE), None)
    for item in own:
        if item is not smoke:
            item.add_marker("slow")


def missing(what: str) -> None:
    """Skip, or fail where a browser must be there."""
    if REQUIRED:
        pytest.fail(f"TFORMER_REQUIRE_BROWSER=1, but {what}")
    pytest.skip(what)


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    program = os.environ.get("TFORMER_CHROMIUM") or "/usr/bin/chromium"
    if shutil.which(program) is None:
        missing(f"there is no {program}; name one by TFORMER_CHROMIUM")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing("playwright is not installed")
    arguments = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=program, args=arguments, timeout=120_000)
        yield launched
        launched.close()


@pytest.fixture
def open_page(chromium: Any) -> Iterator[Callable[..., Any]]:
    """`open_page(path, hash="", width=1280, height=900, dark=False)`: the page, loaded; checked when the test ends."""
    contexts: list[Any] = []
    troubles: list[str] = []

    def open_(path: Path, hash: str = "", *, width: int = 1280, height: int = 900, dark: bool = False) -> Any:
        context = chromium.new_context(
            offline=True,
            viewport={"width": width, "height": height},
            color_scheme="dark" if dark else "light",
            accept_downloads=True,
        )
        contexts.append(context)
        context.set_default_timeout(60_000)
        page = context.new_page()
        address = path.resolve().as_uri()

        def note_request(request: Any) -> None:
            # A picture made by the page itself is no request to anybody.
            if request.url.split("#")[0] != address and not request.url.startswith(("blob:", "data:")):
                troubles.append(f"request: {request.url}")

        def note_message(message: Any) -> None:
            if message.type == "error":
                troubles.append(f"console: {message.text}")

        page.on("request", note_request)
        page.on("console", note_message)
        page.on("pageerror", lambda error: troubles.append(f"error: {error}"))
        page.goto(address + (f"#{hash}" if hash else ""))
        return page

    yield open_
    for context in contexts:
        context.close()
    assert not troubles, troubles


@pytest.fixture
def open_text(tmp_path: Path, open_page: Callable[..., Any]) -> Callable[..., Any]:
    """`open_text(page, hash="", ...)`: the page of this text; options of `open_page`."""

    def open_(page: str, hash: str = "", **options: Any) -> Any:
        path = tmp_path / "page.html"
        path.write_text(page, encoding="utf-8")
        return open_page(path, hash, **options)

    return open_
