"""The page of `tformer viz-tokens` in a browser: colours, cursor, two runs, downloads, hostile tokens."""

from __future__ import annotations

import csv
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.browser.waiting import until
from tests.viz.lens_reports import HOSTILE
from tests.viz.token_reports import token_report
from tformer.inside.tokens import TokenReport
from tformer.viz.plots import colour_at
from tformer.viz.tokens import as_page

WORDS = ["The", " cat", " sat", " on", " the", " mat", ".\n", "It", " slept"]


@pytest.fixture
def shown(open_text: Callable[..., Any]) -> Callable[..., Any]:
    """`shown(reports..., hash="")`: the page of these reports, drawn."""

    def show(*reports: TokenReport, hash: str = "", **options: Any) -> Any:
        page = open_text(as_page(reports, hardest=5), hash, **options)
        page.wait_for_selector("html[data-ready]")
        return page

    return show


def test_tokens_have_the_colours_of_their_losses_and_the_cursor_shows_alternatives(shown: Callable[..., Any]) -> None:
    report = token_report(WORDS, bits=np.array([np.nan, *np.arange(8.0)]))
    page = shown(report)
    assert "loss, bits (dark: expected, yellow: surprising)" in page.locator(".bar").first.text_content()
    span = page.locator(".tokens span")
    assert span.first.evaluate("e => getComputedStyle(e).boxShadow") != "none", "neighbours are told apart"
    assert span.count() == len(WORDS) and span.first.evaluate("e => e.style.background") == ""
    for place in (1, 5, 8):
        red, green, blue = colour_at("viridis", (place - 1) / 7)
        assert span.nth(place).evaluate("e => e.style.backgroundColor") == f"rgb({red}, {green}, {blue})"
    assert "No prediction" in page.locator("#cell").text_content()
    page.locator(".tokens").focus()
    for key in ("End", "ArrowLeft", "ArrowRight", "ArrowUp", "Home", "ArrowRight", "ArrowRight"):
        page.keyboard.press(key)
    until(page, "document.querySelector('#cell h2').textContent === '␣sat (2)'")
    assert page.locator("#cell p").text_content().startswith("1.000 bits, probability 0.5, rank ")
    cells = page.locator("#cell tbody tr").first.locator("td").all_text_contents()
    word, share = report.top(2)[0]
    assert cells == [word.replace(" ", "␣"), f"{share:.4f}"]
    until(page, "location.hash.includes('token=2')")
    span.nth(7).hover()
    until(page, "document.querySelector('#cell h2').textContent === 'It (7)'")
    assert span.nth(7).get_attribute("title").splitlines()[0].endswith(f"bits, rank {report.rank[7]}")
    assert len(span.nth(7).get_attribute("title").splitlines()) == 4 and page.locator("#controls input").count() == 0


@pytest.mark.slow
def test_two_runs_stand_side_by_side_with_their_difference(shown: Callable[..., Any]) -> None:
    one, other = token_report(["ab", "cd", " e"], name="one"), token_report(["abc", "d", " e"], name="other", seed=1)
    page = shown(one, other, hash="run=1&token=2&measure=difference&theme=dark")
    assert page.locator("#texts h2").all_text_contents() == ["one", "other"]
    assert page.locator(".same").all_text_contents() == [" e", " e"] and page.locator(".here").count() == 1
    text = page.locator("#cell p").text_content()
    assert f"one {one.bits[2]:.3f} bits, other {other.bits[2]:.3f} bits" in text
    assert "bits of other minus those of one" in page.locator(".bar").first.text_content()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.locator("#controls input[value=bits]").check(force=True)
    until(page, "document.querySelector('.bar').textContent.includes('loss, bits')")


@pytest.mark.slow
def test_downloads_have_every_token(shown: Callable[..., Any]) -> None:
    report = token_report(WORDS)
    page = shown(report)
    for place, name, rows in (("#texts", "tokens-1.csv", len(WORDS)), ("#hardest", "hardest.csv", 5)):
        with page.expect_download() as download:
            page.locator(f"{place} button", has_text="CSV").first.click()
        assert download.value.suggested_filename == name
        assert len(list(csv.reader(download.value.path().open(newline="")))) == rows + 1
    for suffix, start in (("SVG", b"<svg"), ("PNG", b"\x89PNG")):
        with page.expect_download() as download:
            page.locator("#texts button", has_text=suffix).click()
        assert download.value.path().read_bytes().startswith(start)
    assert page.locator("#hardest tbody tr").count() == 5 and page.locator("#plots svg.lines").count() == 1


@pytest.mark.slow
def test_hostile_tokens_are_shown_and_inert(shown: Callable[..., Any]) -> None:
    page = shown(token_report([*HOSTILE, " end"], read=HOSTILE[0], notes=HOSTILE))
    assert page.evaluate("typeof window.hacked") == "undefined" and page.locator("img").count() == 0
    assert "<script>alert(1)" in page.locator(".tokens").text_content() + page.locator("#hardest").text_content()
    with page.expect_download() as download:
        page.locator("#texts button", has_text="SVG").click()
    assert "<script" not in download.value.path().read_text()


@pytest.mark.slow
def test_data_has_no_text_but_the_table_and_the_calibration(shown: Callable[..., Any]) -> None:
    page = shown(token_report(WORDS, text=None, spans=(None,) * len(WORDS)))
    assert page.locator(".tokens").count() == 0 and page.locator("#hardest tbody tr").count() == 5
    assert page.locator("#cell").text_content() == ""
