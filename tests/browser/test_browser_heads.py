"""The page of `tformer heads` in a browser: maps of a checkpoint, curves over a training, keys, what is saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.browser.waiting import until
from tformer.inside.heads import HeadReport
from tformer.viz.heads import plots_of
from tformer.viz.picture import render_plots


def report(step: int, scale: float) -> HeadReport:
    found = np.array([[0.1, 0.2], [0.3, 0.9]]) * scale
    copied = {"first_loss": 4.0, "repeated_loss": 4.0 - 3 * scale, "repeated_accuracy": scale}
    return HeadReport(step, "10 sequences", {"decoder": {"previous": found, "induction": found[::-1]}}, copied)


@pytest.mark.slow
def test_the_map_of_a_checkpoint_is_read_by_keys(open_text: Callable[..., Any]) -> None:
    page = open_text(render_plots(plots_of([report(600, 1.0)]), "html", title="Heads"), dark=True)
    until(page, "document.body.dataset.ready === 'true'")
    assert page.locator("h2").all_text_contents() == [
        "previous, decoder self-attention",
        "induction, decoder self-attention",
    ]
    page.locator("canvas").first.focus()
    for key in ("ArrowDown", "ArrowRight"):
        page.keyboard.press(key)
    assert "0.9" in page.locator(".readout").first.text_content()
    assert page.locator("html").get_attribute("data-theme") == "dark"


@pytest.mark.slow
def test_curves_over_a_training_have_a_line_for_each_head(open_text: Callable[..., Any]) -> None:
    reports = [report(step, step / 600) for step in (100, 300, 600)]
    page = open_text(render_plots(plots_of(reports), "html", title="Heads"))
    until(page, "document.body.dataset.ready === 'true'")
    assert page.locator("section").first.locator(".legend button").all_text_contents() == [
        "L0H0",
        "L0H1",
        "L1H0",
        "L1H1",
    ]
    assert page.locator("section").nth(2).locator(".legend button").all_text_contents() == ["first time", "repeated"]
    page.locator("section").nth(1).locator("svg.lines").focus()
    page.keyboard.press("End")
    assert "L0H0: step 600" in page.locator("section").nth(1).locator(".readout").text_content()
    with page.expect_download() as download:
        page.locator("section").nth(1).get_by_text("CSV", exact=True).click()
    rows = Path(download.value.path()).read_text().splitlines()
    assert rows[0] == "line,step,induction" and len(rows) == 13
