"""Training curves of runs: series, and every output format."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tests.viz.pages import page_data, script_bytes
from tests.viz.plot_runs import train_record, valid_record, write_run
from tformer.support.errors import InputError
from tformer.support.formatting import unique_names
from tformer.viz.figure import draw_panels
from tformer.viz.plot.page import MAX_VALUES, as_csv, as_json, render, summary
from tformer.viz.plot.series import (
    MetricPanel,
    PlottedRun,
    better,
    choose_metrics,
    make_panels,
    metrics_of,
    read_runs,
    smooth_values,
    time_unit,
)
from tformer.viz.plots import plain, ticks
from tformer.viz.terminal import draw_curves

NUMBERS = st.floats(-100, 100)


def test_a_damaged_line_a_half_line_and_foreign_values_are_passed_over(tmp_path: Path) -> None:
    records = [train_record(20, 2.0), train_record(10, 3.0), train_record(20, 1.0), train_record(30, None)]
    records += [{"split": "train", "step": "x", "loss": 1}, {"step": 5}, {"split": 3, "step": 4, "loss": 1}]
    records += [train_record(40, 0.5, lists=[1, 2], flag=True, words="a", huge=10**400)]
    tail = '{"split": "train", "step": 50,\nnot json\n[1]\n{"split": "train", "step": 60, "loss": 9'
    [run] = read_runs([write_run(tmp_path / "a", records, tail=tail)])
    track = run.tracks["train"]
    assert track.step.tolist() == [10, 20, 30, 40], "in order, and of two records of a step the later"
    assert np.array_equal(track.values["loss"], [3.0, 1.0, math.nan, 0.5], equal_nan=True)
    assert set(track.values) == {"loss", "lr", "grad_norm", "tokens_per_second"}


def test_validation_stands_at_the_tokens_and_seconds_of_training(tmp_path: Path) -> None:
    records = [train_record(10, 4.0), train_record(20, 3.0), valid_record(5, 9, 0), valid_record(15, 5, 0.1)]
    [run] = read_runs([write_run(tmp_path / "a", [*records, valid_record(30, 4, 0.2)])])
    valid = run.tracks["valid"]
    assert valid.tokens.tolist() == [500, 1500, 3000]
    assert valid.seconds.tolist() == [10, 30, 60]


def test_a_run_is_read_once_and_names_tell_runs_apart(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / place) for place in ("a/x", "b/x", "b/y")]
    (tmp_path / "link").symlink_to(paths[0])
    runs = read_runs([*paths, paths[1], tmp_path / "link"])
    assert [run.name for run in runs] == ["a/x", "b/x", "y"]


@given(st.lists(st.lists(st.sampled_from("ab"), min_size=1, max_size=4), max_size=6, unique_by=tuple))
def test_names_are_unique_for_distinct_paths(parts: list[list[str]]) -> None:
    names = unique_names([Path("/", *part) for part in parts])
    assert len(set(names)) == len(names)


@given(st.lists(NUMBERS, min_size=1, max_size=30), st.floats(0, 0.99))
def test_smoothing_is_a_weighted_mean_without_bias(values: list[float], weight: float) -> None:
    smoothed = smooth_values(np.array(values), weight)
    for n in range(len(values)):
        shares = [weight ** (n - k) for k in range(n + 1)]
        mean = sum(share * value for share, value in zip(shares, values, strict=False)) / sum(shares)
        assert smoothed[n] == pytest.approx(mean, abs=1e-9)


def test_smoothing_passes_over_what_is_missing_and_zero_changes_nothing() -> None:
    values = np.array([math.nan, 2.0, math.nan, 4.0])
    assert np.array_equal(smooth_values(values, 0.0), values, equal_nan=True)
    assert smooth_values(values, 0.5)[3] == pytest.approx((0.5 * 2 + 4) / 1.5)


def test_metrics_by_name_by_split_and_all(tmp_path: Path) -> None:
    runs = read_runs([write_run(tmp_path / "a")])
    assert list(metrics_of(runs)) == ["loss", "accuracy", "lr", "tokens_per_second", "grad_norm"]

    def chosen(*asked: str) -> list[tuple[str, tuple[str, ...]]]:
        return list(choose_metrics(runs, asked).items())

    assert chosen() == chosen("loss") == chosen("train.loss", "valid.loss") == [("loss", ("train", "valid"))]
    assert chosen("valid.loss", "lr") == [("loss", ("valid",)), ("lr", ("train",))]
    assert len(chosen("all")) == 5
    for wrong in ("acuracy", "train.accuracy", ".loss", "loss."):
        with pytest.raises(InputError, match="loss, accuracy, lr, tokens_per_second, grad_norm, or all") as error:
            chosen(wrong)
        if wrong == "acuracy":
            assert error.value.hint == "did you mean 'accuracy'?"


def test_without_a_loss_the_first_metric_there_is_shown(tmp_path: Path) -> None:
    runs = read_runs([write_run(tmp_path / "a", [{"split": "valid", "step": 1, "bleu": 2.0}])])
    assert list(choose_metrics(runs, ())) == ["bleu"]


def test_smoothing_spares_validation_and_the_learning_rate(tmp_path: Path) -> None:
    runs = read_runs([write_run(tmp_path / "a")])
    loss, lr = make_panels(runs, choose_metrics(runs, ("loss", "lr")), x="step", smooth=0.9)
    assert [(series.label, series.raw is not None) for series in loss.series] == [("train", True), ("valid", False)]
    assert lr.series[0].raw is None


def test_axes_are_steps_tokens_and_time_in_a_unit_that_suits(tmp_path: Path) -> None:
    runs = read_runs([write_run(tmp_path / "a")])
    choices = choose_metrics(runs, ("valid.loss",))

    def places(x: str) -> list[float]:
        return make_panels(runs, choices, x=x, smooth=0)[0].series[0].x.tolist()  # type: ignore[arg-type]

    assert (places("step"), places("tokens")) == ([50, 100], [5000, 10000])
    assert time_unit(runs) == ("minutes", 60.0) and places("time") == pytest.approx([100 / 60, 200 / 60])
    bare = read_runs([write_run(tmp_path / "b", [{"split": "valid", "step": 1, "loss": 2.0}])])
    with pytest.raises(InputError, match="--x tokens: no run logged its tokens"):
        make_panels(bare, choose_metrics(bare, ()), x="tokens", smooth=0)


def test_lines_of_many_runs_and_splits_all_look_different(tmp_path: Path) -> None:
    runs = read_runs([write_run(tmp_path / str(n)) for n in range(12)])
    [panel] = make_panels(runs, choose_metrics(runs, ()), x="step", smooth=0)
    assert len({(series.colour % 6, series.dash % 4) for series in panel.series}) == 24
    assert panel.series[3].label == "1 · valid"


def test_which_end_of_a_metric_is_the_best() -> None:
    assert [better(name) for name in ("loss", "masked_lm_loss", "perplexity", "bits_per_byte")] == ["lower"] * 4
    assert [better(name) for name in ("accuracy", "bleu", "mcc")] == ["higher"] * 3
    assert better("lr") is None and better("grad_norm") is None


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6), st.integers(2, 12))
def test_linear_ticks_are_even_few_and_inside(low: float, span: float, most: int) -> None:
    found = ticks(low, low + span, log=False, most=most)
    slack = 1e-6 * (abs(low) + span)
    assert len(found) <= most + 1 and all(low - slack <= value <= low + span + slack for value in found)
    gaps = np.diff(found)
    assert len(gaps) < 2 or np.allclose(gaps, gaps[0], rtol=1e-3)


@pytest.mark.parametrize(
    ("low", "high", "most", "expected"),
    [
        (1, 10, 9, [1, 2, 5, 10]),
        (1, 100, 4, [1, 3, 10, 30, 100]),
        (0.5, 2000, 4, [1, 10, 100, 1000]),
        (1, 1e8, 4, [1, 1e2, 1e4, 1e6, 1e8]),
        (2, 20, 2, [3, 10]),
        (2, 4, 4, [2, 2.5, 3, 3.5, 4]),  # a small range is divided evenly
    ],
)
def test_logarithmic_ticks(low: float, high: float, most: int, expected: list[float]) -> None:
    assert ticks(low, high, log=True, most=most) == pytest.approx(expected)


def test_plain_numbers() -> None:
    shown = {16384: "16,384", 1536000: "1.536M", 2.0219: "2.022", 6e-5: "6e-5", 0.0: "0", 12345.6: "12,346"}
    assert {value: plain(value) for value in shown} == shown


SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def runs(tmp_path: Path) -> list[PlottedRun]:
    other = [train_record(step, 5 - step / 40) for step in range(10, 101, 10)]
    return read_runs([write_run(tmp_path / "first"), write_run(tmp_path / "second", other)])


def panels_of(runs: list[PlottedRun], *asked: str, smooth: float = 0.0) -> list[MetricPanel]:
    return make_panels(runs, choose_metrics(runs, asked), x="step", smooth=smooth)


@pytest.mark.parametrize("width", [10, 40, 80, 200])
def test_the_terminal_plot_keeps_to_its_width_and_says_last_and_best(width: int, runs: list[PlottedRun]) -> None:
    text = draw_curves(panels_of(runs, "loss", "accuracy"), title="T", x_label="step", width=width, colour="none")
    assert text.endswith("\n") and "\x1b" not in text
    plots = [line for line in text.splitlines() if "│" in line or "┤" in line or "└" in line]
    assert max(map(len, plots)) <= max(width, 24)
    assert re.search(r"C s.*n +last 2\.5  best 2\.5", text) and re.search(r"━━ f.*d +last 0\.5  best 0\.5", text)
    assert width < 40 or ("C second · train" in text and "━━ first · valid" in text)


def test_a_line_goes_from_each_point_to_the_next(tmp_path: Path) -> None:
    """A curve with one peak: its height is the middle of the picture alone."""
    runs = read_runs(
        [write_run(tmp_path / "a", [train_record(step, loss) for step, loss in enumerate((1.0, 2.0, 1.0))])]
    )
    text = draw_curves(panels_of(runs), title="", x_label="step", width=60, colour="none")
    dots = [[place for place, sign in enumerate(line) if "\u2801" <= sign <= "\u28ff"] for line in text.splitlines()]
    highest, *_, lowest = [places for places in dots if places]
    assert len(highest) < 10 and lowest[0] < min(highest) and lowest[-1] > max(highest) and len(lowest) < 10


def test_without_colour_several_lines_are_letters(runs: list[PlottedRun]) -> None:
    many = draw_curves(panels_of(runs), title="", x_label="step", width=60, colour="none")
    assert all(letter in many for letter in "ABC") and not re.search("[\u2801-\u28ff]", many)


def test_colours_are_closed_on_every_line(runs: list[PlottedRun]) -> None:
    panels = panels_of(runs, smooth=0.9)
    for colour, code in (("truecolor", "\x1b[38;2;0;114;178m"), ("256", "\x1b[38;5;")):
        text = draw_curves(panels, title="", x_label="step", width=80, colour=colour)  # type: ignore[arg-type]
        assert code in text
        for line in text.splitlines():
            assert "\x1b" not in line or line.rfind("\x1b[0m") >= line.rfind("\x1b[38")


def test_hostile_names_cannot_steer_the_terminal(tmp_path: Path) -> None:
    runs = read_runs([write_run(tmp_path / "\x1b[2Ja"), write_run(tmp_path / "b")])
    assert "\x1b" not in draw_curves(panels_of(runs), title="\x1b]0;x", x_label="step", width=80, colour="none")


def test_what_logarithmic_axes_cannot_show_is_left_out(tmp_path: Path) -> None:
    runs = read_runs([write_run(tmp_path / "a", [train_record(0, -1.0), train_record(1, -2.0)])])
    text = draw_curves(panels_of(runs), title="", x_label="step", width=60, colour="none", log_y=True)
    assert "no values that these axes can show" in text
    assert draw_panels(panels_of(runs), "svg", title="", x_label="step", log_x=True, log_y=True).startswith(b"<?xml")


def test_pictures_have_a_panel_for_each_metric_and_equal_bytes(runs: list[PlottedRun]) -> None:
    panels = panels_of(runs, "loss", "lr", "accuracy", smooth=0.5)
    made = [draw_panels(panels, "svg", title="a $ < b", x_label="step", log_y=True) for _ in range(2)]
    assert made[0] == made[1]
    root = ElementTree.fromstring(made[0])
    words = ["".join(text.itertext()) for text in root.iter(f"{SVG}text")]
    assert {"loss", "learning rate", "accuracy", "a $ < b", "first · train", "second · train"} <= set(words)
    assert words.count("step") == 3 and words.count("first · train") == 1, "one legend for all panels"
    png = Image.open(io.BytesIO(draw_panels(panels[:1], "png", title="", x_label="step")))
    assert png.format == "PNG" and png.width == 880


def test_json_holds_what_is_drawn_and_csv_every_value(runs: list[PlottedRun]) -> None:
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


def page_of(runs: list[PlottedRun], *asked: str) -> str:
    choices = choose_metrics(runs, asked)
    return render(runs, choices, title="T", x="step", smooth=0.5, log_x=False, log_y=True)


def test_the_page_holds_every_metric_of_every_run(runs: list[PlottedRun]) -> None:
    page = page_of(runs, "valid.loss")
    data = page_data(page)
    assert [metric["name"] for metric in data["metrics"]][:2] == ["loss", "accuracy"]
    assert data["chosen"] == [{"metric": "loss", "splits": ["valid"]}]
    assert data["start"] == {"x": "step", "smooth": 0.5, "logX": False, "logY": True}
    assert data["runs"][0]["tracks"]["valid"] == {"step": [50, 100], "tokens": [5000, 10000], "time": [100, 200],
                                                  "values": {"loss": [3.1, 2.5], "accuracy": [0.25, 0.5]}}  # fmt: skip
    assert script_bytes(page) < 60_000


def test_a_name_cannot_end_the_element_that_holds_it(tmp_path: Path) -> None:
    page = page_of(read_runs([write_run(tmp_path / "<!--<script>", None)]))
    assert "<!--<script>" not in page and page_data(page)["runs"][0]["name"] == "<!--<script>"


def test_too_many_values_are_thinned_and_the_page_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_VALUES >= 100_000
    monkeypatch.setattr("tformer.viz.plot.page.MAX_VALUES", 30)
    page = page_of(read_runs([write_run(tmp_path / "a")]))
    steps = page_data(page)["runs"][0]["tracks"]["train"]["step"]
    assert len(steps) < 10 and steps[-1] == 100 and "th value of each curve is shown" in page
