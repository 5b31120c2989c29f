"""The same panels in every format: characters, pictures, numbers, and the data of the page."""

from __future__ import annotations

import csv
import io
import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.viz.plot_runs import train_record, write_run
from tformer.viz.page import script_bytes
from tformer.viz.plot.document import as_csv, as_json, summary
from tformer.viz.plot.figure import draw_figure
from tformer.viz.plot.page import MAX_VALUES, SCRIPTS, render
from tformer.viz.plot.records import Run, read_runs
from tformer.viz.plot.series import Panel, choose_metrics, make_panels
from tformer.viz.plot.terminal import draw_text

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def runs(tmp_path: Path) -> list[Run]:
    other = [train_record(step, 5 - step / 40) for step in range(10, 101, 10)]
    return read_runs([write_run(tmp_path / "first"), write_run(tmp_path / "second", other)])


def panels_of(runs: list[Run], *asked: str, smooth: float = 0.0) -> list[Panel]:
    return make_panels(runs, choose_metrics(runs, asked), x="step", smooth=smooth)


@pytest.mark.parametrize("width", [10, 40, 80, 200])
def test_the_terminal_plot_keeps_to_its_width_and_says_last_and_best(width: int, runs: list[Run]) -> None:
    text = draw_text(panels_of(runs, "loss", "accuracy"), title="T", x_label="step", width=width, colour="none")
    assert text.endswith("\n") and "\x1b" not in text
    plots = [line for line in text.splitlines() if "│" in line or "┤" in line or "└" in line]
    assert max(map(len, plots)) <= max(width, 24)
    assert re.search(r"C s.*n +last 2\.5  best 2\.5", text) and re.search(r"━━ f.*d +last 0\.5  best 0\.5", text)
    assert width < 40 or ("C second · train" in text and "━━ first · valid" in text)


def test_without_colour_lines_are_letters_and_a_single_one_is_dots(runs: list[Run]) -> None:
    many = draw_text(panels_of(runs), title="", x_label="step", width=60, colour="none")
    assert all(letter in many for letter in "ABC") and not re.search("[\u2801-\u28ff]", many)
    one = draw_text(panels_of(runs[1:], "train.loss"), title="", x_label="step", width=60, colour="none")
    rows = [line for line in one.splitlines() if re.search("[\u2801-\u28ff]", line)]
    assert len(rows) == 14, "it falls from the top to the bottom"
    starts = [re.search("[\u2801-\u28ff]", row).start() for row in rows]  # type: ignore[union-attr]
    assert starts == sorted(starts)


def test_colours_are_closed_on_every_line_and_raw_values_are_fainter(runs: list[Run]) -> None:
    panels = panels_of(runs, smooth=0.9)
    for colour, code in (("truecolor", "\x1b[38;2;0;114;178m"), ("256", "\x1b[38;5;")):
        text = draw_text(panels, title="", x_label="step", width=80, colour=colour)  # type: ignore[arg-type]
        assert code in text
        for line in text.splitlines():
            assert "\x1b" not in line or line.rfind("\x1b[0m") >= line.rfind("\x1b[38")
    assert "\x1b[38;2;61;112;141m" in draw_text(panels, title="", x_label="", width=80, colour="truecolor")


def test_hostile_names_cannot_steer_the_terminal(tmp_path: Path) -> None:
    runs = read_runs([write_run(tmp_path / "\x1b[2Ja"), write_run(tmp_path / "b")])
    assert "\x1b" not in draw_text(panels_of(runs), title="\x1b]0;x", x_label="step", width=80, colour="none")


def test_what_logarithmic_axes_cannot_show_is_left_out(tmp_path: Path) -> None:
    runs = read_runs([write_run(tmp_path / "a", [train_record(0, -1.0), train_record(1, -2.0)])])
    text = draw_text(panels_of(runs), title="", x_label="step", width=60, colour="none", log_y=True)
    assert "nothing that these axes can show" in text
    assert draw_figure(panels_of(runs), "svg", title="", x_label="step", log_x=True, log_y=True).startswith(b"<?xml")


def test_pictures_have_a_panel_for_each_metric_and_equal_bytes(runs: list[Run]) -> None:
    panels = panels_of(runs, "loss", "lr", "accuracy", smooth=0.5)
    made = [draw_figure(panels, "svg", title="a $ < b", x_label="step", log_y=True) for _ in range(2)]
    assert made[0] == made[1]
    root = ElementTree.fromstring(made[0])
    words = ["".join(text.itertext()) for text in root.iter(f"{SVG}text")]
    assert {"loss", "learning rate", "accuracy", "a $ < b", "first · train", "second · train"} <= set(words)
    assert words.count("step") == 3 and words.count("first · train") == 1, "one legend for all panels"
    png = Image.open(io.BytesIO(draw_figure(panels[:1], "png", title="", x_label="step")))
    assert png.format == "PNG" and png.width == 880


def test_json_holds_what_is_drawn_and_csv_every_value(runs: list[Run]) -> None:
    choices = choose_metrics(runs, ("loss",))
    panels = make_panels(runs, choices, x="tokens", smooth=0.5)
    document = json.loads(as_json(runs, panels, x="tokens", x_label="tokens", smooth=0.5))
    first, valid, _ = document["series"]
    assert (first["run"], first["split"], first["metric"]) == ("first", "train", "loss")
    assert (
        first["x"][:2] == [1000, 2000] and first["raw"][0] == first["y"][0] == 3.8 and first["y"][1] != first["raw"][1]
    )
    assert valid["y"] == [3.1, 2.5] and "raw" not in valid
    rows = list(csv.DictReader(io.StringIO(as_csv(runs, choices, smooth=0.5))))
    assert len(rows) == 22
    assert rows[10] == {"run": "first", "split": "valid", "metric": "loss", "step": "50", "tokens": "5000",
                        "seconds": "100", "value": "3.1", "smoothed": ""}  # fmt: skip
    assert [float(row["smoothed"]) for row in rows[:10]] == first["y"]


def test_the_summary_has_last_and_best_values(tmp_path: Path) -> None:
    records = [train_record(1, 3.0), train_record(2, 1.0), train_record(3, 2.0), train_record(4, None)]
    rows = summary(read_runs([write_run(tmp_path / "a", records)]))
    loss = next(row for row in rows if row["metric"] == "loss")
    assert (loss["last"], loss["last_step"], loss["best"], loss["best_step"]) == (2.0, 3, 1.0, 2)
    assert next(row for row in rows if row["metric"] == "lr")["best"] is None


def page_data(page: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert found is not None
    return json.loads(found[1])


def page_of(runs: list[Run], *asked: str) -> str:
    choices = choose_metrics(runs, asked)
    return render(runs, choices, title="T", x="step", smooth=0.5, log_x=False, log_y=True)


def test_the_page_holds_every_metric_of_every_run(runs: list[Run]) -> None:
    data = page_data(page_of(runs, "valid.loss"))
    assert [metric["name"] for metric in data["metrics"]][:2] == ["loss", "accuracy"]
    assert data["chosen"] == [{"metric": "loss", "splits": ["valid"]}]
    assert data["start"] == {"x": "step", "smooth": 0.5, "logX": False, "logY": True}
    assert data["runs"][0]["tracks"]["valid"] == {"step": [50, 100], "tokens": [5000, 10000], "time": [100, 200],
                                                  "values": {"loss": [3.1, 2.5], "accuracy": [0.25, 0.5]}}  # fmt: skip
    assert script_bytes(SCRIPTS) < 60_000


def test_a_name_cannot_end_the_element_that_holds_it(tmp_path: Path) -> None:
    page = page_of(read_runs([write_run(tmp_path / "<!--<script>", None)]))
    assert "<!--<script>" not in page and page_data(page)["runs"][0]["name"] == "<!--<script>"


def test_too_many_values_are_thinned_and_the_page_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_VALUES >= 100_000
    monkeypatch.setattr("tformer.viz.plot.page.MAX_VALUES", 30)
    page = page_of(read_runs([write_run(tmp_path / "a")]))
    steps = page_data(page)["runs"][0]["tracks"]["train"]["step"]
    assert len(steps) < 10 and steps[-1] == 100 and "th value of each curve is here" in page
