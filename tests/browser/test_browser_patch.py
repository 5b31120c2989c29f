"""The page of `tformer patch` in a browser: maps of tokens and layers, of heads, read by keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.browser.waiting import until
from tformer.inside.patching import PatchMap, PatchReport
from tformer.viz.patching import patch_plots
from tformer.viz.picture import render_plots

HOSTILE = "</script>"


@pytest.mark.slow
def test_maps_of_tokens_and_heads_are_read_by_keys(open_text: Callable[..., Any]) -> None:
    residual = np.array([[0.0, 1.0, 0.0], [0.0, 0.25, 0.75]])
    maps = [
        PatchMap("decoder", "residual", residual, residual / 2),
        PatchMap("decoder", "heads", np.eye(2), np.eye(2) * 0.5),
    ]
    report = PatchReport({"decoder": ("a", HOSTILE, "c")}, "x", "y", "difference", False, 3.0, -2.0, maps)
    page = open_text(render_plots(patch_plots(report), "html", title="Denoising"))
    until(page, "document.body.dataset.ready === 'true'")
    assert page.locator("h2").all_text_contents()[::2] == [
        "residual stream before each layer, patched",
        "output of attention heads, patched",
    ]
    assert "correlation of both 1.00" in str(page.locator(".caption").first.text_content())
    page.locator("canvas").first.focus()
    page.keyboard.press("ArrowDown")
    assert f"1: {HOSTILE}" in str(page.locator(".readout").first.text_content())
