"""Plots as terminal text: heat maps of half blocks, lines in braille.

Colours are 24-bit, from the 256-colour palette, or absent: then a heat map uses shades of plain ASCII, denser is more,
and each line has a letter. Every function takes the width it may use and returns whole lines.
"""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any, Literal

import numpy as np

from tformer.support.errors import visible
from tformer.support.formatting import without_middle
from tformer.viz.plot.series import MetricPanel, Series, better, label_of
from tformer.viz.plots import Colour, Heat, Line, LinePlot, Numbers, Plot, colour_at, plain, ticks

Colours = Literal["truecolor", "256", "none"]
SHADES = " .:-=+*#%@"
NOTHING = "/"  # a cell without a number, without colours
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
RESET = "\x1b[0m"
HEAT_ROWS = 40  # largest number of cells
ROWS = 14  # of characters, of lines
LEAST_WIDTH = 24
BRAILLE = 0x2800
BITS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # bit of each dot, by row and column in its cell

Cells = list[list[tuple[int, int]]]  # (braille bits, line) of each cell; line -1: none


def colour_support(stream: IO[Any], environment: Mapping[str, str] = os.environ) -> Colours:
    """Colours that a stream can show: none unless it is a terminal, and none if NO_COLOR is set."""
    terminal = environment.get("TERM", "")
    if environment.get("NO_COLOR") or not stream.isatty() or terminal == "dumb":
        return "none"
    if environment.get("COLORTERM", "").lower() in ("truecolor", "24bit"):
        return "truecolor"
    return "256" if terminal else "none"


def draw_plot(plot: Plot, *, width: int, colour: Colours) -> str:
    """Title, plot and caption, ending in a newline."""
    draw: Any = draw_heat if isinstance(plot, Heat) else draw_lines
    drawn = draw(plot, width=width, colour=colour)
    caption = textwrap.wrap(plot.caption, max(width, 20))
    return "\n".join([*textwrap.wrap(visible(plot.title), max(width, 20)), *drawn, *caption, ""])


def draw_heat(plot: Heat, *, width: int, colour: Colours) -> list[str]:
    """The map and its scale; neighbouring cells are averaged if there are more than fit."""
    low, high = plot.limits
    names = [visible(str(name)) for name in plot.rows]
    margin = min(max(map(len, names)), 12)
    room = max(width - margin - 1, 4)
    per_line = 1 if colour == "none" else 2
    cells, row_starts = _shrink(plot.values, HEAT_ROWS // (3 - per_line), room)
    share = (cells - low) / ((high - low) or 1.0)
    lines = []
    for top in range(0, len(cells), per_line):
        thinned = len(cells) > 8 and top % (2 * per_line)  # label every other line
        label = "" if thinned else names[row_starts[top]][:margin]
        if colour == "none":
            body = "".join(shade(value) for value in share[top])
        else:
            below = share[top + 1] if top + 1 < len(cells) else np.full(cells.shape[1], np.nan)
            body = _half_blocks(share[top], below, plot.colours, colour)
        lines.append(f"{label.rjust(margin)} {body}")
    ends = f"{visible(str(plot.columns[0]))} … {visible(str(plot.columns[-1]))}"
    lines.append(" " * (margin + 1) + f"{plot.column_label} {ends}; rows: {plot.row_label}")
    lines.append(" " * (margin + 1) + _scale(low, high, plot.colours, colour))
    return lines


def draw_lines(plot: LinePlot, *, width: int, colour: Colours) -> list[str]:
    """The lines in a frame with both axes, and a legend; without colours several lines are letters."""
    columns_x, columns_y = [line.x for line in plot.lines], [line.y for line in plot.lines]
    x_limits, y_limits = _limits(columns_x, plot.log_x), _limits(columns_y, plot.log_y)
    if x_limits is None or y_limits is None:
        return ["no values that these axes can show"]
    y_ticks = ticks(*y_limits, log=plot.log_y, most=6)
    margin = max((len(plain(value)) for value in y_ticks), default=1)
    columns = max(width - margin - 2, 10)
    cells: Cells = [[(0, -1)] * columns for _ in range(ROWS)]
    for number, line in enumerate(plot.lines):
        x, y = _shares(line.x, *x_limits, plot.log_x), _shares(line.y, *y_limits, plot.log_y)
        _draw(cells, x, y, number, joined=plot.joined)
    places = _shares(np.array(y_ticks), *y_limits, plot.log_y).tolist()
    names = {
        min(max(ROWS - 1 - int(place * ROWS), 0), ROWS - 1): value for value, place in zip(y_ticks, places, strict=True)
    }
    lines = [plot.y_label] if plot.y_label else []
    for row, line_of_cells in enumerate(cells):
        label = plain(names[row]) if row in names else ""
        body = "".join(_runs(line_of_cells, plot, colour)).rstrip()
        lines.append(f"{label:>{margin}} {'┤' if label else '│'}{body}")
    lines += _x_axis(*x_limits, plot.log_x, columns, margin, plot.x_label)
    if plot.ramp is not None:
        scale = _scale(plot.ramp.low, plot.ramp.high, plot.ramp.colours, colour)
        return [*lines, " " * (margin + 2) + f"{plot.ramp.label}: {scale}"]
    return [*lines, *_legend(plot, width, colour)]


def draw_curves(
    panels: Sequence[MetricPanel],
    *,
    title: str,
    x_label: str,
    width: int,
    colour: Colours,
    log_x: bool = False,
    log_y: bool = False,
) -> str:
    """All panels of training curves, one below the other; smoothed ones without what was logged."""
    width = max(width, LEAST_WIDTH)
    texts = [*textwrap.wrap(visible(title), width), ""] if title else []
    for panel in panels:
        values = [_last_and_best(panel.metric, series) for series in panel.series]
        room = max(width - 4 - max(map(len, values)), 8)
        names = [without_middle(visible(series.label), room) for series in panel.series]
        longest = max(map(len, names))
        labels = [f"{name:<{longest}} {found}" for name, found in zip(names, values, strict=True)]
        lines = [Line(label, series.x, series.y) for label, series in zip(labels, panel.series, strict=True)]
        plot = LinePlot(x_label, "", lines, log_x=log_x, log_y=log_y, title=label_of(panel.metric))
        texts.append(draw_plot(plot, width=width, colour=colour))
    return "\n".join(texts)


def _shrink(values: Numbers, rows: int, columns: int) -> tuple[Numbers, list[int]]:
    """(at most rows × columns cells, each the mean of the values it represents; the first row of each line)."""
    row_starts = np.unique(np.linspace(0, values.shape[0], min(rows, values.shape[0]) + 1).astype(int))
    column_starts = np.unique(np.linspace(0, values.shape[1], min(columns, values.shape[1]) + 1).astype(int))
    present = np.isfinite(values)

    def total(of: Numbers) -> Numbers:
        return np.add.reduceat(np.add.reduceat(of, row_starts[:-1], axis=0), column_starts[:-1], axis=1)

    with np.errstate(invalid="ignore"):
        means = total(np.where(present, values, 0.0)) / total(present.astype(float))
    return means, [int(start) for start in row_starts[:-1]]


def shade(share: float) -> str:
    """The ASCII character for a share of the scale, 0 to 1."""
    return NOTHING if math.isnan(share) else SHADES[min(max(int(share * len(SHADES)), 0), len(SHADES) - 1)]


def _half_blocks(upper: Numbers, lower: Numbers, name: str, colour: Colours) -> str:
    parts = []
    for top, bottom in zip(upper, lower, strict=True):
        codes = [RESET[2:-1]]
        if not math.isnan(top):
            codes.append(colour_code(colour_at(name, top), colour, ground=False))
        if not math.isnan(bottom):
            codes.append(colour_code(colour_at(name, bottom), colour, ground=True))
        parts.append(f"\x1b[{';'.join(codes)}m{' ' if math.isnan(top) else '▀'}")
    return "".join(parts) + RESET


def colour_code(rgb: Colour, colour: Colours, *, ground: bool) -> str:
    """The parameters of the escape sequence for this colour, of the background (`ground`) or of the text."""
    kind = 48 if ground else 38
    if colour == "truecolor":
        return f"{kind};2;{rgb[0]};{rgb[1]};{rgb[2]}"
    return f"{kind};5;{nearest_256(rgb)}"


def nearest_256(rgb: Colour) -> int:
    """Index of the nearest colour in the 6 × 6 × 6 cube and the 24 greys of the 256-colour palette."""
    levels = (0, 95, 135, 175, 215, 255)
    steps = [min(range(6), key=lambda n: abs(levels[n] - part)) for part in rgb]
    cube = (16 + 36 * steps[0] + 6 * steps[1] + steps[2], tuple(levels[step] for step in steps))
    grey = min(range(24), key=lambda n: abs(8 + 10 * n - sum(rgb) / 3))
    choices = (cube, (232 + grey, (8 + 10 * grey,) * 3))
    return min(choices, key=lambda choice: sum((a - b) ** 2 for a, b in zip(choice[1], rgb, strict=True)))[0]


def _scale(low: float, high: float, name: str, colour: Colours) -> str:
    steps = np.linspace(0, 1, 20)
    body = "".join(map(shade, steps)) if colour == "none" else _half_blocks(steps, steps, name, colour)
    return f"{_number(low)} {body} {_number(high)}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() and abs(value) < 1e7 else f"{value:.4g}"


def _mark(plot: LinePlot, number: int, colour: Colours) -> str:
    """The mark of a line in the legend, and without colours in the plot."""
    if colour != "none" or len(plot.lines) == 1:
        return "━━"
    if plot.ramp is not None:
        return shade(max(plot.share(number), 1 / len(SHADES)))
    return LETTERS[number % len(LETTERS)]


def _limits(columns: Sequence[Numbers], log: bool) -> tuple[float, float] | None:
    """The smallest and the largest value that can be shown; a single one gets room on both sides. None: no value."""
    values = np.concatenate([*columns, np.zeros(0)])
    values = values[np.isfinite(values) & ((values > 0) | (not log))]
    if not len(values):
        return None
    low, high = float(values.min()), float(values.max())
    if low == high:
        beside = (abs(low) or 1) / 10
        return (low / 2, high * 2) if log else (low - beside, high + beside)
    return low, high


def _shares(values: Numbers, low: float, high: float, log: bool) -> Numbers:
    """Places of values between low (0) and high (1); NaN where a logarithm is undefined."""
    if log:
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(values > 0, np.log(values / low) / math.log(high / low), np.nan)
    return (values - low) / (high - low)


def _draw(cells: Cells, x: Numbers, y: Numbers, number: int, *, joined: bool) -> None:
    """Set the dots of a line, also between neighbours; a cell shows only the dots of the last line through it."""
    height, width = 4 * len(cells), 2 * len(cells[0])
    shown = np.flatnonzero(np.isfinite(x) & np.isfinite(y))
    column, row = np.round(x[shown] * (width - 1)), np.round((1 - y[shown]) * (height - 1))
    goes_on = [*(np.diff(shown) == 1), False]  # the next value follows without a gap
    for n in range(len(column)):
        across, down = (column[n + 1] - column[n], row[n + 1] - row[n]) if joined and goes_on[n] else (0.0, 0.0)
        steps = max(int(max(abs(across), abs(down))), 1)
        for part in range(steps):
            dot, right = round(row[n] + down * part / steps), round(column[n] + across * part / steps)
            bits, owner = cells[dot // 4][right // 2]
            bit = BITS[dot % 4][right % 2]
            cells[dot // 4][right // 2] = (bits | bit if owner == number else bit, number)


def _runs(cells: Sequence[tuple[int, int]], plot: LinePlot, colour: Colours) -> Iterator[str]:
    """The characters of a row of cells, with an escape sequence at each change of colour."""
    current = -1
    for bits, number in cells:
        if colour != "none" and number != current:
            yield RESET if number < 0 else _ink(plot, number, colour)
            current = number
        if not bits:
            yield " "
        else:
            yield chr(BRAILLE + bits) if colour != "none" or len(plot.lines) == 1 else _mark(plot, number, colour)
    if current >= 0:
        yield RESET


def _ink(plot: LinePlot, number: int, colour: Colours) -> str:
    """The escape sequence for the colour of a line."""
    return f"\x1b[{colour_code(plot.colour(number), colour, ground=False)}m"


def _x_axis(left: float, right: float, log: bool, columns: int, margin: int, label: str) -> list[str]:
    frame, words = ["─"] * columns, [" "] * (columns + margin + 2)
    end = -1
    values = ticks(left, right, log=log, most=max(columns // 12, 2))
    for value, place in zip(values, _shares(np.array(values), left, right, log).tolist(), strict=True):
        at = min(round(place * (columns - 1)), columns - 1)
        text = plain(value)
        start = min(max(margin + 2 + at - len(text) // 2, 0), len(words) - len(text))
        if start > end:  # labels must not overlap
            words[start : start + len(text)] = text
            frame[at] = "┬"
            end = start + len(text)
    centred = label.center(columns).rstrip()
    return [" " * (margin + 1) + "└" + "".join(frame), "".join(words).rstrip(), " " * (margin + 2) + centred]


def _legend(plot: LinePlot, width: int, colour: Colours) -> list[str]:
    """Mark and name of each line, as many beside each other as there is room for."""
    lines, used = [""], 0  # columns of the last line, which its length with colours does not tell
    for number, line in enumerate(plot.lines):
        mark, name = _mark(plot, number, colour), visible(line.label)
        columns = len(mark) + 1 + len(name)
        if used and used + 3 + columns > width:
            lines.append("")
            used = 0
        shown = mark if colour == "none" else f"{_ink(plot, number, colour)}{mark}{RESET}"
        lines[-1] += ("   " if used else "") + f"{shown} {name}"
        used += columns + 3 * bool(used)
    return lines


def _last_and_best(metric: str, series: Series) -> str:
    values = series.raw if series.raw is not None else series.y
    there = values[np.isfinite(values)]
    words = f" last {plain(float(there[-1]))}"
    if (end := better(metric)) is not None:
        words += f"  best {plain(float(there.min() if end == 'lower' else there.max()))}"
    return words
