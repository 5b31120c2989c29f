"""Curves in characters: dots of braille, 2 by 4 in a cell, or letters where several lines must do without colour."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from tformer.errors import visible
from tformer.viz.colours import PALETTE
from tformer.viz.plot.series import Panel, Series, better, label_of
from tformer.viz.plot.ticks import plain, ticks
from tformer.viz.plots import Numbers
from tformer.viz.terminal import RESET, Colour, nearest_256

ROWS = 14  # of characters
LEAST_WIDTH = 24
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
BRAILLE = 0x2800
BITS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of a dot, by row and column in its cell

Cells = list[list[tuple[int, int]]]  # (braille bits, series) of each cell; series -1: none


def draw_text(
    panels: Sequence[Panel],
    *,
    title: str,
    x_label: str,
    width: int,
    colour: Colour,
    log_x: bool = False,
    log_y: bool = False,
) -> str:
    """All panels, one under the other, in lines of at most `width` columns."""
    width = max(width, LEAST_WIDTH)
    lines = [*textwrap.wrap(visible(title), width), ""] if title else []
    for panel in panels:
        lines += [*_panel(panel, x_label, width, colour, (log_x, log_y)), ""]
    return "\n".join(lines)


def _panel(panel: Panel, x_label: str, width: int, colour: Colour, log: tuple[bool, bool]) -> list[str]:
    limits = _limits(panel.series, "x", log[0]), _limits(panel.series, "y", log[1])
    if limits[0] is None or limits[1] is None:
        return [label_of(panel.metric), "nothing that these axes can show"]
    (left, right), (low, high) = limits[0], limits[1]
    y_ticks = ticks(low, high, log=log[1], most=6)
    margin = max((len(plain(value)) for value in y_ticks), default=1)
    columns = width - margin - 2
    letters = colour == "none" and len(panel.series) > 1
    cells: Cells = [[(0, -1)] * columns for _ in range(ROWS)]
    x = [_share(series.x, left, right, log[0]) for series in panel.series]
    if colour != "none":
        for number, series in enumerate(panel.series):
            if series.raw is not None:
                _draw(cells, x[number], _share(series.raw, low, high, log[1]), number + len(panel.series))
    for number, series in reversed(list(enumerate(panel.series))):
        _draw(cells, x[number], _share(series.y, low, high, log[1]), number)
    names = {min(max(ROWS - 1 - int(_one(value, low, high, log[1]) * ROWS), 0), ROWS - 1): value for value in y_ticks}
    lines = [visible(label_of(panel.metric))]
    for row, line in enumerate(cells):
        label = plain(names[row]) if row in names else ""
        body = "".join(_runs(line, panel.series, colour, letters)).rstrip()
        lines.append(f"{label:>{margin}} {'┤' if label else '│'}{body}")
    lines += _x_axis(left, right, log[0], columns, margin, x_label)
    return [*lines, *_legend(panel, width, colour, letters)]


def _limits(series: Sequence[Series], axis: str, log: bool) -> tuple[float, float] | None:
    """From the least to the greatest value that can be shown; of y as drawn and as logged."""
    columns = [getattr(line, axis) for line in series]
    if axis == "y":
        columns += [line.raw for line in series if line.raw is not None]
    values = np.concatenate(columns)
    values = values[np.isfinite(values) & ((values > 0) | (not log))]
    if not len(values):
        return None
    low, high = float(values.min()), float(values.max())
    if low == high:
        return (low / 2, high * 2) if log else (low - (abs(low) or 1) / 10, high + (abs(high) or 1) / 10)
    return low, high


def _share(values: Numbers, low: float, high: float, log: bool) -> Numbers:
    """Where values lie from low, 0, to high, 1; NaN for what cannot be shown."""
    if log:
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(values > 0, np.log(values / low) / math.log(high / low), np.nan)
    return (values - low) / (high - low)


def _one(value: float, low: float, high: float, log: bool) -> float:
    return float(_share(np.array([value]), low, high, log)[0])


def _draw(cells: Cells, x: Numbers, y: Numbers, number: int) -> None:
    """Sets the dots of a line; a cell belongs to the last line through it, and shows that line's dots only."""
    height, width = 4 * len(cells), 2 * len(cells[0])
    shown = np.flatnonzero(np.isfinite(x) & np.isfinite(y))
    column, row = np.round(x[shown] * (width - 1)), np.round((1 - y[shown]) * (height - 1))
    joined = np.diff(shown) == 1  # nothing is missing between a value and the next
    for down, right in _dots(column, row, joined):
        bits, owner = cells[down // 4][right // 2]
        bit = BITS[down % 4][right % 2]
        cells[down // 4][right // 2] = (bits | bit if owner == number else bit, number)


def _dots(column: Numbers, row: Numbers, joined: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """(row, column) of every dot: the values', and between two that are joined those of a straight line."""
    seen: set[tuple[int, int]] = set()
    for n in range(len(column)):
        goes_on = n + 1 < len(column) and bool(joined[n])
        across, down = (column[n + 1] - column[n], row[n + 1] - row[n]) if goes_on else (0.0, 0.0)
        steps = max(int(max(abs(across), abs(down))), 1)
        for part in range(steps):
            dot = round(row[n] + down * part / steps), round(column[n] + across * part / steps)
            if dot not in seen:
                seen.add(dot)
                yield dot


def _runs(cells: Sequence[tuple[int, int]], series: Sequence[Series], colour: Colour, letters: bool) -> Iterator[str]:
    """A line's characters; the colour is named where it changes."""
    current = -1
    for bits, number in cells:
        if colour != "none" and number != current and (number >= 0 or current >= 0):
            yield RESET + (_code(series, number, colour) if number >= 0 else "")
            current = number
        if not bits:
            yield " "
        else:
            yield LETTERS[number % len(LETTERS)] if letters else chr(BRAILLE + bits)
    if current >= 0:
        yield RESET


def _code(series: Sequence[Series], number: int, colour: Colour) -> str:
    """The escape sequence of a line, each its own colour; the values behind a smoothed one have it half as strong."""
    faint = number >= len(series)
    hexed = PALETTE[number % len(series) % len(PALETTE)]
    red, green, blue = (round(0.45 * part + 0.55 * 110) if faint else part for part in bytes.fromhex(hexed[1:]))
    if colour == "truecolor":
        return f"\x1b[38;2;{red};{green};{blue}m"
    return f"\x1b[38;5;{nearest_256((red, green, blue))}m"


def _x_axis(left: float, right: float, log: bool, columns: int, margin: int, label: str) -> list[str]:
    frame, words = ["─"] * columns, [" "] * (columns + margin + 2)
    end = -1
    for value in ticks(left, right, log=log, most=max(columns // 12, 2)):
        at = min(round(_one(value, left, right, log) * (columns - 1)), columns - 1)
        text = plain(value)
        start = min(max(margin + 2 + at - len(text) // 2, 0), len(words) - len(text))
        if start > end:  # no number over another
            words[start : start + len(text)] = text
            frame[at] = "┬"
            end = start + len(text)
    centred = label.center(columns).rstrip()
    return [" " * (margin + 1) + "└" + "".join(frame), "".join(words).rstrip(), " " * (margin + 2) + centred]


def _legend(panel: Panel, width: int, colour: Colour, letters: bool) -> list[str]:
    """A line for each series: its sign, its name, the last value and, where there is one, the best."""
    values = [_last_and_best(panel.metric, series) for series in panel.series]
    room = max(width - 4 - max(map(len, values)), 8)
    names = [_shortened(visible(series.label), room) for series in panel.series]
    longest = max(map(len, names))
    lines = []
    for number, (name, words) in enumerate(zip(names, values, strict=True)):
        mark = LETTERS[number % len(LETTERS)] if letters else "━━"
        if colour != "none":
            mark = f"{_code(panel.series, number, colour)}{mark}{RESET}"
        lines.append(f"{mark} {name:<{longest}} {words}")
    return lines


def _last_and_best(metric: str, series: Series) -> str:
    values = series.raw if series.raw is not None else series.y
    there = values[np.isfinite(values)]
    words = f" last {plain(float(there[-1]))}"
    if (end := better(metric)) is not None:
        words += f"  best {plain(float(there.min() if end == 'lower' else there.max()))}"
    return words


def _shortened(name: str, room: int) -> str:
    """Without its middle, for names differ at both ends."""
    if len(name) <= room:
        return name
    tail = (room - 1) // 2
    return f"{name[: room - 1 - tail]}…{name[len(name) - tail :]}"
