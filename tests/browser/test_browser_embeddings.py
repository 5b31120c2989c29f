"""The page of `tformer viz-embeddings` in a browser: points, neighbours, zoom, search, keys, downloads, speed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from tests.browser.waiting import until
from tformer.inside.embeddings import EmbeddingReport, nearest
from tformer.viz.embeddings import render

CROSS = np.array([[-1.0, 0, 0.5], [1, 0, -0.5], [0, 1, 0], [0, -1, 0]])
HOSTILE = ["</script><script>window.hacked = 1</script>", "\u202e right", " b", ""]
READOUT = "document.querySelector('#points .readout').textContent"


def report_of(coordinates: np.ndarray, names: Sequence[str], asked: Sequence[int] = (0,)) -> EmbeddingReport:
    """Vectors equal to the coordinates, and one more number."""
    vectors = np.concatenate([coordinates, np.ones((len(coordinates), 1))], axis=1).astype(np.float32)
    near = nearest(vectors, asked, 2, centred=False)
    return EmbeddingReport("tokens", np.array(names, dtype=object), vectors, np.arange(len(vectors)), coordinates,
                           np.array([0.5, 0.25, 0.125]), np.array(asked, dtype=np.int64), *near, False)  # fmt: skip


@pytest.fixture
def shown(open_text: Callable[..., Any]) -> Callable[..., Any]:
    def show(report: EmbeddingReport, hash: str = "", **options: Any) -> Any:
        page = open_text(render(report, title="Vectors"), hash, **options)
        page.wait_for_selector("html[data-ready]")
        return page

    return show


def test_arrows_go_from_point_to_point_and_show_the_neighbours(shown: Callable[..., Any]) -> None:
    page = shown(report_of(CROSS, ["left", "right", "top", "bottom"]), dark=True)
    assert page.evaluate(READOUT).startswith("left · id 0 · components −1, 0, 0.5")
    canvas = page.locator("#points canvas")
    for key, name in (("ArrowUp", "top"), ("ArrowRight", "right"), ("ArrowDown", "bottom"), ("ArrowUp", "top")):
        canvas.press(key)
        until(page, f"{READOUT}.startsWith('{name}')")
    assert page.locator("#nearest h2").text_content() == "Nearest to top"
    assert page.locator("#nearest tbody tr").count() == 2
    until(page, "location.hash.includes('row=2')")


@pytest.mark.slow
def test_the_neighbours_and_cosines_are_those_of_the_report(shown: Callable[..., Any]) -> None:
    draw = np.random.default_rng(3).normal(size=(40, 3))
    report = report_of(draw, [f"t{n}" for n in range(40)], [5])
    page = shown(report)
    cells = page.locator("#nearest tbody td").all_text_contents()
    assert cells[0::3] == [f"t{n}" for n in report.neighbours[0]]
    np.testing.assert_allclose([float(cell.replace("−", "-")) for cell in cells[2::3]], report.cosines[0], atol=1e-4)


@pytest.mark.slow
def test_wheel_drag_and_keys_move_the_view_and_the_url_remembers(shown: Callable[..., Any]) -> None:
    page = shown(report_of(CROSS, list("abcd")))
    box = page.locator("#points canvas").bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(x, y)
    page.mouse.wheel(0, -240)
    until(page, "location.hash.includes('zoom=2')")
    page.mouse.down()
    page.mouse.move(x + 100, y)
    page.mouse.up()
    until(page, "new URLSearchParams(location.hash.slice(1)).get('x') < -0.01")
    page.locator("#points canvas").press("0")
    until(page, "!location.hash.includes('zoom')")
    page.locator("#axes").select_option("2,3")
    until(
        page, "document.querySelectorAll('#points .caption')[1].textContent.startsWith('Across: component 2, 25.0 %')"
    )


@pytest.mark.slow
def test_a_click_chooses_and_hovering_names(shown: Callable[..., Any]) -> None:
    page = shown(report_of(CROSS, list("abcd")))
    box = page.locator("#points canvas").bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + 0.05 * box["height"]
    page.mouse.move(x, y + 2)
    until(page, f"{READOUT}.startsWith('c · id 2')")
    assert page.locator("#nearest h2").text_content() == "Nearest to a"
    page.mouse.down()
    page.mouse.up()
    until(page, "document.querySelector('#nearest h2').textContent === 'Nearest to c'")


@pytest.mark.slow
def test_search_finds_names_and_enter_chooses(shown: Callable[..., Any]) -> None:
    page = shown(report_of(CROSS, ["King", "queen", "kin", "x"]))
    page.locator("#search").press_sequentially("kin")
    until(page, "document.querySelector('#points .caption').textContent.startsWith('2 of 4 have “kin”')")
    page.locator("#search").press_sequentially("g")
    page.locator("#search").press("Enter")
    until(page, f"{READOUT}.startsWith('King')")
    until(page, "document.querySelector('#nearest h2').textContent === 'Nearest to King'")


@pytest.mark.slow
def test_downloads_and_hostile_names(shown: Callable[..., Any]) -> None:
    page = shown(report_of(CROSS, HOSTILE))
    assert page.evaluate("typeof window.hacked") == "undefined"
    assert "</script>" in page.evaluate(READOUT)
    files = {}
    for suffix in ("CSV", "SVG", "PNG"):
        with page.expect_download() as download:
            page.locator("#points button", has_text=suffix).click()
        files[suffix] = download.value.path().read_bytes()
    rows = files["CSV"].decode().splitlines()
    assert rows[0] == "vector,id,component 1,component 2,component 3" and len(rows) == 5
    assert files["SVG"].startswith(b"<svg") and files["PNG"].startswith(b"\x89PNG")


@pytest.mark.slow
def test_fifty_thousand_points_are_drawn_within_a_frame(shown: Callable[..., Any]) -> None:
    draw = np.random.default_rng(0).normal(size=(50_000, 3))
    page = shown(report_of(draw, [f" token{n}" for n in range(50_000)]))
    code = """async () => {
      const canvas = document.querySelector('#points canvas'), times = [];
      for (let n = 0; n < 40; n++) {
        canvas.dispatchEvent(new WheelEvent("wheel", { deltaY: n % 2 ? 20 : -20, clientX: 400, clientY: 400 }));
        await null; // the page asks for its frame
        times.push(await new Promise((done) => requestAnimationFrame((start) => done(performance.now() - start))));
      }
      return times.sort((a, b) => a - b)[20];
    }"""
    assert page.evaluate(code) < 1000 / 60
