"""Plots as pictures and as characters: equal bytes for equal plots, readable without colour, never too wide."""

from __future__ import annotations

import io
import re
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from tformer.viz.figure import draw_plots
from tformer.viz.pe.catalogue import VIEWS
from tformer.viz.plots import Heat, Line, Lines, Plot, Ramp
from tformer.viz.terminal import colour_support, draw_plot, nearest_256

VALUES = np.linspace(-1, 1, 60 * 90).reshape(60, 90)
VALUES[3, 4] = np.nan
HEAT = Heat("A map", "What it shows.", VALUES, range(60), range(90), "row", "column", "RdBu_r", -1, 1, "value")
X = np.arange(40.0)
LINES = Lines("Lines", "What they show.", "x", "y", [Line("up", X, X), Line("down", X, 40 - X)])
MANY = Lines(
    "Traces", "Many.", "x", "y", [Line(f"t{n}", X, np.sin(X + n)) for n in range(30)], ramp=Ramp("viridis", 0, 29, "n")
)
LOG = Lines("Log", "Steep.", "x", "y", [Line("e", X, np.exp(X))], log_y=True, points=True)
ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


@pytest.mark.parametrize(("kind", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_equal_plots_are_equal_bytes(kind: str, magic: bytes) -> None:
    first, second = (draw_plots([HEAT, LINES, MANY, LOG], kind, heading="Here") for _ in range(2))  # type: ignore[arg-type]
    assert first == second and first.startswith(magic)


def test_an_svg_holds_its_words_as_text_and_its_map_as_an_image() -> None:
    text = draw_plots([HEAT], "svg", heading="A $heading$").decode()
    assert all(word in text for word in ("A map", "What it shows.", "A $heading$", "column")) and "<image" in text
    assert len(text) < 100_000 and "<dc:date>" not in text
    assert "What it shows." not in draw_plots([HEAT], "svg", heading="", captions=False).decode()


def test_a_png_has_the_colours_of_the_map() -> None:
    plot = Heat("t", "c", np.array([[1.0, -1.0], [-1.0, 1.0]]), range(2), range(2), "r", "c", "RdBu_r", -1, 1)
    image = Image.open(io.BytesIO(draw_plots([plot], "png", heading=""))).convert("RGB")
    colours = {colour for _, colour in image.getcolors(1 << 20) or []}
    assert {(0x67, 0, 0x1F), (0x05, 0x30, 0x61)} <= colours


@pytest.mark.parametrize("width", [30, 80, 120])
@pytest.mark.parametrize("colour", ["truecolor", "256", "none"])
@pytest.mark.parametrize("plot", [HEAT, LINES, MANY, LOG], ids=["heat", "lines", "many", "log"])
def test_characters_fit_the_width(plot: Plot, colour: str, width: int) -> None:
    text = draw_plot(plot, width=width, colour=colour)  # type: ignore[arg-type]
    plain = ESCAPE.sub("", text)
    assert "\x1b" not in plain and ("\x1b" in text) == (colour != "none")
    lines = plain.splitlines()
    assert len(lines) > 10 and max(map(len, lines[1:-3])) <= max(width, 45)
    assert plot.title in plain and plot.caption in " ".join(plain.split())


def test_without_colour_more_is_denser_and_nothing_is_not_zero() -> None:
    plot = Heat("t", "c", np.array([[0.0, 1.0], [np.nan, 0.5]]), ["a", "b"], ["x", "y"], "r", "c", "viridis", 0, 1)
    lines = draw_plot(plot, width=40, colour="none").splitlines()
    assert lines[1] == "a  @" and lines[2] == "b /+"


def test_without_colour_a_line_has_the_shade_that_the_scale_gives_its_number() -> None:
    text = draw_plot(MANY, width=80, colour="none")
    drawn = {mark for line in text.splitlines() if "|" in line for mark in line.split("|")[1]}
    assert {".", "=", "@"} <= drawn


@pytest.mark.parametrize(
    ("kind", "view"), [("sinusoidal", "distance"), ("patch2d", "heatmap"), ("patch2d", "similarity")]
)
def test_captions_break_before_the_edge_of_the_picture(kind: str, view: str) -> None:
    plot = Lines("t", VIEWS[kind][view].caption, "x", "y", LINES.lines[:1])
    image = Image.open(io.BytesIO(draw_plots([plot], "png", heading=""))).convert("L")
    below = image.crop((image.width - 4, image.height - 60, image.width, image.height))
    assert below.getextrema() == (255, 255)


@pytest.mark.filterwarnings("error")
def test_very_many_lines_of_one_place_are_drawn_without_complaint() -> None:
    lines = [Line(f"t{n}", np.zeros(1), np.full(1, n / 200)) for n in range(200)]
    assert draw_plots([Lines("t", "c", "x", "y", lines, ramp=Ramp("viridis", 0, 199, "n"))], "png", heading="")


def test_half_blocks_hold_two_rows_a_line() -> None:
    plot = Heat("t", "c", np.array([[1.0], [0.0]]), range(2), range(1), "r", "c", "viridis", 0, 1)
    line = draw_plot(plot, width=40, colour="truecolor").splitlines()[1]
    assert "\x1b[0;38;2;253;231;37;48;2;68;1;84m▀" in line


def test_what_a_terminal_can_show() -> None:
    class Stream(io.StringIO):
        def isatty(self) -> bool:
            return True

    assert colour_support(io.StringIO(), {"TERM": "xterm"}) == "none"
    assert colour_support(Stream(), {"TERM": "xterm", "NO_COLOR": "1", "COLORTERM": "truecolor"}) == "none"
    assert colour_support(Stream(), {"TERM": "xterm", "COLORTERM": "truecolor"}) == "truecolor"
    assert colour_support(Stream(), {"TERM": "xterm-256color"}) == "256"
    assert colour_support(Stream(), {"TERM": "dumb"}) == "none"


def test_the_palette_of_256() -> None:
    known = {(0, 0, 0): 16, (255, 255, 255): 231, (255, 0, 0): 196, (128, 128, 128): 244}
    assert {rgb: nearest_256(rgb) for rgb in known} == known


def test_a_page_loads_no_matplotlib() -> None:
    code = (
        "import sys, tformer.viz.page, tformer.viz.pe.page, tformer.viz.terminal, tformer.viz.figure\n"
        "assert 'matplotlib' not in sys.modules and 'tformer.checkpoint' not in sys.modules\n"
        "assert 'pydantic' not in sys.modules and 'tformer.nn.attention' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
