"""What pictures and terminal plots show, value by value: sizes, ticks, colours by value, the layout of panels."""

from __future__ import annotations

import math
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from tests.viz.attention_models import attention_of, random_attention, scene_of, signed_attention
from tests.viz.plot_runs import train_record, valid_record, write_run
from tformer.viz.attention.figures import draw
from tformer.viz.attention.scene import summarize
from tformer.viz.attention.text import as_text
from tformer.viz.figure import draw_panels, draw_plots
from tformer.viz.plot.series import choose_metrics, make_panels, read_runs
from tformer.viz.plots import PALETTE, Heat, Line, LinePlot, Ramp, colour_at, counted_heat, ticks
from tformer.viz.terminal import draw_curves, draw_plot

NUMBERS = np.arange(12.0)


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every figure that is saved, without the work of drawing it."""
    saved: list[Any] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: saved.append(self))
    return saved


def layout_of(axes: Any) -> tuple[int, int, int]:
    """(rows, columns, number of the place) of a panel."""
    rows, columns, place, _ = axes.get_subplotspec().get_geometry()
    return rows, columns, place


def words(labels: Any) -> list[str]:
    return [label.get_text() for label in labels]


# A matrix has 0.24 inches a token if it is alone, else 0.17: at least 2.4, at most 9 or 5. Names need 1.3 at the side
# and 1.1 below, so that they do not reach the title of the next row, the heading 0.6.
@pytest.mark.parametrize(
    ("layers", "heads", "tokens", "layout", "inches"),
    [
        (1, 1, 4, (1, 1), (2.4 + 1.3, 2.4 + 1.1 + 0.6)),
        (1, 1, 20, (1, 1), (4.8 + 1.3, 4.8 + 1.1 + 0.6)),
        (1, 1, 80, (1, 1), (9 + 1.3, 9 + 1.1 + 0.6)),
        (1, 3, 20, (2, 2), (2 * (3.4 + 1.3), 2 * (3.4 + 1.1) + 0.6)),
        (2, 3, 40, (2, 4), (4 * (5 + 1.3), 2 * (5 + 1.1) + 0.6)),
    ],
)
def test_heads_have_their_weights_and_names_in_panels_of_their_size(
    layers: int, heads: int, tokens: int, layout: tuple[int, int], inches: tuple[float, float], figures: list[Any]
) -> None:
    attention = random_attention(layers, heads, tokens, causal=True)
    draw(scene_of(attention), "decoder", "head", format_="png", scale="global")
    panels = {axes.get_title(): axes for axes in figures[0].axes if axes.get_title()}
    assert [layout_of(axes) for axes in panels.values()] == [(*layout, n) for n in range(layers * heads)]
    assert tuple(figures[0].get_size_inches()) == pytest.approx(inches)
    if len(panels) == 1:
        draw(scene_of(attention), "decoder", "rollout", format_="png", scale="row")
        assert tuple(figures[1].get_size_inches()) == pytest.approx(inches)
        rolled, *_ = scene_of(attention).rollouts.values()
        shown = figures[1].axes[0].images[0].get_array()
        assert np.allclose(shown, rolled / rolled.max(axis=1, keepdims=True)) and shown.mask[0, 1:].all()
    every = math.ceil(tokens / 64)
    named = [token.replace(" ", "␣") for token in attention.keys.tokens[::every]]
    for layer in attention.layers:
        for head, weights_TS in enumerate(layer.weights_HTS):
            axes = panels[f"layer {layer.number}, head {head}"]
            shown = axes.images[0].get_array()
            assert np.array_equal(shown.mask, ~layer.visible_TS) and np.array_equal(shown.data, weights_TS)
            assert axes.images[0].norm.vmax == max(part.weights_HTS.max() for part in attention.layers)
            assert words(axes.get_xticklabels()) == words(axes.get_yticklabels()) == named
            assert list(axes.get_xticks()) == list(range(0, tokens, every))
            assert {label.get_rotation() for label in axes.get_xticklabels()} == {90}
            assert {label.get_rotation() for label in axes.get_yticklabels()} == {0}


def test_all_heads_stand_in_rows_of_layers_and_a_head_that_was_pruned_leaves_a_gap(figures: list[Any]) -> None:
    attention = random_attention(3, 4, 6)
    less = replace(attention.layers[1], heads=(0, 2, 3), weights_HTS=attention.layers[1].weights_HTS[[0, 2, 3]])
    attention = replace(attention, layers=(attention.layers[0], less, attention.layers[2]))
    draw(scene_of(attention, rollouts=False), "encoder", "model", format_="png", scale="sqrt")
    panels, bar = figures[0].axes[:11], figures[0].axes[11:]
    places = [n for n in range(12) if n != 5]
    assert [layout_of(axes) for axes in panels] == [(3, 4, n) for n in places] and len(bar) == 1
    assert [axes.get_title() for axes in panels] == ["head 0", "head 1", "head 2", "head 3"] + [""] * 7
    names = [n for y in range(3) for n in (f"layer {y}\nquery", "", "", "")]
    assert [axes.get_ylabel() for axes in panels] == [names[n] for n in places]
    assert [axes.get_xlabel() for axes in panels] == [""] * 7 + ["key"] * 4
    assert [len(axes.images) for axes in panels] == [1] * 11
    assert np.array_equal(panels[5].images[0].get_array(), less.weights_HTS[1])
    tokens = [token.replace(" ", "␣") for token in attention.keys.tokens]
    assert [words(axes.get_xticklabels()) for axes in panels] == [[]] * 7 + [tokens] * 4
    assert [words(axes.get_yticklabels()) for axes in panels] == [tokens if n % 4 == 0 else [] for n in places]
    room = 0.06 * max(map(len, tokens))
    assert tuple(figures[0].get_size_inches()) == pytest.approx((4 * 2.2 + 1.3 + room, 3 * 2.2 + 1.1 + room))


def test_patches_lie_on_the_image_in_the_colours_of_their_shares(figures: list[Any]) -> None:
    attention = attention_of(np.tile(np.arange(5.0) / 8, (2, 1, 5, 1)), ["[CLS]", "0,0", "0,1", "1,0", "1,1"])
    pixels = np.zeros((8, 8, 3), dtype=np.uint8)
    scene = scene_of(attention)
    scene = replace(scene, reading=replace(scene.reading, pixels=pixels, grid=(2, 2)))
    for view, layout in (("model", [(2, 1, 0), (2, 1, 1)]), ("rollout", [(1, 2, 0), (1, 2, 1)])):
        draw(scene, "encoder", view, format_="png", scale="global")
        panels = figures[-1].axes[:2]
        assert [layout_of(axes) for axes in panels] == layout
        image, patches = panels[1].images
        assert tuple(patches.get_extent()) == tuple(image.get_extent()) == (0, 8, 8, 0) and patches.get_alpha() == 0.6
        assert view == "rollout" or patches.get_array().tolist() == [[0.25, 0.5], [0.75, 1.0]]
    left = figures[-1].axes[0]
    assert len(left.images) == 1 and figures[-1].get_size_inches().tolist() == [6.4, 3.6]


def test_the_summary_draws_a_measure_of_every_head_in_a_panel(figures: list[Any]) -> None:
    attention = random_attention(3, 2, 6)
    draw(scene_of(attention), "encoder", "summary", format_="png", scale="sqrt")
    rows, _ = summarize(attention)
    panels = {axes.get_title(): axes for axes in figures[0].axes if axes.get_title()}
    assert [layout_of(axes) for axes in panels.values()] == [(2, 4, n) for n in range(7)]
    for title, name in (("entropy / ln(visible)", "entropy"), ("mean distance", "distance"), ("itself", "itself")):
        image = panels[title].images[0]
        assert image.get_array().ravel().tolist() == [getattr(row, name) for row in rows]
        assert image.norm.vmin == 0 and (image.norm.vmax == 1 or name == "distance")
        assert words(panels[title].get_xticklabels()) == ["0", "1"] and len(panels[title].get_yticks()) == 3
    assert tuple(figures[0].get_size_inches()) == pytest.approx((4 * 2.9, 2 * (1.1 + 0.22 * 4) + 0.5))


@pytest.mark.parametrize(("count", "layout"), [(1, (1, 1)), (2, (1, 2)), (3, (1, 3)), (4, (2, 2)), (5, (3, 2))])
def test_plots_stand_side_by_side_and_share_a_bar_with_an_equal_neighbour(
    count: int, layout: tuple[int, int], figures: list[Any]
) -> None:
    lines = [Line(str(n), NUMBERS, NUMBERS + n) for n in range(5)]
    plot = LinePlot("x", "y", lines, ramp=Ramp("viridis", 0, 4, "token"), title="t")
    draw_plots([plot] * count, "png", heading="h")
    panels = [axes for axes in figures[0].axes if axes.get_title()]
    assert [layout_of(axes) for axes in panels] == [(*layout, n) for n in range(count)]
    assert len(figures[0].axes) - count == math.ceil(count / layout[1]), "a bar at the end of each row"
    assert tuple(figures[0].get_size_inches()) == pytest.approx((5.4 * layout[1], 3.9 * layout[0] + 0.35))
    found = [to_hex(colour) for colour in panels[0].collections[0].get_colors()]
    assert found == [to_hex(np.array(colour_at("viridis", n / 4)) / 255) for n in range(5)]


def test_a_heat_map_counts_rows_and_columns_from_their_first_number_and_names_words(figures: list[Any]) -> None:
    values = np.arange(300.0).reshape(3, 100)
    names = [f"w{n}" if n % 2 else "" for n in range(100)]
    one = Heat(values, range(-1, 2), range(5, 105), "r", "c", "viridis", 0.0, None, "angle", title="t")
    draw_plots([one, replace(one, columns=names, colours="RdBu_r", minimum=-9.0)], "png", heading="")
    first, second = (axes for axes in figures[0].axes if axes.get_title())
    assert tuple(first.images[0].get_extent()) == (4.5, 104.5, 1.5, -1.5)
    assert tuple(second.images[0].get_extent()) == (-0.5, 99.5, 1.5, -1.5)
    assert (second.images[0].norm.vmin, second.images[0].norm.vmax) == (-9, 299)
    assert words(second.get_xticklabels()) == names[1::6], "at most 24 of the 50 words"


def test_lines_differ_in_colour_then_in_dashes_and_axes_say_plain_numbers(figures: list[Any]) -> None:
    lines = [Line(str(n), NUMBERS + 1, 10.0**NUMBERS) for n in range(8)]
    draw_plots([LinePlot("x", "y", lines, log_y=True, points=True)], "png", heading="")
    [axes] = figures[0].axes
    assert [line.get_color().upper() for line in axes.lines] == [*PALETTE, *PALETTE[:2]]
    assert (
        axes.lines[0].get_linestyle() == "-" and axes.lines[6].get_linestyle() == "--" != axes.lines[5].get_linestyle()
    )
    assert axes.lines[3].get_marker() == "o" and words(axes.get_legend().get_texts()) == [str(n) for n in range(8)]
    assert axes.yaxis.get_major_formatter()(1000.0, 0) == "1,000" and axes.get_yscale() == "log" != axes.get_xscale()


def test_very_many_lines_are_an_image_whose_pixels_stand_at_their_values(figures: list[Any]) -> None:
    lines = [Line(str(n), np.array([0.0, 10.0]), np.full(2, n / 100)) for n in range(201)]
    draw_plots([LinePlot("x", "y", lines, ramp=Ramp("viridis", 0, 200, "n"))], "png", heading="")
    [image] = figures[0].axes[0].images
    assert tuple(image.get_extent()) == pytest.approx((-0.1, 10.1, -0.02, 2.02))
    pixels = np.asarray(image.get_array())
    assert pixels.shape == (480, 640, 4) and (pixels[:, [0, -1], 3] == 0).all(), "a margin at both sides"
    for value, share in ((0.0, 0.0), (1.0, 0.5), (2.0, 1.0)):
        row = round((2.02 - value) / 2.04 * 479)
        near = pixels[max(row - 2, 0) : row + 3, 320, :3].astype(int)
        assert np.abs(near - np.array(colour_at("viridis", share))).sum(axis=1).min() < 40


def test_panels_of_curves_mark_short_series_and_draw_what_was_logged_faintly(
    tmp_path: Path, figures: list[Any]
) -> None:
    records = [train_record(step, 4 - step / 50, grad_norm=1.5) for step in range(1, 101)]
    runs = read_runs([write_run(tmp_path / "a", [*records, valid_record(50, 3.1, 0.25), valid_record(90, 2.5, 0.5)])])
    panels = make_panels(runs, choose_metrics(runs, ("loss", "accuracy", "lr")), x="step", smooth=0.9)
    draw_panels(panels, "png", title="", x_label="step")
    assert [layout_of(axes) for axes in figures[0].axes] == [(2, 2, n) for n in range(3)]
    behind, smoothed, valid = figures[0].axes[0].lines
    assert behind.get_alpha() == 0.25 and np.array_equal(behind.get_ydata(), runs[0].tracks["train"].values["loss"])
    assert [line.get_marker() for line in (smoothed, valid)] == ["None", "s"]
    assert [line.get_color() for line in (behind, smoothed, valid)] == [PALETTE[0], PALETTE[0], PALETTE[1]]
    for axes in figures[0].axes:
        low, high = axes.get_xlim()
        assert list(axes.get_xticks()) == ticks(low, high, log=False, most=7)


# --- terminal --------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(-9, 9)), min_size=2, max_size=9, unique_by=lambda p: p[0]))
def test_every_logged_value_has_its_dot_and_every_tick_its_place(points: list[tuple[int, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        runs = read_runs([write_run(Path(folder, "a"), [train_record(step, float(y)) for step, y in sorted(points)])])
    [panel] = make_panels(runs, choose_metrics(runs, ("train.loss",)), x="step", smooth=0)
    lines = draw_curves([panel], title="", x_label="step", width=60, colour="none").splitlines()
    rows = lines[1:15]
    margin = max(row.find("┤") for row in rows)
    cells = [row[margin + 1 :].ljust(60 - margin - 1) for row in rows]
    xs, ys = [x for x, _ in points], [y for _, y in points]
    low, high = (min(ys), max(ys)) if len(set(ys)) > 1 else (ys[0] - abs(ys[0] or 1) / 10, ys[0] + abs(ys[0] or 1) / 10)
    wide = 60 - margin - 1
    bits = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
    for x, y in points:
        column = round((x - min(xs)) / (max(xs) - min(xs)) * (2 * wide - 1))
        row = round((1 - (y - low) / (high - low)) * 55)
        assert (ord(cells[row // 4][column // 2]) - 0x2800) & bits[row % 4][column % 2], (x, y)
    for row, line in enumerate(rows):
        if line[margin] == "┤":
            place = 14 * (1 - (float(line[:margin].replace(",", "")) - low) / (high - low))
            assert min(abs(place - edge) for edge in (row, row + 1)) < 1.01
    frame, names = lines[15], lines[16]
    places = [at for at, sign in enumerate(frame) if sign == "┬"]
    for place, name in zip(places, names.split(), strict=True):
        assert abs(names.index(name, max(place - 3, 0)) + len(name) // 2 - place) <= 2
        assert place - margin - 1 == round((float(name) - min(xs)) / (max(xs) - min(xs)) * (wide - 1))


@pytest.mark.parametrize(("colour", "lines"), [("none", 20), ("256", 20)])
def test_a_large_map_is_shown_by_the_means_of_its_blocks(colour: str, lines: int) -> None:
    rows = np.repeat(np.arange(40.0), 3)[:, None] * np.ones(120)
    plot = counted_heat(rows, "r", "c", "viridis", 0.0, 40.0, title="t")
    drawn = draw_plot(plot, width=64, colour=colour).splitlines()[1:-2]  # type: ignore[arg-type]
    assert len(drawn) == lines, "40 cells: two a line in colour, and without colour half as many"
    assert [line[:3].strip() for line in drawn[:5]] == ["0", "", "12", "", "24"]
    if colour == "none":
        shades = " .:-=+*#%@"
        assert [line[4] for line in drawn] == [shades[int((2 * n + 0.5) / 4)] for n in range(20)]
        assert {len(line) for line in drawn} == {64}


def test_lines_in_a_frame() -> None:
    lines = [Line("up", np.arange(11.0), np.arange(11.0)), Line("flat", np.arange(11.0), np.full(11, 5.0))]
    text = draw_plot(LinePlot("place", "size", lines, title="t", caption="c"), width=40, colour="none").splitlines()
    assert text[1] == "size" and text[2].startswith("10 ┤") and text[15].startswith(" 0 ┤A") and len(text) == 21
    assert text[2].rstrip().endswith("A") and text[16].startswith("   └")
    assert [row for row, line in enumerate(text[2:16]) if "B" in line] == [7], "half of the way up"
    assert text[17].split()[0] == "0" and text[18].strip() == "place" and text[19] == "A up   B flat"
    apart = draw_plot(LinePlot("x", "y", lines[:1], joined=False), width=40, colour="none")
    assert sum("\u2801" <= sign <= "\u28ff" for sign in apart) == 11, "a dot for each value and none between"


def test_a_matrix_of_attention_in_characters() -> None:
    weights = np.array([[1.0, 0, 0], [0.25, 0.75, 0], [0.5, 0.125, 0.375]])
    scene = scene_of(attention_of(weights[None, None], [" a", "bc", "[S]"], kind="decoder"))
    text = as_text(scene, "decoder", "head", scale="global", top_k=2, width=60, colour="none").splitlines()
    assert text[2:9] == [
        "layer 0, head 0",
        " ␣a @//",
        " bc :#/",
        "[S] +.-",
        "    key ␣a … [S]; rows: query",
        "    0   ..::--==++**##%%@@ 1",
        "1 on the scale: 1; largest 1.000; /: cannot be seen",
    ]
    assert text[10:13] == ["␣a".rjust(14) + "  ␣a 1.000", "bc".rjust(14) + "  bc 0.750  ␣a 0.250",
                           "[S]".rjust(14) + "  ␣a 0.500  [S] 0.375"]  # fmt: skip
    signed = scene_of(signed_attention([[0.2, -0.6], [0.1, 0.3]], ["a", "b"]))
    text = as_text(signed, "encoder", "head", scale="row", top_k=1, width=60, colour="none").splitlines()
    assert text[3:5] == ["a -@", "b -@"] and "b -0.600" in text[9]
    assert text[7] == "1 on the scale: its row's largest; largest 0.300; sizes without their signs"
    brief = as_text(scene, "decoder", "summary", scale="row", top_k=1, width=60, colour="none").splitlines()
    assert brief[2].split()[:4] == ["layer", "head", "entropy", "distance"] and brief[3].split()[:2] == ["0", "0"]
    mean = as_text(scene.of_means(), "decoder", "summary", scale="row", top_k=1, width=60, colour="none").splitlines()
    assert mean[3].split()[:2] == ["0", "mean"]
