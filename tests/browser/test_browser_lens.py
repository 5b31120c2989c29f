"""The lens's page in a browser: the map and its cursor, the answers, the parts, the URL, downloads, hostile tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.browser.waiting import until
from tests.viz.lens_reports import HOSTILE, random_lens, random_report
from tformer.inside.lens import LensReport
from tformer.viz.lens.page import render
from tformer.viz.plots import colour_table


@pytest.fixture
def shown(open_text: Callable[..., Any]) -> Callable[..., Any]:
    """`shown(report, hash="")`: the page of this report, drawn."""

    def show(report: LensReport, hash: str = "", **options: Any) -> Any:
        page = open_text(render(report, max_bytes=20e6), hash, **options)
        page.wait_for_selector("html[data-ready]")
        return page

    return show


def test_the_cursor_shows_the_answers_and_the_parts_of_its_position(shown: Callable[..., Any]) -> None:
    report: Any = random_report(2, 2, 4)
    page = shown(report)
    target = report.targets[3].strip()
    assert page.locator("#cell h2").text_content() == f"After layer 1, at ␣word3 (3); target ␣{target}"
    canvas = page.locator("#lens .cells canvas")
    canvas.focus()
    for key in ("ArrowUp", "ArrowLeft"):
        canvas.press(key)
    until(page, "document.querySelector('#cell h2').textContent.startsWith('After layer 0, at ␣word2 (2)')")
    cells = page.locator("#cell tbody tr").first.locator("td").all_text_contents()
    assert cells == [report.top[1, 2, 0].replace(" ", "␣"), f"{report.lens.top_probabilities[1, 2, 0]:.4f}"]
    text = page.locator("#parts .caption").first.text_content()
    assert "at ␣word2 (2)" in text and "All parts add up to" in text
    page.locator("#parts summary").click()
    rows = page.locator("#parts tbody tr")
    assert rows.count() == len(report.parts.parts)
    largest = report.parts.parts[int(np.abs(report.parts.values[2]).argmax())].name
    assert rows.first.locator("td").first.text_content() == largest


def test_map_and_curves_number_the_layers_alike(shown: Callable[..., Any]) -> None:
    page = shown(replace(random_report(2, 2, 4), tuned_kl=np.array([[2.0, 1.0], [1.0, 0.5]])))
    rows = page.locator("#lens .ticks.rows span").all_text_contents()
    assert rows == ["input", "0", "1"]
    for place, names in (("#cell", rows), ("#tuning", rows[:2])):
        texts = page.locator(f"{place} svg.lines > text").all_text_contents()
        below = [text for text in texts if text in names]
        assert "after layer" in texts and below[-len(names) :] == names, texts
        page.locator(f"{place} svg.lines").focus()
        assert "after layer input" in page.locator(f"{place} .readout").text_content()
    assert "KL(model's answer ‖ answer after the layer)" in page.locator("#controls").text_content()
    assert "KL(model's answer ‖ answer after the layer)" in page.locator("#tuning h2").text_content()


@pytest.mark.slow
def test_one_pixel_is_one_number(shown: Callable[..., Any]) -> None:
    report = random_report(2, 2, 4)
    code = """() => { const c = document.querySelector('#lens .cells canvas');
      return [...c.getContext('2d').getImageData(0, 0, c.width, c.height).data]; }"""
    pixels = np.array(shown(report).evaluate(code), dtype=np.uint8).reshape(3, 4, 4)
    table = np.frombuffer(colour_table("viridis"), dtype=np.uint8).reshape(256, 3)
    places = np.floor(255 * report.lens.probability.astype(float) + 0.5).astype(int)
    np.testing.assert_array_equal(pixels[..., :3], table[places])


@pytest.mark.slow
@pytest.mark.parametrize("head", ["lm", "classifier"])
def test_words_and_numbers_of_a_deep_model_stay_inside_their_cells(head: str, shown: Callable[..., Any]) -> None:
    report = random_report(30, 2, 5, head=head)
    words = {token: f" word{token}" for token in report.words}
    page = shown(replace(report, words=words))
    code = """() => [...document.querySelectorAll('#lens .cells span')].map((span) => {
        const [text, box] = [span.getBoundingClientRect(), span.parentElement.getBoundingClientRect()];
        return [text.width, text.height, box.width, box.height]; })"""
    spans = np.array(page.evaluate(code))
    columns = report.lens.probability.shape[1] if head == "lm" else 10
    assert len(spans) == 31 * columns
    assert (spans[:, 0] <= spans[:, 2] / columns).all() and (spans[:, 1] <= spans[:, 3] / 31 + 2).all()


def test_measure_and_lens_are_switched_and_the_url_remembers(shown: Callable[..., Any]) -> None:
    plain = random_report(2, 2, 4)
    tuned = replace(random_lens(2, 4, seed=1), targets=plain.lens.targets)
    both = replace(plain, lens=tuned, tuned_kl=np.array([[2.0, 1.0], [1.0, 0.5]]))
    page = shown(both, hash="measure=rank&layer=0&position=1&theme=dark")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert "rank of the target" in page.locator("#lens .bar").text_content()
    assert page.locator("#cell h2").text_content().startswith("After the input, at ␣word1 (1)")
    first = page.locator("#cell tbody td").first.text_content()
    page.locator("#controls input[value=logit]").check(force=True)
    until(page, f"document.querySelector('#cell tbody td').textContent !== {json.dumps(first)}")
    assert page.locator("#tuning svg.lines path[data-series]").count() == 2
    until(page, "location.hash.includes('lens=logit')")


@pytest.mark.slow
def test_downloads_have_every_number(shown: Callable[..., Any]) -> None:
    report: Any = random_report(2, 2, 4)
    page = shown(report)
    for place, name, rows in (("#lens", "lens.csv", 3 * 4), ("#parts", "parts.csv", 4 * len(report.parts.parts))):
        with page.expect_download() as download:
            page.locator(f"{place} button", has_text="CSV").first.click()
        assert download.value.suggested_filename == name
        assert len(download.value.path().read_text().splitlines()) == rows + 1
    with page.expect_download() as download:
        page.locator("#lens button", has_text="SVG").click()
    assert download.value.path().read_text().startswith("<svg")


@pytest.mark.slow
@pytest.mark.parametrize("head", ["lm", "classifier"])
def test_hostile_words_are_shown_and_inert(head: str, shown: Callable[..., Any]) -> None:
    report = random_report(2, 2, 1 if head == "classifier" else len(HOSTILE), tokens=HOSTILE, head=head)
    words = {token: HOSTILE[token % len(HOSTILE)] for token in report.words}
    page = shown(replace(report, words=words, texts={"text": HOSTILE[0]}))
    assert page.evaluate("typeof window.hacked") == "undefined" and page.locator("img").count() == 0
    assert "<script>alert(1)" in page.locator("#cell").text_content() + page.locator("footer").text_content()


@pytest.mark.slow
def test_a_model_without_parts_says_why(shown: Callable[..., Any]) -> None:
    page = shown(replace(random_report(2, 2, 4), parts=None, without_parts="no sum divides them"))
    assert page.locator("#parts .notes").text_content() == "no sum divides them"
