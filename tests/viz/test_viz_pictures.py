"""Pictures and terminal plots: colours, heat maps, lines, curves; plots as a page, text, JSON or CSV."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from PIL import Image

from tformer.viz.figure import DASHES, MARKS, draw_panels, draw_plots
from tformer.viz.output import FORMATS
from tformer.viz.pe.views import VIEWS
from tformer.viz.picture import render_plots
from tformer.viz.plot.series import MetricPanel, Series, make_series
from tformer.viz.plots import MAX_NUMBERS, PALETTE, Heat, Line, LinePlot, Plot, Ramp, counted_heat
from tformer.viz.terminal import colour_support, draw_plot, nearest_256

VALUES = np.linspace(-1, 1, 60 * 90).reshape(60, 90)
VALUES[3, 4] = np.nan
HEAT = Heat(
    VALUES, range(60), range(90), "row", "column", "RdBu_r", -1, 1, "value", title="A map", caption="What it shows."
)
X = np.arange(40.0)
LINES = LinePlot("x", "y", [Line("up", X, X), Line("down", X, 40 - X)], title="Lines", caption="What they show.")
MANY = LinePlot(
    "x", "y", [Line(f"t{n}", X, np.sin(X + n)) for n in range(30)], ramp=Ramp("viridis", 0, 29, "n"), title="Traces"
)
LOG = LinePlot("x", "y", [Line("e", X, np.exp(X))], log_y=True, points=True, title="Log", caption="Steep.")
ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


def test_an_svg_holds_its_words_as_text_and_its_map_as_an_image() -> None:
    text = draw_plots([HEAT], "svg", heading="A $heading$").decode()
    assert all(word in text for word in ("A map", "What it shows.", "A $heading$", "column")) and "<image" in text
    assert len(text) < 100_000 and "<dc:date>" not in text


def test_control_characters_of_a_caption_leave_an_svg_well_formed() -> None:
    plot = replace(LINES, caption="labels: \x1b[31mred\x07")
    text = draw_plots([plot], "svg", heading="")
    assert rb"labels: \x1b[31mred\x07" in text and ElementTree.fromstring(text) is not None


def test_a_png_has_the_colours_of_the_map() -> None:
    plot = counted_heat(np.array([[1.0, -1.0], [-1.0, 1.0]]), "r", "c", "RdBu_r", -1, 1)
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
    plot = Heat(np.array([[0.0, 1.0], [np.nan, 0.5]]), ["a", "b"], ["x", "y"], "r", "c", "viridis", 0, 1, title="t")
    lines = draw_plot(plot, width=40, colour="none").splitlines()
    assert lines[1] == "a  @" and lines[2] == "b /+"


def test_without_colour_a_line_has_the_shade_that_the_scale_gives_its_number() -> None:
    flat = [Line(str(n), X, np.full(40, float(n))) for n in range(5)]
    text = draw_plot(LinePlot("x", "y", flat, ramp=Ramp("viridis", 0, 4, "n")), width=80, colour="none")
    rows = [set(re.split("[│┤]", line)[1].strip()) for line in text.splitlines() if "│" in line or "┤" in line]
    assert [marks.pop() for marks in rows if marks] == ["@", "#", "+", ":", "."], "the upper line has the last number"


@pytest.mark.parametrize(("kind", "view"), [("rope", "circles"), ("alibi", "bias"), ("patch2d", "similarity")])
def test_captions_break_before_the_edge_of_the_picture(kind: str, view: str) -> None:
    plot = LinePlot("x", "y", LINES.lines[:1], title="t", caption=VIEWS[kind][view].caption)
    image = Image.open(io.BytesIO(draw_plots([plot], "png", heading=""))).convert("L")
    below = image.crop((image.width - 4, image.height - 60, image.width, image.height))
    assert below.getextrema() == (255, 255)


@pytest.mark.filterwarnings("error")
def test_very_many_lines_of_one_place_are_drawn_without_complaint() -> None:
    lines = [Line(f"t{n}", np.zeros(1), np.full(1, n / 200)) for n in range(200)]
    assert draw_plots([LinePlot("x", "y", lines, ramp=Ramp("viridis", 0, 199, "n"))], "png", heading="")


def test_half_blocks_hold_two_rows_a_line() -> None:
    plot = counted_heat(np.array([[1.0], [0.0]]), "r", "c", "viridis", 0, 1, title="t")
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
        "import sys, tformer.viz.page, tformer.viz.pe.page, tformer.viz.terminal\n"
        "assert 'matplotlib' not in sys.modules and 'tformer.checkpoint' not in sys.modules\n"
        "assert 'pydantic' not in sys.modules and 'tformer.nn.attention' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


FALLING = [(float(step), 3 / step) for step in range(1, 30)]


def drawn(*series: Series, kind: Any = "svg", log: bool = False, title: str = "Loss") -> bytes:
    """One panel of curves."""
    return draw_panels([MetricPanel("nats", series)], kind, title=title, x_label="step", log_x=log, log_y=log)


@pytest.mark.parametrize(("kind", "magic"), [("svg", b"<?xml"), ("png", b"\x89PNG")])
def test_equal_curves_are_equal_bytes_and_a_spread_is_seen(kind: str, magic: bytes) -> None:
    curves = make_series(0, "a", FALLING), make_series(1, "b", FALLING[:4], [0.1] * 4)
    first, second = drawn(*curves, kind=kind), drawn(*curves, kind=kind)
    assert first == second and first.startswith(magic)
    assert first != drawn(curves[0], make_series(1, "b", FALLING[:4]), kind=kind)


def test_bytes_do_not_depend_on_a_persons_settings() -> None:
    curve, own = make_series(0, "a", [(1, 2), (3, 4)]), {"font.size": 31, "axes.grid": True, "axes.facecolor": "red"}
    with matplotlib.rc_context(own):
        changed = drawn(curve)
    assert changed == drawn(curve)


@pytest.mark.slow
def test_bytes_do_not_depend_on_the_process_or_on_a_persons_settings(tmp_path: Path) -> None:
    """Its quick twin is `test_bytes_do_not_depend_on_a_persons_settings`."""
    code = (
        "import sys\nfrom pathlib import Path\nfrom tests.viz.test_viz_pictures import drawn, make_series\n"
        "Path(sys.argv[1]).write_bytes(drawn(make_series(0, 'a', [(1, 2), (3, 4)])))\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    settings = tmp_path / "matplotlibrc"
    settings.write_text("font.size: 31\naxes.grid: True\naxes.facecolor: red\n")
    environment = {"MATPLOTLIBRC": str(settings), "PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, str(tmp_path / "a.svg")]
    subprocess.run(command, check=True, env={**os.environ, **environment})
    assert (tmp_path / "a.svg").read_bytes() == drawn(make_series(0, "a", [(1, 2), (3, 4)]))


def test_drawing_leaves_matplotlib_as_it_was() -> None:
    before = dict(matplotlib.rcParams)
    drawn(make_series(0, "a", FALLING))
    assert dict(matplotlib.rcParams) == before


def test_no_two_styles_of_sixty_curves_agree_in_dash_and_mark_and_colour() -> None:
    styles = {(n % len(PALETTE), n % len(DASHES), n % len(MARKS)) for n in range(60)}
    assert len(styles) == 60
    neighbours = zip(range(59), range(1, 60), strict=True)
    assert all(a % len(DASHES) != b % len(DASHES) and a % len(MARKS) != b % len(MARKS) for a, b in neighbours)


def test_a_band_on_a_logarithmic_axis_stays_above_zero() -> None:
    wide, narrow = (make_series(0, "a", FALLING, [width] * len(FALLING)) for width in (9.0, 1.0))
    assert drawn(wide, log=True) != drawn(narrow, log=True) and b"nan" not in drawn(wide, log=True)


def test_curves_without_points_are_named_and_what_axes_cannot_show_is_left_out() -> None:
    odd = [(0.0, 1.0), (1.0, math.nan), (2.0, -1.0), (4.0, math.inf), (8.0, 2.0), (16.0, 3.0)]
    picture = drawn(make_series(0, "odd", odd, [9.0] * 6), make_series(1, "none", []), log=True).decode()
    assert "none (no points)" in picture and ">8<" in picture and ">16<" in picture and "nan" not in picture


def test_lengths_in_powers_of_two_are_written_out() -> None:
    lengths = [512, 1024, 2048, 4096, 8192, 16_384]
    picture = drawn(make_series(0, "full", [(n, n * n / 1e9) for n in lengths]), log=True).decode()
    assert all(f">{length:,}<" in picture for length in lengths)


def test_a_logarithmic_axis_of_a_narrow_range_has_numbers() -> None:
    picture = drawn(make_series(0, "a", [(1, 2.1), (2, 2.9), (3, 2.5)]), log=True).decode()
    assert len(re.findall(r">2\.\d+<", picture.partition('id="matplotlib.axis_2"')[2])) >= 4


def test_names_are_shown_as_they_are(recwarn: pytest.WarningsRecorder) -> None:
    names = ["_hidden", "cost in $ and $", "\x1b[31mred", "中文"]
    picture = drawn(*(make_series(number, name, FALLING) for number, name in enumerate(names))).decode()
    assert all(f">{name}<" in picture for name in (*names[:2], "\\x1b[31mred", names[3]))
    assert not recwarn.list


# --- plots in every format ------------------------------------------------------------------------------------------

HOSTILE = "</script><b>&"
COUNTS = np.array([[50.0, 3.0], [1.0, 40.0]])
CONFUSION = Heat(
    COUNTS, ["no", HOSTILE], ["no", HOSTILE], "label", "prediction", "viridis", title="Confusion", numbers=True
)
SHARES, LOSSES, SPREAD = np.array([0.1, 0.2, 1.0]), np.array([3.0, 2.5, np.nan]), np.array([0.2, 0.1, 0.3])
CURVES = [Line("rope", SHARES, LOSSES, SPREAD), Line("alibi", SHARES, LOSSES + 1)]
CURVE = LinePlot("share", "loss", CURVES, log_x=True, points=True, title="Curve")
PLOTS: list[Plot] = [CONFUSION, CURVE]


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_is_made_twice_the_same(kind: str) -> None:
    few = replace(MANY, lines=MANY.lines[:3])
    first, second = (render_plots([*PLOTS, few], kind, title=f"A {HOSTILE}") for _ in range(2))
    assert first == second and first
    if isinstance(first, bytes):
        assert first.startswith({"png": b"\x89PNG", "svg": b"<?xml"}[kind])


def test_csv_holds_the_numbers_and_the_error_bars() -> None:
    text = render_plots(PLOTS, "csv", title="")
    assert isinstance(text, str)
    rows = list(csv.reader(io.StringIO(text)))
    assert rows[0] == ["plot", "line", "x", "y", "spread"]
    assert ["Confusion", "no", HOSTILE, "3.0"] in rows
    assert ["Curve", "rope", "0.2", "2.5", "0.1"] in rows and ["Curve", "alibi", "0.1", "4.0"] in rows
    assert len([row for row in rows if row[0] == "Curve"]) == 4  # without what is not a number
    plain = render_plots([LinePlot("x", "y", [Line("a", X, X)])], "csv", title="")
    assert isinstance(plain, str) and plain.startswith("plot,line,x,y\n")


def test_json_and_the_page_hold_the_same_numbers() -> None:
    document = json.loads(render_plots(PLOTS, "json", title="T"))
    assert document["title"] == "T" and document["plots"][0]["values"] == COUNTS.tolist()
    assert document["plots"][1]["lines"][0]["points"] == [[0.1, 3.0, 0.2], [0.2, 2.5, 0.1]]
    page = render_plots(PLOTS, "html", title=HOSTILE)
    assert isinstance(page, str) and HOSTILE not in page
    found = re.search(r'<script type="application/json" id="page-data">(.*?)</script>', page)
    assert found is not None
    heat, curve = json.loads(found[1])["plots"]
    assert heat["values"] == COUNTS.ravel().tolist() and heat["rowNames"] == ["no", HOSTILE] and heat["numbers"]
    assert curve["series"][0]["spread"] == SPREAD.tolist() and curve["series"][0]["y"] == [3.0, 2.5, None]
    assert "spread" not in curve["series"][1] and curve["logX"]


def test_a_picture_writes_the_counts_of_small_maps_only() -> None:
    def svg(plot: Plot) -> str:
        drawn = render_plots([plot], "svg", title="")
        assert isinstance(drawn, bytes)
        return drawn.decode()

    assert all(f">{number}<" in svg(CONFUSION) for number in (50, 3, 1, 40))
    names = [f"c{n}" for n in range(MAX_NUMBERS + 1)]
    many: Any = Heat(np.full((len(names),) * 2, 77777.0), names, names, "a", "b", "viridis", numbers=True)
    assert ">77,777<" not in svg(many) and not many.shows_numbers


def test_a_logarithmic_axis_over_one_decade_names_more_than_its_ends() -> None:
    drawn = render_plots([CURVE], "svg", title="")
    assert isinstance(drawn, bytes) and all(f">{tick}<" in drawn.decode() for tick in ("0.1", "0.2"))


ENDS = Line("all", np.array([0.0, 5, 10]), np.array([0.0, 10, 0]), names=("left", "世界", "right"))
NAMED = LinePlot("x", "y", [ENDS], points=True, joined=False)


@pytest.mark.filterwarnings("error")
def test_names_stand_beside_their_points() -> None:
    svg = draw_plots([NAMED], "svg", heading="").decode()
    assert all(f">{name}</text>" in svg for name in ("left", "世界", "right"))


def test_points_that_are_not_joined_have_no_line_and_very_many_are_an_image() -> None:
    assert draw_plots([NAMED], "png", heading="") != draw_plots([replace(NAMED, joined=True)], "png", heading="")
    values = np.random.default_rng(0).normal(size=(2, 20_000))
    many = LinePlot("x", "y", [Line("all", *values)], points=True, joined=False)
    svg = draw_plots([many], "svg", heading="")
    assert b"<image" in svg and len(svg) < 400_000
