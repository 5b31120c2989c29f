"""Pictures and terminal plots: colours, heat maps, lines, curves."""

from __future__ import annotations

import io
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from PIL import Image

from tformer.support.errors import InputError, StorageError
from tformer.viz import Curve, draw_curves, picture_format
from tformer.viz.curves import COLOURS, DASHES, LABEL_WIDTH, MARKERS, _wrap
from tformer.viz.figure import draw_plots
from tformer.viz.pe.views import VIEWS
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
        "import sys, tformer.viz.page, tformer.viz.pe.page, tformer.viz.terminal\n"
        "assert 'matplotlib' not in sys.modules and 'tformer.checkpoint' not in sys.modules\n"
        "assert 'pydantic' not in sys.modules and 'tformer.nn.attention' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


WORDS = {"title": "Loss", "x_label": "step", "y_label": "nats"}
FALLING = [(float(step), 3 / step) for step in range(1, 30)]


@pytest.mark.parametrize(("suffix", "magic"), [("svg", b"<?xml"), ("png", b"\x89PNG"), ("pdf", b"%PDF")])
def test_the_suffix_is_the_format_and_equal_curves_are_equal_bytes(suffix: str, magic: bytes, tmp_path: Path) -> None:
    first, second = tmp_path / f"a.{suffix}", tmp_path / "made" / "on" / f"the-way.{suffix}"
    for path in (first, second):
        draw_curves([Curve("a", FALLING), Curve("b", FALLING[:4], spread=[0.1] * 4)], path, **WORDS)
    assert first.read_bytes().startswith(magic)
    assert first.read_bytes() == second.read_bytes()


def test_bytes_do_not_depend_on_the_process_or_on_a_persons_settings(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom tformer.viz import Curve, draw_curves\n"
        "draw_curves([Curve('a', [(1, 2), (3, 4)])], sys.argv[1], title='t', x_label='x', y_label='y')\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    settings = tmp_path / "matplotlibrc"
    settings.write_text("font.size: 31\naxes.grid: True\naxes.facecolor: red\n")
    for name, environment in (("a.svg", {}), ("b.svg", {"MATPLOTLIBRC": str(settings), "PYTHONHASHSEED": "7"})):
        command = [sys.executable, "-c", code, str(tmp_path / name)]
        subprocess.run(command, check=True, env={**os.environ, **environment})
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_drawing_leaves_matplotlib_as_it_was(tmp_path: Path) -> None:
    before = dict(matplotlib.rcParams)
    draw_curves([Curve("a", FALLING)], tmp_path / "a.png", **WORDS)
    assert dict(matplotlib.rcParams) == before


@pytest.mark.parametrize("name", ["curves.gif", "curves", "curves.html"])
def test_an_unknown_suffix_names_the_known_ones(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"expected one of \.svg, \.png, \.pdf"):
        picture_format(name)
    with pytest.raises(InputError):
        draw_curves([Curve("a", FALLING)], tmp_path / name, **WORDS)
    assert not list(tmp_path.iterdir())


def test_no_two_styles_of_sixty_curves_agree_in_dash_and_marker_and_colour() -> None:
    styles = {(n % len(COLOURS), n % len(DASHES), n % len(MARKERS)) for n in range(252)}
    assert len(styles) == 252
    neighbours = zip(range(59), range(1, 60), strict=True)
    assert all(a % len(DASHES) != b % len(DASHES) and a % len(MARKERS) != b % len(MARKERS) for a, b in neighbours)


def colours_in(path: Path) -> set[str]:
    text = path.read_text().lower()
    return {colour for colour in COLOURS if f"stroke: {colour.lower()}" in text}


def test_curves_of_a_group_share_their_colour_and_a_legend_entry(tmp_path: Path) -> None:
    grouped, apart = tmp_path / "grouped.svg", tmp_path / "apart.svg"
    draw_curves([Curve("a", FALLING, group=0), Curve("a", FALLING[3:], group=0)], grouped, **WORDS)
    draw_curves([Curve("a", FALLING), Curve("a", FALLING[3:])], apart, **WORDS)
    assert colours_in(grouped) - {"#000000"} == {COLOURS[0]}
    assert colours_in(apart) - {"#000000"} == set(COLOURS[:2])
    assert grouped.read_text().count("<!-- a -->") == 1
    assert apart.read_text().count("<!-- a -->") == 2


def test_what_axes_cannot_show_is_left_out(tmp_path: Path) -> None:
    odd = [(0.0, 1.0), (1.0, math.nan), (2.0, -1.0), (4.0, math.inf), (8.0, 2.0), (16.0, 3.0)]
    plain, clean = tmp_path / "odd.svg", tmp_path / "clean.svg"
    draw_curves([Curve("a", odd, spread=[9.0] * 6)], plain, log_x=True, log_y=True, **WORDS)
    draw_curves([Curve("a", odd[4:], spread=[9.0] * 2)], clean, log_x=True, log_y=True, **WORDS)
    assert plain.read_bytes() == clean.read_bytes()


def test_nothing_to_draw_is_said(tmp_path: Path) -> None:
    for curves, words in (([], "no points"), ([Curve("a", [(0, 1)])], "none of its 1 points")):
        with pytest.raises(InputError, match=words):
            draw_curves(curves, tmp_path / "a.png", log_x=True, **WORDS)
    assert not list(tmp_path.iterdir())


def test_lengths_in_powers_of_two_are_written_out(tmp_path: Path) -> None:
    lengths = [512, 1024, 2048, 4096, 8192, 16_384]
    path = tmp_path / "time.svg"
    draw_curves([Curve("full", [(n, n * n / 1e9) for n in lengths])], path, log_x=True, log_y=True, **WORDS)
    for length in lengths:
        assert f"<!-- {length:,} -->" in path.read_text()


def test_a_logarithmic_axis_of_a_narrow_range_has_numbers(tmp_path: Path) -> None:
    path = tmp_path / "narrow.svg"
    draw_curves([Curve("a", [(1, 2.1), (2, 2.9), (3, 2.5)])], path, log_y=True, **WORDS)
    assert len(re.findall(r"<!-- 2\.\d+ -->", path.read_text().partition('id="matplotlib.axis_2"')[2])) >= 4


def test_names_are_shown_as_they_are(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    path = tmp_path / "names.svg"
    names = ["_hidden", "cost in $ and $", "\x1b[31mred", "中文"]
    draw_curves([Curve(name, FALLING) for name in names], path, **WORDS)
    assert all(f"<!-- {name} -->" in path.read_text() for name in (*names[:2], "\\x1b[31mred"))
    assert not recwarn.list


@pytest.mark.parametrize("count", [1, 7, 60])
def test_a_picture_is_1000_pixels_wide_and_as_tall_as_its_legend(count: int, tmp_path: Path) -> None:
    path = tmp_path / "many.png"
    draw_curves([Curve(f"run {number}", FALLING) for number in range(count)], path, **WORDS)
    width, height = Image.open(path).size
    assert width == 1000
    assert height == 600 if count < 30 else height > 600


def test_long_names_break_at_keys_and_values() -> None:
    label = "model.encoder.positions.kind=sinusoidal, model.encoder.norm.kind=scalenorm"
    lines = _wrap(label).split("\n")
    assert max(map(len, lines)) <= LABEL_WIDTH
    assert "".join(lines).replace(" ", "") == label.replace(" ", "")
    assert "kind=" in lines[0] or lines[1].startswith("kind=")
    assert max(map(len, _wrap("x" * 100).split("\n"))) == LABEL_WIDTH


def test_a_spread_belongs_to_its_points() -> None:
    with pytest.raises(ValueError, match="2 points, 1 values"):
        Curve("a", [(1, 1), (2, 2)], spread=[0.5])


def test_an_old_picture_survives_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tformer.support import files

    path = tmp_path / "a.png"
    draw_curves([Curve("a", FALLING)], path, **WORDS)
    old = path.read_bytes()

    def refuse(source: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "rename", refuse)
    with pytest.raises(StorageError, match=r"a\.png"):
        draw_curves([Curve("b", FALLING[5:])], path, **WORDS)
    assert path.read_bytes() == old and [entry.name for entry in tmp_path.iterdir()] == ["a.png"]
