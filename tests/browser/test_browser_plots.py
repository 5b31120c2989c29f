"""A page of plots in a browser: counts in their cells, error bars, what is saved."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.browser.waiting import until
from tests.viz.test_viz_pictures import HOSTILE, PLOTS
from tformer.viz.picture import render_plots


@pytest.mark.slow
def test_a_page_shows_and_saves_its_plots(open_text: Callable[..., Any]) -> None:
    page = open_text(render_plots(PLOTS, "html", title=HOSTILE))
    until(page, "document.body.dataset.ready === 'true'")
    assert page.locator("h1").text_content() == HOSTILE
    assert page.locator(".cells span").all_text_contents() == ["50", "3", "1", "40"]
    bars = page.locator("path.spread")
    assert bars.count() == 1 and str(bars.get_attribute("d")).count("V") == 2
    page.locator("svg.lines").focus()
    page.keyboard.press("ArrowRight")
    assert "loss 2.5 ± 0.1" in page.locator(".plot .readout").text_content()

    def saved(section: int, kind: str) -> str:
        with page.expect_download() as download:
            page.locator("section").nth(section).get_by_text(kind, exact=True).click()
        return Path(download.value.path()).read_text()

    assert list(csv.reader(io.StringIO(saved(0, "CSV")))) == [
        ["", "no", HOSTILE],
        ["no", "50", "3"],
        [HOSTILE, "1", "40"],
    ]
    assert saved(1, "CSV").splitlines()[:2] == ["line,share,loss,spread", "rope,0.1,3,0.2"]
    assert ">50</text>" in saved(0, "SVG") and 'class="spread"' in saved(1, "SVG")
