"""Plots in characters: heat maps of half blocks, two rows of cells a line, and lines of dots.

Colours are 24-bit, of the 256-colour palette, or none: then a heat map is shades of plain ASCII, denser is more, and
each line has a letter. Every function takes the width it may use and returns whole lines.
"""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Mapping, Sequence
from typing import IO, Any, Literal

import numpy as np

from tformer.errors import visible
from tformer.viz.colours import PALETTE, colour_at
from tformer.viz.plots import Heat, Lines, Numbers, Plot

Colour = Literal["truecolor", "256", "none"]
SHADES = " .:-=+*#%@"
NOTHING = "/"  # a cell without a number, where there are no colours
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
RESET = "\x1b[0m"
HEAT_ROWS, PLOT_ROWS = 40, 18  # of cells, and of characters, at most


def colour_support(stream: IO[Any], environment: Mapping[str, str] = os.environ) -> Colour:
    """What a stream shows: nothing but text unless it is a terminal, and never colour against NO_COLOR."""
    terminal = environment.get("TERM", "")
    if environment.get("NO_COLOR") or not stream.isatty() or terminal == "dumb":
        return "none"
    if environment.get("COLORTERM", "").lower() in ("truecolor", "24bit"):
        return "truecolor"
    return "256" if terminal else "none"


def draw_plot(plot: Plot, *, width: int, colour: Colour) -> str:
    """Title, plot and caption, ending in a newline."""
    draw: Any = draw_heat if isinstance(plot, Heat) else draw_lines
    drawn = draw(plot, width=width, colour=colour)
    caption = textwrap.wrap(plot.caption, max(width, 20))
    return "\n".join([*textwrap.wrap(visible(plot.title), max(width, 20)), *drawn, *caption, ""])


def draw_heat(plot: Heat, *, width: int, colour: Colour) -> list[str]:
    """The map, made smaller by averaging where it has more cells than there is room for, and its scale."""
    low, high = plot.limits
    names = [visible(str(name)) for name in plot.rows]
    margin = min(max(map(len, names)), 12)
    room = max(width - margin - 1, 4)
    per_line = 1 if colour == "none" else 2
    cells, row_starts = _shrink(plot.values, HEAT_ROWS // (3 - per_line), room)
    share = (cells - low) / ((high - low) or 1.0)
    lines = []
    for top in range(0, len(cells), per_line):
        thinned = len(cells) > 8 and top % (2 * per_line)  # a label every other line
        label = "" if thinned else names[row_starts[top]][:margin]
        if colour == "none":
            body = "".join(_shade(value) for value in share[top])
        else:
            below = share[top + 1] if top + 1 < len(cells) else np.full(cells.shape[1], np.nan)
            body = _half_blocks(share[top], below, plot.colours, colour)
        lines.append(f"{label.rjust(margin)} {body}")
    ends = f"{visible(str(plot.columns[0]))} … {visible(str(plot.columns[-1]))}"
    lines.append(" " * (margin + 1) + f"{plot.column_label} {ends}; rows: {plot.row_label}")
    lines.append(" " * (margin + 1) + _scale(low, high, plot.colours, colour))
    return lines


def draw_lines(plot: Lines, *, width: int, colour: Colour) -> list[str]:
    """The lines over a frame with the ends of both axes, and their names."""
    x_ends, y_ends = _ends(plot, "x", plot.log_x), _ends(plot, "y", plot.log_y)
    tiny = 0.0 if plot.log_y else 1e-6 * (y_ends[1] - y_ends[0])
    labels = [_number(end if abs(end) > tiny else 0.0) for end in (y_ends[1], y_ends[0])]
    margin = max(map(len, labels))
    columns, rows = max(width - margin - 2, 10), PLOT_ROWS
    grid: list[list[str]] = [[" "] * columns for _ in range(rows)]
    for number, line in enumerate(plot.lines):
        mark = _mark(plot, number, colour)
        for x, y in zip(*_dense(line.x, line.y, plot, x_ends, columns), strict=True):
            place = _share(y, y_ends, plot.log_y)
            if math.isfinite(place) and 0 <= place <= 1:
                grid[rows - 1 - round(place * (rows - 1))][min(int(x * columns), columns - 1)] = mark
    lines = [f"{plot.y_label}"] if plot.y_label else []
    for row, cells in enumerate(grid):
        label = labels[0] if row == 0 else labels[1] if row == rows - 1 else ""
        lines.append(f"{label.rjust(margin)} |{''.join(cells).rstrip()}")
    low, high = _number(x_ends[0]), _number(x_ends[1])
    middle = f"{low} {plot.x_label.center(max(columns - len(low) - len(high) - 2, 0))} {high}"
    lines += [" " * (margin + 1) + "+" + "-" * columns, " " * (margin + 2) + middle]
    if plot.ramp is not None:
        scale = _scale(plot.ramp.low, plot.ramp.high, plot.ramp.colours, colour)
        lines.append(" " * (margin + 2) + f"{plot.ramp.label}: {scale}")
    elif len(plot.lines) > 1:
        marks = [f"{_mark(plot, number, colour)} {visible(line.label)}" for number, line in enumerate(plot.lines)]
        lines += _wrapped(marks, [len(visible(line.label)) + 2 for line in plot.lines], width)
    return lines


def _shrink(values: Numbers, rows: int, columns: int) -> tuple[Numbers, list[int]]:
    """At most rows × columns cells, each the mean of those it stands for; and the first row that each line holds."""
    row_starts = np.unique(np.linspace(0, values.shape[0], min(rows, values.shape[0]) + 1).astype(int))
    column_starts = np.unique(np.linspace(0, values.shape[1], min(columns, values.shape[1]) + 1).astype(int))
    present = np.isfinite(values)

    def total(of: Numbers) -> Numbers:
        return np.add.reduceat(np.add.reduceat(of, row_starts[:-1], axis=0), column_starts[:-1], axis=1)

    with np.errstate(invalid="ignore"):
        means = total(np.where(present, values, 0.0)) / total(present.astype(float))
    return means, [int(start) for start in row_starts[:-1]]


def _shade(share: float) -> str:
    return NOTHING if math.isnan(share) else SHADES[min(max(int(share * len(SHADES)), 0), len(SHADES) - 1)]


def _half_blocks(upper: Numbers, lower: Numbers, name: str, colour: Colour) -> str:
    parts = []
    for top, bottom in zip(upper, lower, strict=True):
        codes = [RESET[2:-1]]
        if not math.isnan(top):
            codes.append(_code(colour_at(name, top), colour, ground=False))
        if not math.isnan(bottom):
            codes.append(_code(colour_at(name, bottom), colour, ground=True))
        parts.append(f"\x1b[{';'.join(codes)}m{' ' if math.isnan(top) else '▀'}")
    return "".join(parts) + RESET


def _code(rgb: tuple[int, int, int], colour: Colour, *, ground: bool) -> str:
    kind = 48 if ground else 38
    if colour == "truecolor":
        return f"{kind};2;{rgb[0]};{rgb[1]};{rgb[2]}"
    return f"{kind};5;{nearest_256(rgb)}"


def nearest_256(rgb: tuple[int, int, int]) -> int:
    """The nearest of the 6 × 6 × 6 cube and the 24 greys of the 256-colour palette."""
    levels = (0, 95, 135, 175, 215, 255)
    steps = [min(range(6), key=lambda n: abs(levels[n] - part)) for part in rgb]
    cube = (16 + 36 * steps[0] + 6 * steps[1] + steps[2], tuple(levels[step] for step in steps))
    grey = min(range(24), key=lambda n: abs(8 + 10 * n - sum(rgb) / 3))
    choices = (cube, (232 + grey, (8 + 10 * grey,) * 3))
    return min(choices, key=lambda choice: sum((a - b) ** 2 for a, b in zip(choice[1], rgb, strict=True)))[0]


def _scale(low: float, high: float, name: str, colour: Colour) -> str:
    steps = np.linspace(0, 1, 20)
    body = "".join(map(_shade, steps)) if colour == "none" else _half_blocks(steps, steps, name, colour)
    return f"{_number(low)} {body} {_number(high)}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() and abs(value) < 1e7 else f"{value:.4g}"


def _mark(plot: Lines, number: int, colour: Colour) -> str:
    share = number / max(len(plot.lines) - 1, 1)
    if colour == "none":
        return _shade(max(share, 1 / len(SHADES))) if plot.ramp is not None else LETTERS[number % len(LETTERS)]
    hexed = PALETTE[number % len(PALETTE)]
    rgb = colour_at(plot.ramp.colours, share) if plot.ramp else tuple(bytes.fromhex(hexed[1:]))
    return f"\x1b[{_code((rgb[0], rgb[1], rgb[2]), colour, ground=False)}m•{RESET}"


def _ends(plot: Lines, axis: Literal["x", "y"], log: bool) -> tuple[float, float]:
    values = np.concatenate([getattr(line, axis) for line in plot.lines]) if plot.lines else np.zeros(0)
    values = values[np.isfinite(values) & ((values > 0) | (not log))]
    if not len(values):
        return (1.0, 10.0) if log else (0.0, 1.0)
    low, high = float(values.min()), float(values.max())
    if low == high:
        return (low / 2, high * 2) if log else (low - 0.5, high + 0.5)
    return low, high


def _share(value: float, ends: tuple[float, float], log: bool) -> float:
    if log:
        return math.log(value / ends[0]) / math.log(ends[1] / ends[0]) if value > 0 else math.nan
    return (value - ends[0]) / (ends[1] - ends[0])


def _dense(
    x: Numbers, y: Numbers, plot: Lines, ends: tuple[float, float], columns: int
) -> tuple[Sequence[float], Sequence[float]]:
    """Places along x in 0 … 1 with their y: points between those given fill a line that goes from left to right."""
    places = np.array([_share(value, ends, plot.log_x) for value in x])
    if len(places) < 2 or plot.points or np.any(np.diff(places) <= 0):
        return places.tolist(), y.tolist()
    fine = np.linspace(places[0], places[-1], 2 * columns)
    return fine.tolist(), np.interp(fine, places, y).tolist()


def _wrapped(marks: list[str], lengths: list[int], width: int) -> list[str]:
    lines, used = [""], 0
    for mark, length in zip(marks, lengths, strict=True):
        if used and used + length + 3 > width:
            lines.append("")
            used = 0
        lines[-1] += ("   " if used else "") + mark
        used += length + 3
    return lines
