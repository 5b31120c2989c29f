"""The shell in a browser: exact pixels, keys, state in the URL, theme, downloads, hostile text, and no network."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.browser.waiting import until
from tformer.viz.page import render_page
from tformer.viz.plots import colour_table

HOSTILE = ["</script><script>window.hacked=1</script>", "<img src=x onerror=hacked=1>"]
HOSTILE += ["\u202eabc", "שלום", "👩‍👩‍👧", " \n\t", ""]
BODY = """
<div id="controls" class="controls"></div><canvas id="map"></canvas><svg id="plot"></svg>
<div id="table"></div><p id="tokens"></p><p id="blob"></p>
"""
# What a view's own script would do; tests put it into the page from outside, past the policy.
VIEW = """() => {
  const t = tformer;
  window.view = t.control("select", {id: "view", label: "View", value: "a", options: [["a", "A"], ["b", "B"]]});
  window.base = t.control("range", {id: "base", label: "Base", value: 100, min: 10, max: 1e6, log: true});
  window.flag = t.control("checkbox", {id: "flag", label: "Flag", value: true});
  window.pick = t.control("buttons", {id: "pick", label: "Pick", value: "x", options: [["x", "X"], ["y", "Y"]]});
  window.map = t.heatmap(document.getElementById("map"), {rows: 4, cols: 5, min: 0, max: 1, colours: "viridis",
    value: (i, j) => i === 1 && j === 2 ? 1 : 0, mask: (i, j) => i === 3 && j === 4, rowTitle: "query", colTitle: "key",
    label: "One-hot", maskLabel: "masked"});
  window.plot = t.lines(document.getElementById("plot"), {series: [{label: "one", x: [0, 1, 2], y: [0, 1, 4]},
    {label: "two", x: [0, 1, 2], y: [4, 1, 0]}], xLabel: "step", yLabel: "loss", label: "Two lines"});
  window.table = t.table(document.getElementById("table"), {caption: "Numbers",
    columns: ["name", {label: "n", number: true}], rows: [["b", 10], ["a", 9], ["c", null]]});
  document.getElementById("tokens").textContent = t.data.words.map(t.token).join("|");
  t.blob("numbers").then((bytes) => { document.getElementById("blob").textContent = bytes.length + ":" + bytes[7]; });
}"""


@pytest.fixture
def shell(open_text: Callable[..., Any]) -> Callable[..., Any]:
    made = render_page(
        title="A <b>title</b>", subtitle="it's & so", body=BODY, scripts=(), data={"words": HOSTILE, "x": float("nan")},
        blobs={"numbers": bytes(range(256)) * 4}, notes=["a note </footer>"],
    )  # fmt: skip

    def open_(hash: str = "", **options: Any) -> Any:
        opened = open_text(made, hash, **options)
        opened.evaluate(VIEW)
        return opened

    return open_


def pixel(page: Any, row: int, column: int) -> list[int]:
    code = "([i, j]) => [...document.querySelector('#map').getContext('2d').getImageData(j, i, 1, 1).data]"
    return page.evaluate(code, [row, column])


def test_one_pixel_is_one_cell_in_exactly_its_colour(shell: Callable[..., Any]) -> None:
    opened = shell()
    table = colour_table("viridis")
    assert pixel(opened, 1, 2) == [*table[-3:], 255]
    assert pixel(opened, 0, 0) == [*table[:3], 255] == pixel(opened, 2, 1)
    assert pixel(opened, 3, 4)[3] == 0, "a masked cell has no colour of the scale"
    assert opened.evaluate("[map.rows()[2][3], map.rows()[4][5]]") == [1, ""]


@pytest.mark.slow
def test_keys_and_pointer_move_the_cursor_of_a_heat_map(shell: Callable[..., Any]) -> None:
    opened = shell()
    canvas, readout = opened.locator("#map"), opened.locator(".heatmap .readout")
    canvas.focus()
    for key in ("ArrowDown", "ArrowRight", "ArrowRight"):
        canvas.press(key)
    assert readout.text_content() == "query 1, key 2: 1"
    canvas.press("End")
    canvas.press("ArrowDown")
    canvas.press("ArrowDown")
    assert readout.text_content() == "query 3, key 4: masked"
    box = canvas.bounding_box()
    opened.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + box["height"] * 0.3)
    assert readout.text_content() == "query 1, key 2: 1"
    assert "4 rows, 5 columns" in canvas.get_attribute("aria-label")


@pytest.mark.slow
def test_keys_move_along_lines_and_between_them(shell: Callable[..., Any]) -> None:
    opened = shell()
    plot, readout = opened.locator("#plot"), opened.locator(".plot .readout")
    plot.focus()
    plot.press("ArrowRight")
    plot.press("ArrowRight")
    assert readout.text_content() == "one: step 2, loss 4"
    plot.press("ArrowDown")
    assert readout.text_content() == "two: step 2, loss 0"
    opened.get_by_role("button", name="two").click()
    assert opened.locator("#plot [data-series]").count() == 1


def test_state_lives_in_the_url_and_comes_back(shell: Callable[..., Any]) -> None:
    opened = shell("view=b&base=1000&flag=false&pick=y&theme=dark")
    values = "() => [view.get(), base.get(), flag.get(), pick.get(), document.querySelector('#view').value]"
    assert opened.evaluate(values) == ["b", 1000, False, "y", "b"]
    assert opened.locator("html").get_attribute("data-theme") == "dark"
    opened.select_option("#view", "a")
    opened.locator("#base-number").fill("50")
    opened.locator("#base-number").press("Enter")
    until(opened, "location.hash.includes('base=50') && !location.hash.includes('view=')")
    opened.evaluate("location.hash = 'base=1e5&pick=x'")
    until(opened, "document.querySelector('#base-number').value === '100000'")
    assert opened.locator("#flag").is_checked()
    assert opened.evaluate("location.hash = 'base=nonsense&view=none'") is not None
    until(opened, "base.get() === 100 && view.get() === 'a'")


@pytest.mark.slow
def test_a_logarithmic_slider_answers_to_keys(shell: Callable[..., Any]) -> None:
    opened = shell()
    opened.locator("#base").focus()
    opened.keyboard.press("End")
    until(opened, "base.get() === 1e6")
    opened.keyboard.press("Home")
    until(opened, "base.get() === 10")


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True])
def test_the_theme_follows_the_system_and_its_button(dark: bool, shell: Callable[..., Any]) -> None:
    opened = shell(dark=dark)
    ground = "() => getComputedStyle(document.body).backgroundColor"
    colours = {True: "rgb(20, 23, 26)", False: "rgb(255, 255, 255)"}
    assert opened.evaluate(ground) == colours[dark]
    opened.click("#theme")
    until(opened, f"({ground})() === '{colours[not dark]}'")
    until(opened, f"location.hash === '#theme={'light' if dark else 'dark'}'")


@pytest.mark.slow
def test_a_table_sorts_both_ways_and_says_so(shell: Callable[..., Any]) -> None:
    opened = shell()
    column = "() => [...document.querySelectorAll('#table tbody td:first-child')].map((cell) => cell.textContent)"
    opened.get_by_role("button", name="n", exact=True).click()
    assert opened.evaluate(column) == ["b", "a", "c"], "largest first, missing last"
    assert opened.locator("#table th").nth(1).get_attribute("aria-sort") == "descending"
    opened.get_by_role("button", name="n", exact=True).click()
    assert opened.evaluate(column) == ["a", "b", "c"]


def test_text_is_only_ever_text(shell: Callable[..., Any]) -> None:
    opened = shell()
    assert opened.evaluate("window.hacked") is None
    shown = opened.locator("#tokens").text_content().split("|")
    assert shown[0] == HOSTILE[0] and shown[1] == HOSTILE[1].replace(" ", "␣")
    assert shown[2:] == ["\\u202eabc", "שלום", "👩‍👩‍👧", "␣↵⇥", "∅"]
    assert opened.title() == "A <b>title</b>" and opened.locator("footer p").first.text_content() == "a note </footer>"
    assert opened.evaluate("tformer.data.x") is None


def test_blobs_are_unpacked(shell: Callable[..., Any]) -> None:
    opened = shell()
    until(opened, "document.querySelector('#blob').textContent === '1024:7'")


@pytest.mark.slow
def test_downloads_have_the_bytes(shell: Callable[..., Any], tmp_path: Path) -> None:
    opened = shell()

    def saved(code: str) -> bytes:
        with opened.expect_download() as waiting:
            opened.evaluate(code)
        path = tmp_path / waiting.value.suggested_filename
        waiting.value.save_as(path)
        return path.read_bytes()

    rows = """[["a", "b,c"], [1, '"']]"""
    assert saved(f'() => tformer.download("a.csv", "text/csv", tformer.csv({rows}))') == b'a,"b,c"\n1,""""\n'
    assert saved('() => tformer.download("m.png", "image/png", () => tformer.pngOf(map))').startswith(b"\x89PNG")
    assert saved('() => tformer.download("l.png", "image/png", () => tformer.pngOf(plot))').startswith(b"\x89PNG")
    for name in ("map", "plot"):
        svg = saved(f'() => tformer.download("{name}.svg", "image/svg+xml", tformer.svgOf({name}))')
        assert svg.startswith(b"<svg xmlns")


def test_the_policy_stops_requests_and_foreign_scripts(tmp_path: Path, chromium: Any) -> None:
    path = tmp_path / "page.html"
    path.write_text(render_page(title="t", subtitle="s", body="", scripts=(), data={}), encoding="utf-8")
    context = chromium.new_context(offline=False)
    opened = context.new_page()
    asked: list[str] = []
    opened.on("request", lambda request: asked.append(request.url))
    opened.goto(path.as_uri())
    outcome = opened.evaluate(
        """async () => {
          const script = document.createElement("script");
          script.textContent = "window.hacked = 1";
          document.body.append(script);
          try { await fetch("http://127.0.0.1:9/"); return "fetched"; }
          catch (error) { return [error.name, window.hacked]; }
        }"""
    )
    assert outcome == ["TypeError", None] and asked == [path.as_uri()]
    context.close()


@pytest.mark.parametrize("width", [360, 1280])
def test_a_page_never_scrolls_sideways(width: int, shell: Callable[..., Any]) -> None:
    opened = shell(width=width)
    assert opened.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


@pytest.mark.slow
def test_text_has_contrast_in_both_themes(shell: Callable[..., Any]) -> None:
    code = """() => {
      const light = (colour) => {
        const part = (c) => { c /= 255; return c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; };
        const [r, g, b] = [1, 3, 5].map((at) => part(parseInt(colour.slice(at, at + 2), 16)));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
      };
      const pairs = [["text", "page"], ["soft", "page"], ["accent", "page"], ["text", "card"], ["soft", "card"],
        ["on-accent", "accent"]];
      return pairs.map((pair) => {
        const [a, b] = pair.map((name) => light(tformer.cssColour(name))).sort((x, y) => y - x);
        return (a + 0.05) / (b + 0.05);
      });
    }"""
    for theme in ("light", "dark"):
        assert min(shell(f"theme={theme}").evaluate(code)) >= 4.5
