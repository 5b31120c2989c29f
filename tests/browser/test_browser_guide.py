"""The site of the guide in a browser: search, places in a page, the theme of the next page, a narrow window."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.browser.waiting import until
from tformer.guide import TOPICS
from tformer.viz.guide import write_site

HITS = "#found .hit a"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("guide") / "site"
    write_site(folder)
    return folder


def test_search_finds_words_and_links_to_their_section(site: Path, open_page: Callable[..., Any]) -> None:
    page = open_page(site / "index.html")
    page.fill("#query", "Telemetry NETWORK")
    until(page, f"document.querySelectorAll('{HITS}').length > 0")
    links = [link.get_attribute("href") for link in page.locator(HITS).all()]
    assert "security.html#what-is-sent" in links and not page.is_visible("#text")
    assert {"telemetry", "network"} <= {mark.lower() for mark in page.locator("mark").all_text_contents()}
    page.fill("#query", "no-such-word (")
    until(page, "document.querySelector('#found').textContent === '0 sections'")
    page.press("#query", "Escape")
    assert page.is_visible("#text") and page.input_value("#query") == ""


def test_headings_come_before_texts(site: Path, open_page: Callable[..., Any]) -> None:
    page = open_page(site / "index.html", "q=out+of+memory")
    until(page, f"document.querySelectorAll('{HITS}').length > 1")
    assert page.locator(HITS).first.get_attribute("href") == "troubleshooting.html#out-of-memory"
    assert "out of memory" in page.locator("#found .hit").nth(1).text_content().lower(), "then the words in a row"


def test_a_hit_on_the_page_itself_shows_its_text(site: Path, open_page: Callable[..., Any]) -> None:
    page = open_page(site / "security.html", height=500)
    page.fill("#query", "vulnerability doctor")
    until(page, f"document.querySelectorAll('{HITS}').length > 0")
    page.locator("#found a[href$='#report-a-vulnerability']").click()
    until(page, "scrollY > 500 && !document.querySelector('#text').hidden")


def test_the_theme_stays_with_the_reader_and_a_place_beside_it(site: Path, open_page: Callable[..., Any]) -> None:
    page = open_page(site / "security.html", "what-is-kept&theme=dark", height=500)
    until(page, "scrollY > 500 && document.documentElement.dataset.theme === 'dark'")
    page.locator("nav a[href='#what-is-sent']").click()
    until(page, "location.hash === '#what-is-sent&theme=dark' && document.documentElement.dataset.theme === 'dark'")
    link = page.get_by_role("link", name="All topics")
    link.evaluate("link => { link.addEventListener('click', (event) => event.preventDefault()); link.click(); }")
    assert link.get_attribute("href").endswith("index.html#theme=dark")


@pytest.mark.parametrize("name", ["index", *TOPICS])
def test_a_narrow_page_does_not_scroll_sideways(name: str, site: Path, open_page: Callable[..., Any]) -> None:
    page = open_page(site / f"{name}.html", width=360, height=800)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
