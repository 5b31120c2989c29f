"""Plots as terminal text: heat maps of half blocks, lines of dots, training curves in braille.

Colours are 24-bit, from the 256-colour palette, or absent: then a heat map uses shades of plain ASCII, denser is more,
and each line has a letter. Every function takes the width it may use and returns whole lines.
"""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any, Literal

import numpy as np

from tformer.support.errors import visible
from tformer.support.formatting import without_middle
from tformer.viz.plot.series import Panel, Series, better, label_of
from tformer.viz.plots import Colour, Heat, Lines, Numbers, Plot, colour_at, palette_colour, plain, ticks

Colours = Literal["truecolor", "256", "none"]
SHADES = " .:-=+*#%@"
NOTHING = "/"  # a cell without a number, without colours
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
RESET = "\x1b[0m"
HEAT_ROWS, PLOT_ROWS = 40, 18  # largest number of cells, and of characters


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


def draw_lines(plot: Lines, *, width: int, colour: Colours) -> list[str]:
    """The lines in a frame with the ends of both axes, and the names of the lines."""
    x_ends = _limits([line.x for line in plot.lines], plot.log_x, lambda _: 0.5)
    x_ends = x_ends or ((1.0, 10.0) if plot.log_x else (0.0, 1.0))
    y_ends = _limits([line.y for line in plot.lines], plot.log_y, lambda _: 0.5)
    y_ends = y_ends or ((1.0, 10.0) if plot.log_y else (0.0, 1.0))
    tiny = 0.0 if plot.log_y else 1e-6 * (y_ends[1] - y_ends[0])
    labels = [_number(end if abs(end) > tiny else 0.0) for end in (y_ends[1], y_ends[0])]
    margin = max(map(len, labels))
    columns, rows = max(width - margin - 2, 10), PLOT_ROWS
    grid: list[list[str]] = [[" "] * columns for _ in range(rows)]
    for number, line in enumerate(plot.lines):
        mark = _mark(plot, number, colour)
        places, values = _interpolated(line.x, line.y, plot, x_ends, columns)
        for x, place in zip(places, _shares(values, *y_ends, plot.log_y), strict=True):
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
        lines.append("")
        used = 0  # columns of the last line, which the length of a mark with its colour does not tell
        for number, line in enumerate(plot.lines):
            name = visible(line.label)
            if used and used + len(name) + 5 > width:
                lines.append("")
                used = 0
            lines[-1] += ("   " if used else "") + f"{_mark(plot, number, colour)} {name}"
            used += len(name) + 5
    return lines


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


def _mark(plot: Lines, number: int, colour: Colours) -> str:
    if colour == "none":
        return (
            shade(max(plot.share(number), 1 / len(SHADES))) if plot.ramp is not None else LETTERS[number % len(LETTERS)]
        )
    return f"\x1b[{colour_code(plot.colour(number), colour, ground=False)}m•{RESET}"


def _limits(columns: Sequence[Numbers], log: bool, wider: Callable[[float], float]) -> tuple[float, float] | None:
    """The smallest and the largest value that can be shown; a single one gets room on both sides. None: no value."""
    values = np.concatenate([*columns, np.zeros(0)])
    values = values[np.isfinite(values) & ((values > 0) | (not log))]
    if not len(values):
        return None
    low, high = float(values.min()), float(values.max())
    if low == high:
        return (low / 2, high * 2) if log else (low - wider(low), high + wider(high))
    return low, high


def _interpolated(
    x: Numbers, y: Numbers, plot: Lines, ends: tuple[float, float], columns: int
) -> tuple[Numbers, Numbers]:
    """Places along x in 0 … 1 with their y; a line from left to right gets points between the given ones."""
    places = _shares(x, *ends, plot.log_x)
    if len(places) < 2 or plot.points or np.any(np.diff(places) <= 0):
        return places, y
    fine = np.linspace(places[0], places[-1], 2 * columns)
    return fine, np.interp(fine, places, y)


ROWS = 14  # of characters
LEAST_WIDTH = 24
BRAILLE = 0x2800
BITS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # bit of each dot, by row and column in its cell

Cells = list[list[tuple[int, int]]]  # (braille bits, series) of each cell; series -1: none


def draw_text(
    panels: Sequence[Panel],
    *,
    title: str,
    x_label: str,
    width: int,
    colour: Colours,
    log_x: bool = False,
    log_y: bool = False,
) -> str:
    """All panels of training curves, one below the other, in lines of at most `width` columns."""
    width = max(width, LEAST_WIDTH)
    lines = [*textwrap.wrap(visible(title), width), ""] if title else []
    for panel in panels:
        lines += [*_panel(panel, x_label, width, colour, (log_x, log_y)), ""]
    return "\n".join(lines)


def _panel(panel: Panel, x_label: str, width: int, colour: Colours, log: tuple[bool, bool]) -> list[str]:
    logged = [series.raw for series in panel.series if series.raw is not None]
    x_limits = _limits([series.x for series in panel.series], log[0], lambda value: (abs(value) or 1) / 10)
    y_limits = _limits([*(series.y for series in panel.series), *logged], log[1], lambda value: (abs(value) or 1) / 10)
    if x_limits is None or y_limits is None:
        return [label_of(panel.metric), "no values that these axes can show"]
    (left, right), (low, high) = x_limits, y_limits
    y_ticks = ticks(low, high, log=log[1], most=6)
    margin = max((len(plain(value)) for value in y_ticks), default=1)
    columns = width - margin - 2
    letters = colour == "none" and len(panel.series) > 1
    cells: Cells = [[(0, -1)] * columns for _ in range(ROWS)]
    x = [_shares(series.x, left, right, log[0]) for series in panel.series]
    if colour != "none":
        for number, series in enumerate(panel.series):
            if series.raw is not None:
                _draw(cells, x[number], _shares(series.raw, low, high, log[1]), number + len(panel.series))
    for number, series in reversed(list(enumerate(panel.series))):
        _draw(cells, x[number], _shares(series.y, low, high, log[1]), number)
    places = _shares(np.array(y_ticks), low, high, log[1]).tolist()
    names = {
        min(max(ROWS - 1 - int(place * ROWS), 0), ROWS - 1): value for value, place in zip(y_ticks, places, strict=True)
    }
    lines = [visible(label_of(panel.metric))]
    for row, line in enumerate(cells):
        label = plain(names[row]) if row in names else ""
        body = "".join(_runs(line, panel.series, colour, letters)).rstrip()
        lines.append(f"{label:>{margin}} {'┤' if label else '│'}{body}")
    lines += _x_axis(left, right, log[0], columns, margin, x_label)
    return [*lines, *_legend(panel, width, colour, letters)]


def _shares(values: Numbers, low: float, high: float, log: bool) -> Numbers:
    """Places of values between low (0) and high (1); NaN where a logarithm is undefined."""
    if log:
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(values > 0, np.log(values / low) / math.log(high / low), np.nan)
    return (values - low) / (high - low)


def _draw(cells: Cells, x: Numbers, y: Numbers, number: int) -> None:
    """Set the dots of a line, also between neighbours; a cell shows only the dots of the last line through it."""
    height, width = 4 * len(cells), 2 * len(cells[0])
    shown = np.flatnonzero(np.isfinite(x) & np.isfinite(y))
    column, row = np.round(x[shown] * (width - 1)), np.round((1 - y[shown]) * (height - 1))
    goes_on = [*(np.diff(shown) == 1), False]  # the next record follows without a gap
    for n in range(len(column)):
        across, down = (column[n + 1] - column[n], row[n + 1] - row[n]) if goes_on[n] else (0.0, 0.0)
        steps = max(int(max(abs(across), abs(down))), 1)
        for part in range(steps):
            dot, right = round(row[n] + down * part / steps), round(column[n] + across * part / steps)
            bits, owner = cells[dot // 4][right // 2]
            bit = BITS[dot % 4][right % 2]
            cells[dot // 4][right // 2] = (bits | bit if owner == number else bit, number)


def _runs(cells: Sequence[tuple[int, int]], series: Sequence[Series], colour: Colours, letters: bool) -> Iterator[str]:
    """The characters of a row of cells, with an escape sequence at each change of colour."""
    current = -1
    for bits, number in cells:
        if colour != "none" and number != current and (number >= 0 or current >= 0):
            yield RESET + (_series_code(series, number, colour) if number >= 0 else "")
            current = number
        if not bits:
            yield " "
        else:
            yield LETTERS[number % len(LETTERS)] if letters else chr(BRAILLE + bits)
    if current >= 0:
        yield RESET


def _series_code(series: Sequence[Series], number: int, colour: Colours) -> str:
    """The escape sequence for a series' colour; logged values behind a smoothed line have it half as strong."""
    faint = number >= len(series)
    own = palette_colour(number % len(series))
    red, green, blue = (round(0.45 * part + 0.55 * 110) if faint else part for part in own)
    return f"\x1b[{colour_code((red, green, blue), colour, ground=False)}m"


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


def _legend(panel: Panel, width: int, colour: Colours, letters: bool) -> list[str]:
    """A line for each series: its mark, its name, the last value and, if there is one, the best."""
    values = [_last_and_best(panel.metric, series) for series in panel.series]
    room = max(width - 4 - max(map(len, values)), 8)
    names = [without_middle(visible(series.label), room) for series in panel.series]
    longest = max(map(len, names))
    lines = []
    for number, (name, words) in enumerate(zip(names, values, strict=True)):
        mark = LETTERS[number % len(LETTERS)] if letters else "━━"
        if colour != "none":
            mark = f"{_series_code(panel.series, number, colour)}{mark}{RESET}"
        lines.append(f"{mark} {name:<{longest}} {words}")
    return lines


def _last_and_best(metric: str, series: Series) -> str:
    values = series.raw if series.raw is not None else series.y
    there = values[np.isfinite(values)]
    words = f" last {plain(float(there[-1]))}"
    if (end := better(metric)) is not None:
        words += f"  best {plain(float(there.min() if end == 'lower' else there.max()))}"
    return words
