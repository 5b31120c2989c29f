"""Curves in one picture, as SVG, PNG or PDF: a metric against the step, a time against the length.

Colours are those of Okabe and Ito (https://jfly.uni-koeln.de/color/), which remain distinguishable with any common
colour blindness; dashes and markers differ as well, so that the picture also reads without colour.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, Locator, LogLocator, MaxNLocator, NullLocator

from tformer.support.errors import InputError, visible
from tformer.support.files import make_folders, write_file
from tformer.viz.figure import DASHES, METADATA, add_legend, figure_bytes, finish_axes, style
from tformer.viz.plots import PALETTE

COLOURS = (*PALETTE, "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")  # 7, 4 and 9 share no factor: 252 combinations before a repeat
WIDTH, HEIGHT = 10.0, 6.0  # inches: 1000 x 600 pixels
DOTS_PER_INCH = 100
MAX_INSIDE = 4  # entries of a legend placed among the curves
LABEL_WIDTH = 30  # characters of a line in the legend
MARKED_POINTS = 40  # curves with at most this number of points have a marker at each


@dataclass(frozen=True)
class Curve:
    """One line of the picture.

    Attributes:
        label: its name in the legend; curves of equal label and group share one entry.
        points: (x, y) in the order of drawing; values that are not finite, or not positive on a logarithmic axis, are
            omitted.
        group: curves of one group share colour and marker, and differ in dashes; None: a separate group.
        spread: half the width of a band around each point's y, for example a standard deviation.
    """

    label: str
    points: Sequence[tuple[float, float]]
    group: int | None = None
    spread: Sequence[float] | None = None

    def __post_init__(self) -> None:
        if self.spread is not None and len(self.spread) != len(self.points):
            raise ValueError(f"{self.label}: {len(self.points)} points, {len(self.spread)} values of spread")


def picture_format(path: str | Path) -> str:
    """svg, png or pdf, by the suffix of a file's name; call it before long work begins.

    Raises:
        InputError: any other suffix.
    """
    suffix = Path(path).suffix.lower().removeprefix(".")
    if suffix not in METADATA:
        found = f"has the suffix .{suffix}" if suffix else "has no suffix"
        known = ", ".join(f".{known}" for known in METADATA)
        raise InputError(f"{path} {found}, expected one of {known}", hint=f"name it {Path(path).with_suffix('.svg')}")
    return suffix


def draw_curves(
    series: Sequence[Curve],
    path: str | Path,
    *,
    title: str,
    y_label: str,
    x_label: str,
    log_x: bool = False,
    log_y: bool = False,
) -> None:
    """Draw curves into a new or replaced file, in the format of its suffix (see `picture_format`).

    Raises:
        InputError: an unknown suffix, or no curve has a point that can be shown.
        StorageError: the file cannot be written; an old one is untouched.
    """
    kind = picture_format(path)
    curves = [_shown(curve, log_x=log_x, log_y=log_y) for curve in series]
    if not any(curve.points for curve in curves):
        raise InputError(f"nothing to draw into {path}: {_why_empty(series)}")
    with style(axes__unicode_minus=False, font__size=11):
        picture = _render(curves, kind, (title, x_label, y_label), (log_x, log_y))
    make_folders(Path(path).parent)
    write_file(Path(path), [picture])


def _shown(curve: Curve, *, log_x: bool, log_y: bool) -> Curve:
    """The curve without the points that its axes cannot show."""

    def showable(point: tuple[float, float]) -> bool:
        (x, y) = point
        return math.isfinite(x) and math.isfinite(y) and (x > 0 or not log_x) and (y > 0 or not log_y)

    kept = [index for index, point in enumerate(curve.points) if showable(point)]
    spread = None if curve.spread is None else [curve.spread[index] for index in kept]
    return Curve(visible(curve.label), [curve.points[index] for index in kept], curve.group, spread)


def _why_empty(series: Sequence[Curve]) -> str:
    count = sum(len(curve.points) for curve in series)
    return f"none of its {count} points can be shown on these axes" if count else "there are no points"


def _render(curves: Sequence[Curve], kind: str, words: tuple[str, str, str], logarithmic: tuple[bool, bool]) -> bytes:
    title, x_label, y_label = map(visible, words)
    figure = Figure(figsize=(WIDTH, HEIGHT), dpi=DOTS_PER_INCH, layout="constrained")
    axes = figure.add_subplot()
    entries = _plot(axes, curves, log_y=logarithmic[1])
    axes.set_title("\n".join(textwrap.wrap(title, 90)), fontsize=13, pad=10)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    points = [point for curve in curves for point in curve.points]
    for side, axis in enumerate((axes.xaxis, axes.yaxis)):
        if logarithmic[side]:
            (axes.set_yscale if side else axes.set_xscale)("log")
            axis.set_major_locator(_log_locator([point[side] for point in points]))
            axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _: _plain_number(value)))
    finish_axes(axes, grid="#d9d9d9", width=0.7)
    _add_legend(figure, axes, entries)
    return figure_bytes(figure, kind, dpi=DOTS_PER_INCH)


def _plot(axes: Axes, curves: Sequence[Curve], *, log_y: bool) -> list[tuple[str, Line2D]]:
    """Draw all curves; returns the legend's entries, one for each label of each group."""
    groups: dict[object, int] = {}
    members: dict[int, int] = {}
    entries: dict[tuple[str, int], Line2D] = {}
    for number, curve in enumerate(curves):
        group = groups.setdefault(("own", number) if curve.group is None else curve.group, len(groups))
        member = members[group] = members.get(group, -1) + 1
        colour, marker = COLOURS[group % len(COLOURS)], MARKERS[group % len(MARKERS)]
        x, y = [point[0] for point in curve.points], [point[1] for point in curve.points]
        (line,) = axes.plot(
            x,
            y,
            color=colour,
            linestyle=DASHES[(group + member) % len(DASHES)],
            linewidth=1.8,
            marker=marker,
            markersize=5,
            # On long curves a marker every tenth of the picture, at a different offset for each group.
            markevery=None if len(x) <= MARKED_POINTS else (0.1 * (group % 5) / 5, 0.1),
        )
        if curve.spread is not None and x:
            low = [value - width for value, width in zip(y, curve.spread, strict=True)]
            if log_y:
                low = [max(bound, value / 10) for bound, value in zip(low, y, strict=True)]
            high = [value + width for value, width in zip(y, curve.spread, strict=True)]
            axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
        entries.setdefault((curve.label if x else f"{curve.label} (no points)", group), line)
    return [(label, line) for (label, _), line in entries.items()]


def _log_locator(values: Sequence[float]) -> Locator:
    """Ticks of a logarithmic axis: at powers of two if all values are such, else as many as fit."""
    if len(set(values)) > 1 and all(math.log2(value).is_integer() for value in values):
        return LogLocator(base=2, numticks=12)
    decades = math.log10(max(values) / min(values))
    if 0 < decades < 0.7:
        return MaxNLocator(6)
    return LogLocator(subs=(1.0,) if decades > 3 else (1.0, 2.0, 5.0), numticks=12)


def _plain_number(value: float) -> str:
    """16,384 and 0.02 instead of powers of ten."""
    return f"{round(value):,}" if abs(value) >= 100_000 else f"{value:,.6g}"


def _add_legend(figure: Figure, axes: Axes, entries: Sequence[tuple[str, Line2D]]) -> None:
    """A legend among few curves, or beside many, where the picture grows with the number of names."""
    names = [_wrap(label) for label, _ in entries]
    if names in ([], [""]):
        return
    lines = sum(name.count("\n") + 1 for name in names)
    size = 10.0 if lines <= 24 else 8.0
    place: dict[str, Any] = {"loc": "outside right upper"} if len(names) > MAX_INSIDE else {"loc": "best"}
    owner: Any = figure if len(names) > MAX_INSIDE else axes
    add_legend(
        owner,
        [line for _, line in entries],
        names,
        fontsize=size,
        handlelength=3.5,
        labelspacing=0.4,
        frameon=len(names) <= MAX_INSIDE,
        framealpha=0.85,
        **place,
    )
    figure.set_figheight(max(HEIGHT, 1 + lines * size * 1.45 / 72))


def _wrap(label: str) -> str:
    """A long name on several lines, broken after spaces and the signs that join keys and values."""
    lines = [""]
    for piece in re.findall(r"[^\s,=/.]*[\s,=/.]+|[^\s,=/.]+", label):
        if len(lines[-1]) + len(piece.rstrip()) > LABEL_WIDTH and lines[-1]:
            lines.append("")
        lines[-1] += piece
    return "\n".join(part for line in lines for part in textwrap.wrap(line, LABEL_WIDTH))
