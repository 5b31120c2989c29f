"""The explorer of positional encodings in a browser: its arithmetic, its controls, its pictures."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.browser.waiting import until
from tformer.viz.pe.fixed import sinusoidal_table
from tformer.viz.pe.learned import LearnedEncoding
from tformer.viz.pe.page import explorer
from tformer.viz.pe.settings import EncodingSettings
from tformer.viz.pe.views import VIEWS
from tformer.viz.plots import colour_at

READY = "document.body.dataset.ready === 'true'"
DRAW = np.random.default_rng(0)
TABLES = {
    "learned": LearnedEncoding("learned", "a run", trained=False, weight=DRAW.normal(size=(40, 24))),
    "t5_bias": LearnedEncoding("t5_bias", "a run", bias=DRAW.normal(size=(32, 3)), bidirectional=False),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, made = tmp_path_factory.mktemp("pages"), {}
    for name, table in {"fixed": None, **TABLES}.items():
        settings = (
            EncodingSettings()
            if table is None
            else EncodingSettings(encoding=table.encoding, d_model=24, heads=3, clip=3)
        )
        made[name] = folder / f"{name}.html"
        text = explorer(settings, next(iter(VIEWS[settings.encoding])), table, command="tformer viz-pe")
        made[name].write_text(text, encoding="utf-8")
    return made


@pytest.fixture
def explore(files: dict[str, Path], open_page: Callable[..., Any]) -> Callable[..., Any]:
    def open_(hash: str = "", name: str = "fixed", **options: Any) -> Any:
        opened = open_page(files[name], hash, **options)
        until(opened, READY)
        return opened

    return open_


def pixel(opened: Any, row: int, column: int) -> tuple[int, ...]:
    code = "([i, j]) => [...document.querySelector('canvas').getContext('2d').getImageData(j, i, 1, 1).data]"
    return tuple(opened.evaluate(code, [row, column]))


def test_javascript_and_python_agree(explore: Callable[..., Any]) -> None:
    opened = explore()
    report = opened.locator("#agreement")
    assert float(report.get_attribute("data-largest")) < 1e-12, "double precision on both sides"
    assert int(report.get_attribute("data-count")) > 3000
    assert "fp32" in report.text_content()
    shown = opened.evaluate("[...tformer.pe.sinusoidal(300, 40, 123.5, 'fairseq').values]")
    table = sinusoidal_table(EncodingSettings(d_model=40, base=123.5, layout="fairseq"), 300)
    assert np.abs(np.array(shown).reshape(300, 40) - table).max() < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True])
def test_every_view_of_every_kind_draws(dark: bool, explore: Callable[..., Any]) -> None:
    for name in ("fixed", *TABLES):
        opened = explore(name=name, dark=dark, width=360 if dark else 1280)
        kinds = opened.evaluate("[...document.querySelectorAll('#encoding option')].map((option) => option.value)")
        assert (name in kinds) or name == "fixed"
        for kind in kinds if name == "fixed" else [name]:
            opened.select_option("#encoding", kind)
            until(opened, f"document.querySelector('#encoding').value === '{kind}'")
            for view in opened.evaluate("[...document.querySelectorAll('#view input')].map((input) => input.value)"):
                opened.evaluate("(view) => tformer.state.set({view})", view)
                title = VIEWS[kind][view].title
                until(opened, f"document.querySelector('#view-title').textContent === {title!r}")
                assert opened.locator("#caption").text_content() == VIEWS[kind][view].caption
                plots = opened.locator("#panels canvas[role], #panels svg.lines")
                assert plots.count() >= 1
                assert all(plots.nth(n).get_attribute("aria-label") for n in range(plots.count()))
                assert opened.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), (kind, view)
        if name == "fixed":
            assert "learned" not in kinds, "it needs a run"


@pytest.mark.slow
def test_the_heat_map_has_the_colours_of_its_numbers(explore: Callable[..., Any]) -> None:
    opened = explore("view=heatmap&d_model=16&positions=20")
    table = sinusoidal_table(EncodingSettings(d_model=16), 20)
    for row, column in ((0, 0), (0, 1), (3, 4), (19, 15)):
        assert pixel(opened, row, column) == (*colour_at("RdBu_r", (table[row, column] + 1) / 2), 255)
    canvas = opened.locator("#panels canvas[role]")
    canvas.focus()
    canvas.press("ArrowDown")
    assert opened.locator(".readout").text_content() == f"position 1, dimension 0: {math.sin(1):.4f}"


@pytest.mark.slow
def test_sliders_change_the_plot_and_the_url(explore: Callable[..., Any]) -> None:
    opened = explore("view=waves")
    path = "document.querySelector('[data-series]').getAttribute('d')"
    before = opened.evaluate(path)
    opened.locator("#base").focus()
    opened.keyboard.press("Home")
    until(opened, f"{path} !== {before!r}")
    until(opened, "location.hash.includes('base=2')")
    opened.locator("#d_model-number").fill("64")
    opened.locator("#d_model-number").press("Enter")
    until(opened, "location.hash.includes('d_model=64')")
    opened.reload()
    until(opened, READY)
    assert opened.locator("#d_model-number").input_value() == "64"
    assert opened.locator("#base-number").input_value() == "2"
    assert opened.locator("#view-title").text_content() == VIEWS["sinusoidal"]["waves"].title


@pytest.mark.slow
def test_traces_are_a_line_a_token(explore: Callable[..., Any]) -> None:
    opened = explore("positions=500")
    assert opened.locator("svg.lines").nth(0).locator("[data-series]").count() == 500
    assert opened.locator("h3").nth(1).text_content() == "With the cosines, 500 tokens"
    opened = explore()
    assert opened.locator("svg.lines").nth(1).locator("[data-series]").count() == 50


def test_views_and_kinds_switch_by_the_controls(explore: Callable[..., Any]) -> None:
    opened = explore()
    opened.get_by_text("waves", exact=True).click()
    until(opened, f"document.querySelector('#view-title').textContent === {VIEWS['sinusoidal']['waves'].title!r}")
    opened.select_option("#encoding", "alibi")
    until(opened, f"document.querySelector('#view-title').textContent === {VIEWS['alibi']['bias'].title!r}")
    assert not opened.locator("#d_model").is_visible() and opened.locator("#heads").is_visible()
    until(opened, "document.querySelector('canvas[role]')")
    opened.locator("#causal").check()
    until(opened, "document.querySelector('.bar .swatch')")
    assert pixel(opened, 0, 5)[3] == 0 and pixel(opened, 5, 5)[3] == 255


@pytest.mark.slow
def test_what_a_run_learned_is_shown_and_named(explore: Callable[..., Any]) -> None:
    opened = explore(name="learned")
    assert "random initialization" in opened.locator("#status").text_content()
    weight = TABLES["learned"].learned
    rows = opened.evaluate("(async () => [...new Float32Array((await tformer.blob('weight')).slice().buffer)])()")
    assert np.allclose(np.array(rows).reshape(40, 24), weight, atol=1e-6)
    cosine = weight[7] @ weight[9] / np.linalg.norm(weight[7]) / np.linalg.norm(weight[9])
    shown, expected = pixel(opened, 7, 9), colour_at("RdBu_r", (cosine + 1) / 2)
    assert np.abs(np.subtract(shown[:3], expected)).max() <= 3, "cosines in fp32 and fp64"
    opened = explore("view=bias", "t5_bias")
    bias = TABLES["t5_bias"].bias
    assert bias is not None
    expected = (bias[3, 1] / np.abs(bias[: 16 + 12]).max() + 1) / 2
    found = opened.evaluate("document.querySelector('canvas[role]').width")
    assert found == 64 and abs(pixel(opened, 1, 60)[0] - colour_at("RdBu_r", expected)[0]) < 60


@pytest.mark.slow
def test_saved_files_and_the_table(explore: Callable[..., Any], tmp_path: Path) -> None:
    opened = explore("view=waves&positions=8&dims=1")
    first_row = b"line,position,value\ndimension 1 (cosine),0,1\n"
    for suffix, magic in (("PNG", b"\x89PNG"), ("SVG", b"<svg"), ("CSV", first_row)):
        with opened.expect_download() as waiting:
            opened.get_by_role("button", name=suffix, exact=True).click()
        assert waiting.value.suggested_filename == f"sinusoidal-waves.{suffix.lower()}"
        waiting.value.save_as(tmp_path / "saved")
        assert (tmp_path / "saved").read_bytes().startswith(magic)
    opened.get_by_text("The numbers as a table").click()
    until(opened, "document.querySelectorAll('#table tbody tr').length === 8")


@pytest.mark.slow
def test_wrong_dimensions_are_told(explore: Callable[..., Any]) -> None:
    opened = explore("view=waves&dims=3,9999,x")
    assert "Only whole numbers from 0 to 511" in opened.locator("#status").text_content()
    assert opened.locator("[data-series]").count() == 1
