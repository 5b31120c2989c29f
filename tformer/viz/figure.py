"""Matplotlib back end: style, colour maps and saving; plots and curves as PNG or SVG.

Equal plots give equal bytes: no date, no random ids, nothing from a user's own matplotlib settings. Heat maps are
images (a mesh would be fifty times larger), and so are very many lines inside an SVG; text stays text.
"""

from __future__ import annotations

import io
import math
import textwrap
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection
from matplotlib.colors import Colormap, ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from PIL import Image, ImageDraw

from tformer.support.errors import visible
from tformer.viz.plot.series import MetricPanel, label_of
from tformer.viz.plots import PALETTE, Colour, Heat, LinePlot, Plot, Ramp, colour_table, plain, ticks

DASHES: tuple[Any, ...] = ("-", (0, (6, 2)), (0, (2, 1.5)), (0, (7, 2, 1.5, 2)))
# Without a creation date; the name and version of matplotlib stay.
METADATA: dict[str, dict[str, Any]] = {"svg": {"Date": None}, "png": {}}
SETTINGS: dict[str, Any] = {
    "svg.hashsalt": "tformer",
    "text.parse_math": False,  # a `$` in a name is a `$`
    "font.family": ["DejaVu Sans"],  # part of matplotlib
}

# --- style and saving ------------------------------------------------------------------------------------------------


def style(**settings: Any) -> AbstractContextManager[None]:
    """Context of matplotlib's default settings with tformer's and the given ones; `__` in a name stands for a dot."""
    defaults: dict[Any, Any] = {key: value for key, value in matplotlib.rcParamsDefault.items() if key != "backend"}
    own = {name.replace("__", "."): value for name, value in settings.items()}
    return matplotlib.rc_context(defaults | SETTINGS | own)


def figure_bytes(figure: Figure, format_: str, **options: Any) -> bytes:
    """The figure as a file of this format; `options` go to `Figure.savefig`."""
    stream = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # drawn as a box
        warnings.filterwarnings("ignore", message="constrained_layout not applied")
        figure.savefig(stream, format=format_, metadata=METADATA[format_], **options)
    return stream.getvalue()


def colour_map(name: str) -> Colormap:
    """A colour map of `plots.COLOUR_MAPS`; NaN is transparent."""
    table = np.frombuffer(colour_table(name), np.uint8).reshape(256, 3) / 255
    return ListedColormap(table, name=name).with_extremes(bad=(0, 0, 0, 0))


def to_hex(colour: Colour) -> str:
    return "#{:02x}{:02x}{:02x}".format(*colour)


def finish_axes(axes: Any) -> None:
    """A light grid behind the data; no frame at the top and at the right."""
    axes.grid(True, color="#e0e0e0", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


# --- plots -----------------------------------------------------------------------------------------------------------

PLOT_SIZE = (5.4, 3.9)  # inches
DOTS_PER_INCH = 110
PLOT_STYLE: dict[str, Any] = {"svg__fonttype": "none", "font__size": 9}  # text as text: small, searchable files
COMPRESSION: dict[str, Any] = {"svg": {}, "png": {"pil_kwargs": {"compress_level": 4}}}  # level 6 takes twice as long
MANY_LINES = 100  # more lines become an image, also in an SVG
MANY_MARKS = 2000  # that are not joined: more are smaller, and in an SVG an image
PAINTED = (1280, 960)  # pixels of that image while drawing; halved afterwards, for smooth edges
LETTERS_PER_INCH = 15.2  # of a caption
MAX_NAMES = 24  # words along an axis
CELL_POINTS = 400  # size of letters times their number in a row of cells
MAX_LETTERS = 60  # of all words along the lower axis, of longer ones each is upright


def draw_plots(plots: Sequence[Plot], format_: Literal["png", "svg"], *, heading: str) -> bytes:
    """All plots in one picture, each with its title, and their captions below.

    Args:
        plots: at least one; up to two stand side by side.
        heading: a line above all, for example the sizes.
    """
    columns = 1 if len(plots) == 1 else 3 if len(plots) == 3 else 2
    rows = math.ceil(len(plots) / columns)
    sentences = dict.fromkeys(visible(plot.caption) for plot in plots)
    words = "\n".join(textwrap.fill(sentence, int(LETTERS_PER_INCH * PLOT_SIZE[0] * columns)) for sentence in sentences)
    width, below = PLOT_SIZE[0] * columns, 0.16 * (words.count("\n") + 2) if words else 0.0
    height = PLOT_SIZE[1] * rows + 0.35 + below
    with style(**PLOT_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # drawn as a box
        layout = ConstrainedLayoutEngine(rect=(0, below / height, 1, 1 - (below + 0.3) / height))
        figure = Figure(figsize=(width, height), dpi=DOTS_PER_INCH, layout=layout)
        figure.text(0.5, 1 - 0.12 / height, visible(heading), ha="center", va="top", fontsize=10.5, weight="bold")
        if words:
            figure.text(0.02, (below - 0.09) / height, words, va="top", ha="left", fontsize=8.5, color="#444444")
        for number, plot in enumerate(plots):
            axes = figure.add_subplot(rows, columns, number + 1)
            axes.set_title(visible(plot.title), fontsize=9.5)
            if isinstance(plot, Heat):
                _heat(figure, axes, plot)
            else:
                beside = plots[number + 1] if (number + 1) % columns and number + 1 < len(plots) else None
                _lines(figure, axes, plot, bar=not (isinstance(beside, LinePlot) and beside.ramp == plot.ramp))
        layout.execute(figure)
        figure.set_layout_engine(None)  # a second run would draw everything again
        for axes in figure.axes:  # the last digits of the solver's positions differ from run to run
            axes.set_position(np.round(axes.get_position(original=True).bounds, 6).tolist(), which="original")
        return figure_bytes(figure, format_, **COMPRESSION[format_])


def _heat(figure: Any, axes: Any, plot: Heat) -> None:
    low, high = plot.limits
    rows, columns = plot.values.shape
    # The axes show the numbers of rows and columns.
    left, top = (int(names[0]) if _counts(names) else 0 for names in (plot.columns, plot.rows))
    colours = colour_map(plot.colours)
    image = axes.imshow(
        plot.values,
        cmap=colours,
        vmin=low,
        vmax=high,
        aspect="equal" if 0.6 < columns / rows < 1.7 else "auto",
        interpolation="nearest",
        extent=(left - 0.5, left + columns - 0.5, top + rows - 0.5, top - 0.5),
    )
    for axis, names, count in ((axes.xaxis, plot.columns, columns), (axes.yaxis, plot.rows, rows)):
        if _counts(names):
            axis.get_major_locator().set_params(integer=True)
        else:
            shown = [at for at in range(count) if str(names[at])]
            shown = shown[:: math.ceil(len(shown) / MAX_NAMES) or 1]
            texts = [visible(str(names[at])) for at in shown]
            upright = axis is axes.xaxis and sum(map(len, texts)) > MAX_LETTERS
            axis.set_ticks(shown, texts, rotation=90 if upright else 0)
    if plot.shows_numbers:
        longest = max((len(word) for words in plot.words or () for word in words), default=1)
        size = max(min(9.0, CELL_POINTS / columns / longest), 4.0)
        for (row, column), value in np.ndenumerate(plot.values):
            empty = not np.isfinite(value)  # on the white of the axes
            if empty and plot.words is None:
                continue
            light = empty or np.dot(colours((value - low) / ((high - low) or 1))[:3], (0.3, 0.6, 0.1)) > 0.5
            ink = "black" if light else "white"
            text = plain(value) if plot.words is None else visible(plot.words[row][column])
            axes.text(left + column, top + row, text, ha="center", va="center", color=ink, fontsize=size)
    axes.set_xlabel(plot.column_label)
    axes.set_ylabel(plot.row_label)
    axes.set_facecolor("white")
    bar = figure.colorbar(image, ax=axes, shrink=0.85, aspect=30)
    bar.set_label(plot.value_label)
    bar.outline.set_visible(False)


def _counts(names: Sequence[Any]) -> bool:
    return isinstance(names, range) or all(isinstance(name, int) for name in names)


def _lines(figure: Any, axes: Any, plot: LinePlot, *, bar: bool) -> None:
    """Lines of one plot; `bar`: draw a colour bar (the plot to the right may have the same one)."""
    if plot.ramp is not None:
        _ramped(figure, axes, plot, plot.ramp, bar=bar)
    else:
        for number, line in enumerate(plot.lines):
            style = DASHES[number // len(PALETTE) % len(DASHES)] if plot.joined else ""
            marker = "o" if plot.points else None
            many = not plot.joined and len(line.x) > MANY_MARKS
            axes.errorbar(
                line.x, line.y, line.spread, color=to_hex(plot.colour(number)), linestyle=style, linewidth=1.6,
                marker=marker, markersize=1 if many else 3, capsize=2, elinewidth=1,
                label=visible(line.label), rasterized=many,
            )  # fmt: skip
            for word, x, y in zip(line.names, line.x, line.y, strict=False):
                axes.annotate(visible(word), (x, y), (3, 3), textcoords="offset points", fontsize=7)
    for name, axis, logarithmic in (("x", axes.xaxis, plot.log_x), ("y", axes.yaxis, plot.log_y)):
        if logarithmic:  # 1,000 and 0.01 instead of powers of ten
            getattr(axes, f"set_{name}scale")("log")
            low, high = getattr(axes, f"get_{name}lim")()
            axis.set_ticks(_log_ticks(low, high, {at for line in plot.lines for at in getattr(line, name).tolist()}))
            axis.set_ticks([], minor=True)
            axis.set_major_formatter(lambda value, _: f"{value:,.6g}")
    if plot.square:
        axes.set_aspect("equal")
    if plot.unit:
        axes.set(xlim=(0, 1), ylim=(0, 1.02))
    axes.set_xlabel(plot.x_label)
    axes.set_ylabel(plot.y_label)
    finish_axes(axes)
    axes.margins(x=0.01 if plot.joined else 0.06)
    if plot.ramp is None and len(plot.lines) > 1:
        axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0), handlelength=2.8)


def _ramped(figure: Any, axes: Any, plot: LinePlot, ramp: Ramp, *, bar: bool) -> None:
    """Draw many lines as one collection, very many as an image; one by one they take seconds."""
    pieces = [np.column_stack((line.x, line.y)) for line in plot.lines]
    colours = [to_hex(plot.colour(number)) for number in range(len(pieces))]
    if len(pieces) > MANY_LINES and not (plot.log_x or plot.log_y):
        image, extent = _painted(pieces, colours)
        axes.imshow(image, extent=extent, aspect="auto", interpolation="antialiased", zorder=2)
        axes.set_ylim(extent[2] - 0.03 * (extent[3] - extent[2]), extent[3] + 0.03 * (extent[3] - extent[2]))
    else:
        axes.add_collection(LineCollection(pieces, colors=colours, linewidths=1.6 if plot.points else 0.7))
        axes.autoscale_view()
    if plot.points:
        for piece, colour in zip(pieces, colours, strict=True):
            axes.plot(piece[:, 0], piece[:, 1], "o", color=colour, markersize=3)
    if not bar:
        return
    scale = ScalarMappable(Normalize(ramp.low, ramp.high), colour_map(ramp.colours))
    figure.colorbar(scale, ax=axes, shrink=0.85, aspect=30).set_label(ramp.label)


def _painted(pieces: Sequence[Any], colours: Sequence[str]) -> tuple[Any, tuple[float, float, float, float]]:
    """A transparent image of lines, and its left, right, bottom and top. A gap (NaN) ends a stroke."""
    points = np.concatenate(pieces)
    low, high = np.nanmin(points, axis=0), np.nanmax(points, axis=0)
    margin = np.where(high > low, 0.01 * (high - low), 0.5)  # a single column: its lines are points
    low, high = low - margin, high + margin
    image = Image.new("RGBA", PAINTED)
    draw = ImageDraw.Draw(image)
    scale = (np.array(PAINTED) - 1) / (high - low)
    for piece, colour in zip(pieces, colours, strict=True):
        place = (piece - low) * scale
        place[:, 1] = PAINTED[1] - 1 - place[:, 1]
        ends = np.flatnonzero(np.isnan(place).any(axis=1))
        for stroke in np.split(place, ends):
            draw.line(stroke[~np.isnan(stroke).any(axis=1)].ravel().tolist(), fill=colour)
    # Premultiplied, so that the transparent surroundings do not darken the edges of lines.
    return np.asarray(image.convert("RGBa").reduce(2).convert("RGBA")), (low[0], high[0], low[1], high[1])


# --- panels of curves ------------------------------------------------------------------------------------------------

SINGLE_PANEL, PANEL = (8.0, 4.4), (5.4, 3.4)  # inches
MARKS = ("o", "s", "^", "D", "v")
FAINT = 0.25
MOST_POWERS = 12  # of two along an axis
MANY_POINTS = 20_000  # of a panel; with more, an SVG contains its lines as an image


def draw_panels(
    panels: Sequence[MetricPanel],
    format_: Literal["png", "svg"],
    *,
    title: str,
    x_label: str,
    log_x: bool = False,
    log_y: bool = False,
) -> bytes:
    """Curves as one picture: a panel for each metric over one legend; series differ in dashes and marks too.

    Args:
        panels: at least one.
        title: above all of them; may be empty.
    """
    columns = 1 if len(panels) == 1 else 2
    rows = math.ceil(len(panels) / columns)
    width, height = SINGLE_PANEL if columns == 1 else (columns * PANEL[0], rows * PANEL[1])
    entries: dict[str, Any] = {}
    with style(**PLOT_STYLE):
        figure = Figure(figsize=(width, height), dpi=DOTS_PER_INCH, layout="constrained")
        figure.suptitle("\n".join(textwrap.wrap(visible(title), int(12 * width))), fontsize=11)
        for number, panel in enumerate(panels):
            axes = figure.add_subplot(rows, columns, number + 1)
            _panel(axes, panel, entries, log=(log_x, log_y))
            axes.set_xlabel(x_label)
            axes.set_ylabel(visible(label_of(panel.metric)))
        _legend(figure, entries, width, height)
        return figure_bytes(figure, format_, **COMPRESSION[format_])


def _panel(axes: Any, panel: MetricPanel, entries: dict[str, Any], *, log: tuple[bool, bool]) -> None:
    rasterized = sum(len(series.x) for series in panel.series) > MANY_POINTS
    for series in panel.series:
        colour = PALETTE[series.colour % len(PALETTE)]
        if series.raw is not None:
            behind = _shown(series.raw, log[1])
            axes.plot(series.x, behind, color=colour, alpha=FAINT, linewidth=1, rasterized=rasterized)
        (line,) = axes.plot(
            series.x,
            _shown(series.y, log[1]),
            color=colour,
            linestyle=DASHES[series.dash % len(DASHES)],
            linewidth=1.6,
            marker=MARKS[series.colour % len(MARKS)] if series.marked else None,
            markersize=3.5,
            rasterized=rasterized,
        )
        if series.spread is not None:
            low, high = series.y - series.spread, series.y + series.spread
            if log[1]:  # a band that reaches 0 would have no lower end
                low = np.maximum(low, series.y / 10)
            axes.fill_between(series.x, _shown(low, log[1]), high, color=colour, alpha=0.15, linewidth=0)
        entries.setdefault(series.label, line)
    for axis, logarithmic, set_scale in zip("xy", log, (axes.set_xscale, axes.set_yscale), strict=True):
        values = np.concatenate([getattr(line, axis) for line in panel.series])
        values = values[np.isfinite(values)]
        positive = set(values[values > 0].tolist()) if logarithmic else set()
        if positive:  # without such values a logarithmic axis has no scale
            set_scale("log", nonpositive="mask")
        _set_ticks(axes, axis, positive)
    finish_axes(axes)


def _shown(values: Any, log: bool) -> Any:
    return np.where(values > 0, values, np.nan) if log else values


def _set_ticks(axes: Any, axis: str, positive: set[float]) -> None:
    """Round numbers along an axis. positive: the values of a logarithmic one: powers of two are its ticks."""
    axes.margins(x=0.02, y=0.05)
    low, high = axes.get_xlim() if axis == "x" else axes.get_ylim()
    places = _log_ticks(low, high, positive) if positive else ticks(low, high, log=False, most=7)
    set_ticks = axes.set_xticks if axis == "x" else axes.set_yticks
    set_ticks(places, [plain(place) for place in places])
    set_ticks([], minor=True)
    (axes.set_xlim if axis == "x" else axes.set_ylim)(low, high)


def _log_ticks(low: float, high: float, values: set[float]) -> list[float]:
    """The values themselves where they are a few powers of two, else round numbers."""
    if 1 < len(values) <= MOST_POWERS and all(value > 0 and math.log2(value).is_integer() for value in values):
        return sorted(values)
    return ticks(low, high, log=True, most=7)


def _legend(figure: Any, entries: dict[str, Any], width: float, height: float) -> None:
    """Below all panels, in as many columns as the names allow; the picture grows by its rows."""
    if len(entries) < 2:
        return
    names = ["\n".join(textwrap.wrap(visible(name), 60)) or " " for name in entries]
    longest = max(len(line) for name in names for line in name.split("\n"))
    columns = max(1, min(len(names), int(width * 72 / (longest * 5.2 + 46))))
    rows = math.ceil(len(names) / columns) * max(name.count("\n") + 1 for name in names)
    figure.set_figheight(height + 0.19 * rows + 0.1)
    legend = figure.legend(
        list(entries.values()),
        list(map(str, range(len(names)))),
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        handlelength=3.2,
        fontsize=9,
    )
    for text, name in zip(legend.get_texts(), names, strict=True):
        text.set_text(name)  # matplotlib would hide a name that begins with an underscore
