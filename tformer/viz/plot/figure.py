"""Curves as one picture, PNG or SVG: a panel for each metric over one legend. Equal curves give equal bytes.

Colours are those of the pages; dashes and marks differ too, so that the picture also reads without colour.
"""

from __future__ import annotations

import io
import math
import textwrap
import warnings
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from tformer.errors import visible
from tformer.viz.colours import PALETTE
from tformer.viz.figure import DASHES, DOTS_PER_INCH, SAVED, SETTINGS
from tformer.viz.plot.series import Panel, Series, label_of
from tformer.viz.plot.ticks import plain, ticks

ONE, SEVERAL = (8.0, 4.4), (5.4, 3.4)  # inches of a panel
MARKS = ("o", "s", "^", "D", "v")
FAINT = 0.25
MANY_POINTS = 20_000  # of a panel: beyond, an SVG holds its lines as an image


def draw_figure(
    panels: Sequence[Panel],
    kind: Literal["png", "svg"],
    *,
    title: str,
    x_label: str,
    log_x: bool = False,
    log_y: bool = False,
) -> bytes:
    """The picture's bytes.

    Args:
        panels: at least one.
        title: above all of them; may be empty.
    """
    import matplotlib
    from matplotlib.figure import Figure

    defaults: dict[Any, Any] = {key: value for key, value in matplotlib.rcParamsDefault.items() if key != "backend"}
    columns = 1 if len(panels) == 1 else 2
    rows = math.ceil(len(panels) / columns)
    width, height = (columns * ONE[0], ONE[1]) if columns == 1 else (columns * SEVERAL[0], rows * SEVERAL[1])
    entries: dict[str, Any] = {}
    with matplotlib.rc_context(defaults | SETTINGS):
        figure = Figure(figsize=(width, height), dpi=DOTS_PER_INCH, layout="constrained")
        figure.suptitle("\n".join(textwrap.wrap(visible(title), int(12 * width))), fontsize=11)
        for number, panel in enumerate(panels):
            axes = figure.add_subplot(rows, columns, number + 1)
            _panel(axes, panel, entries, log=(log_x, log_y))
            axes.set_xlabel(x_label)
            axes.set_ylabel(visible(label_of(panel.metric)))
        _legend(figure, entries, width, height)
        stream = io.BytesIO()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph .* missing")  # drawn as a box
            figure.savefig(stream, format=kind, **SAVED[kind])
    return stream.getvalue()


def _panel(axes: Any, panel: Panel, entries: dict[str, Any], *, log: tuple[bool, bool]) -> None:
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
        entries.setdefault(series.label, line)
    for axis, logarithmic, set_scale in zip("xy", log, (axes.set_xscale, axes.set_yscale), strict=True):
        positive = logarithmic and bool((_finite(panel.series, axis) > 0).any())  # else there is no scale for it
        if positive:
            set_scale("log", nonpositive="mask")
        _set_ticks(axes, axis, log=positive)
    axes.grid(True, color="#e0e0e0", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _shown(values: Any, log: bool) -> Any:
    return np.where(values > 0, values, np.nan) if log else values


def _finite(series: Sequence[Series], axis: str) -> Any:
    values = np.concatenate([getattr(line, axis) for line in series])
    return values[np.isfinite(values)]


def _set_ticks(axes: Any, axis: str, *, log: bool) -> None:
    axes.margins(x=0.02, y=0.05)
    low, high = axes.get_xlim() if axis == "x" else axes.get_ylim()
    places = ticks(low, high, log=log, most=7)
    set_ticks = axes.set_xticks if axis == "x" else axes.set_yticks
    set_ticks(places, [plain(place) for place in places])
    set_ticks([], minor=True)
    (axes.set_xlim if axis == "x" else axes.set_ylim)(low, high)


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
        [str(number) for number in range(len(names))],  # a name that begins with _ would be hidden
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        handlelength=3.2,
        fontsize=9,
    )
    for text, name in zip(legend.get_texts(), names, strict=True):
        text.set_text(name)
