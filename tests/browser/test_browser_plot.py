"""The page of curves in a browser: choosing, smoothing, runs, keys, state in the URL, downloads, hostile names."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.browser.waiting import until
from tests.viz.plot_runs import train_record, write_run
from tformer.viz.plot.page import render
from tformer.viz.plot.series import PlottedRun, choose_metrics, read_runs, smooth_values

HOSTILE = "<img src=x onerror=alert(1)> שלום"
LINES = "#panels [data-series]"


@pytest.fixture
def runs(tmp_path: Path) -> list[PlottedRun]:
    other = [train_record(step, 5 - step / 40 + (step % 20) / 30) for step in range(10, 101, 10)]
    return read_runs([write_run(tmp_path / "first"), write_run(tmp_path / HOSTILE, other)])


@pytest.fixture
def opened(runs: list[PlottedRun], open_text: Callable[..., Any]) -> Callable[..., Any]:
    def open_(hash: str = "", *asked: str, smooth: float = 0.0, only: int = 2, **options: Any) -> Any:
        shown = runs[:only]
        choices = choose_metrics(shown, asked)
        text = render(shown, choices, title="T", x="step", smooth=smooth, log_x=False, log_y=False)
        return open_text(text, hash, **options)

    return open_


def test_choosing_a_metric_an_axis_and_smoothing_changes_the_plot(opened: Callable[..., Any]) -> None:
    page = opened()
    assert page.locator(LINES).count() == 3 and page.locator("#panels h2").all_text_contents() == ["loss"]
    path = page.locator(LINES).first.get_attribute("d")
    page.locator("#smooth-number").fill("0.9")
    page.locator("#smooth-number").press("Enter")
    until(page, f"document.querySelectorAll('{LINES}').length === 5")
    assert page.locator(f"{LINES}[stroke-opacity='0.35']").count() == 2, "what was logged stays, faint"
    page.locator("#smooth").focus()
    page.keyboard.press("Home")
    until(page, f"document.querySelectorAll('{LINES}').length === 3")
    page.check("#log-y")
    until(page, f"document.querySelector('{LINES}').getAttribute('d') !== '{path}'")
    page.select_option("#metric", "m:accuracy")
    until(page, "document.querySelector('#panels h2').textContent === 'accuracy'")
    assert page.locator(LINES).count() == 1
    page.select_option("#metric", "all")
    until(page, "document.querySelectorAll('#panels h2').length === 5")
    page.select_option("#x", "time")
    until(page, "document.querySelector('#panels svg.lines').textContent.includes('training time (minutes)')")


@pytest.mark.slow
def test_runs_and_splits_are_switched(opened: Callable[..., Any]) -> None:
    page = opened()
    page.uncheck("#run-0")
    until(page, f"document.querySelectorAll('{LINES}').length === 1")
    assert page.locator("#table tbody tr").count() == 4, "the table follows: a loss, a rate, a norm, a speed"
    assert page.locator("#table tbody td").first.text_content() == HOSTILE
    page.check("#run-0")
    page.uncheck("#split-train")
    until(page, f"document.querySelectorAll('{LINES}').length === 1")
    until(page, "location.hash === '#split-train=false'")


@pytest.mark.slow
def test_keys_read_the_values_of_all_lines(opened: Callable[..., Any]) -> None:
    page = opened()
    plot, readout = page.locator("#panels svg.lines"), page.locator("#panels .readout")
    plot.focus()
    plot.press("End")
    words = readout.text_content()
    assert words.startswith("step 100: first · train 2 · first · valid 2.5") and HOSTILE in words
    plot.press("ArrowDown")
    plot.press("Home")
    assert readout.text_content().startswith("step 50: first · valid 3.1 · first · train 3")
    box = plot.bounding_box()
    page.mouse.move(box["x"] + box["width"] - 20, box["y"] + box["height"] / 2)
    until(page, "document.querySelector('#panels .readout').textContent.startsWith('step 100')")


def test_what_was_asked_for_is_shown_first(opened: Callable[..., Any]) -> None:
    page = opened("", "valid.loss", "lr", smooth=0.5)
    assert page.locator("#panels h2").all_text_contents() == ["loss", "learning rate"]
    assert page.locator("#metric option").first.text_content() == "valid loss, learning rate"
    assert page.locator(LINES).count() == 3, "a validation loss and two rates, none of them smoothed"


@pytest.mark.slow
def test_a_single_run_has_no_switches_for_runs(opened: Callable[..., Any]) -> None:
    page = opened(only=1)
    assert page.locator("#run-0").count() == 0 and page.locator("#split-valid").count() == 1
    assert page.locator("#panels .legend button").all_text_contents() == ["train", "valid"]


@pytest.mark.slow
def test_the_url_restores_the_view(opened: Callable[..., Any]) -> None:
    page = opened("metric=all&x=tokens&smooth=0.5&log-x=true&run-1=false&theme=dark")
    assert page.locator("#panels h2").count() == 5
    assert page.input_value("#x") == "tokens" and page.input_value("#smooth-number") == "0.5"
    assert page.is_checked("#log-x") and not page.is_checked("#run-1")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 26)"
    page.evaluate("location.hash = 'metric=m:lr'")
    until(page, "document.querySelectorAll('#panels h2').length === 1")
    assert page.is_checked("#run-1")


@pytest.mark.slow
def test_downloads_and_smoothing_equal_to_that_of_the_command(
    opened: Callable[..., Any], runs: list[PlottedRun]
) -> None:
    page = opened("smooth=0.7")

    def save(label: str) -> bytes:
        with page.expect_download() as found:
            page.locator("#panels").get_by_role("button", name=label, exact=True).click()
        return Path(found.value.path()).read_bytes()

    rows = list(csv.DictReader(io.StringIO(save("CSV").decode())))
    assert len(rows) == 22 and [row["value"] for row in rows if row["split"] == "valid"] == ["3.1", "2.5"]
    got = [float(row["smoothed"]) for row in rows if row["run"] == HOSTILE]
    assert got == pytest.approx(smooth_values(runs[1].tracks["train"].values["loss"], 0.7).tolist(), rel=1e-6)
    picture = save("SVG").decode()
    assert picture.startswith("<svg") and "first · train" in picture and ">loss</text>" in picture
    assert save("PNG").startswith(b"\x89PNG")
    with page.expect_download() as found:
        page.get_by_role("button", name="CSV of this table").click()
    assert Path(found.value.path()).read_text().startswith("run,metric,last,last_step,best,best_step\n")


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True])
def test_a_narrow_page_does_not_scroll_sideways(dark: bool, opened: Callable[..., Any]) -> None:
    page = opened("metric=all", width=360, height=800, dark=dark)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
