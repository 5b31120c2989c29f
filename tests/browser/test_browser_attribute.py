"""The page of `tformer attribute` in a browser: methods by token, a translation's map, read by keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.browser.waiting import until
from tests.viz.attribution_reports import HOSTILE, random_report
from tformer.viz.attribution import plots_of
from tformer.viz.picture import render_plots


@pytest.mark.slow
def test_methods_are_rows_and_tokens_are_read_by_keys(open_text: Callable[..., Any]) -> None:
    report = random_report({"decoder": (HOSTILE, "b", "c")})
    page = open_text(render_plots(plots_of(report), "html", title="Attribution"))
    until(page, "document.body.dataset.ready === 'true'")
    assert page.locator("h2").first.text_content() == "what mattered for 2: answer0"
    assert "with the baseline (pad)" in str(page.locator(".caption").first.text_content())
    page.locator("canvas").first.focus()
    page.keyboard.press("ArrowDown")
    readout = str(page.locator(".readout").first.text_content())
    assert "integrated gradients" in readout and f"0: {HOSTILE}" in readout


@pytest.mark.slow
def test_a_translation_has_a_map_of_source_and_target_for_each_method(open_text: Callable[..., Any]) -> None:
    report = random_report({"encoder": ("x", "y"), "decoder": ("[START]", "a", "b")}, answers=3)
    page = open_text(render_plots(plots_of(report), "html", title="Attribution"))
    until(page, "document.body.dataset.ready === 'true'")
    headings = page.locator("h2").all_text_contents()
    assert len(headings) == 8 and headings[1] == "integrated gradients, source" and "occlusion, target" in headings
