"""Plots as values: heat maps and lines, colour maps, axis ticks, and plots as JSON and CSV.

A view computes plots once; the same plots become a picture, characters in a terminal, JSON or CSV.

A colour map is a table of 256 colours, interpolated in sRGB between published anchors: every fifth entry of viridis,
and cividis (arXiv 1712.01662) as matplotlib has them (within 4 of 255), and the eleven colours of ColorBrewer's RdBu,
reversed so that red is positive. Lines use the colours of Okabe and Ito
(https://jfly.uni-koeln.de/color/), which remain distinguishable with any common colour blindness.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tformer.support.formatting import csv_text, finite_or_none

# Visible on white and on dark backgrounds: black and yellow, the ends of Okabe and Ito's list, are omitted.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")

COLOUR_MAPS: dict[str, str] = {
    "RdBu_r": "053061 2166ac 4393c3 92c5de d1e5f0 f7f7f7 fddbc7 f4a582 d6604d b2182b 67001f",
    "viridis": (
        "440154 46085c 471063 481769 481d6f 482475 472a7a 46307e 453781 433d84 414287 3f4889 3d4e8a 3a538b 38598c "
        "355e8d 33638d 31688e 2e6d8e 2c718e 2a768e 297b8e 27808e 25848e 23898e 218e8d 20928c 1f978b 1e9c89 1fa188 "
        "21a585 24aa83 28ae80 2eb37c 35b779 3dbc74 46c06f 50c46a 5ac864 65cb5e 70cf57 7cd250 89d548 95d840 a2da37 "
        "b0dd2f bddf26 cae11f d8e219 e5e419 f1e51d fde725"
    ),
    "cividis": (
        "00224e 002656 002a5f 002d68 003070 083370 163770 203a6f 273e6e 2e416d 34456c 3a486c 3f4c6c 444f6c 49536c "
        "4e566c 535a6d 575d6d 5c616e 60646f 656870 696b71 6d6f72 727274 767676 7a7a78 7e7d78 838179 888578 8d8878 "
        "928c78 969077 9b9476 a09875 a59c74 aaa073 afa471 b5a86f baac6d bfb06b c4b468 c9b965 cfbd62 d4c15f dac65b "
        "dfca57 e5cf52 ead34c f0d846 f6dd3f fce236 fee838"
    ),
}


@cache
def colour_table(name: str) -> bytes:
    """The 256 colours of a map, three bytes each: red, green, blue. KeyError for an unknown map."""
    anchors = [bytes.fromhex(anchor) for anchor in COLOUR_MAPS[name].split()]
    table = bytearray()
    for index in range(256):
        place = index / 255 * (len(anchors) - 1)
        left = min(int(place), len(anchors) - 2)
        share = place - left
        ends = zip(anchors[left], anchors[left + 1], strict=True)
        table.extend(round(low + share * (high - low)) for low, high in ends)
    return bytes(table)


Colour = tuple[int, int, int]  # red, green, blue, up to 255


def colour_at(name: str, share: float) -> Colour:
    """The colour at a place in the map, from 0 (low) to 1 (high); values outside take the nearest end."""
    index = 3 * round(255 * min(max(share, 0.0), 1.0))
    red, green, blue = colour_table(name)[index : index + 3]
    return red, green, blue


FACTORS = (1.0, 2.0, 2.5, 5.0, 10.0)


def ticks(low: float, high: float, *, log: bool, most: int) -> list[float]:
    """About `most` round numbers between low and high; for a logarithmic axis powers of ten and some between."""
    if log and (decades := math.log10(high / low)) > 0.7:
        every = max(1, math.ceil(decades / most))
        factors = (1, 2, 5) if 3 * decades <= most else (1, 3) if 2 * decades <= most else (1,)
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        found = [factor * 10.0**power for power in powers if power % every == 0 for factor in factors]
        return [value for value in found if low * 0.999 <= value <= high * 1.001]
    raw = (high - low) / max(most, 1)
    unit = 10.0 ** math.floor(math.log10(raw))
    step = unit * next(factor for factor in FACTORS if factor * unit >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    count = math.floor((high - first * step) / step + 1e-9) + 1
    return [float(f"{(first + n) * step:.12g}") for n in range(max(count, 0))]


def plain(value: float) -> str:
    """Four significant digits, or all of a whole number below a million: 16,384, 1.536M, 2.021, 6e-5."""
    for letter, size in (("G", 1e9), ("M", 1e6)):
        if size <= abs(value) < 1e13:
            return f"{value / size:,.4g}{letter}"
    if abs(value) < 1e6 and (value == round(value) or abs(value) >= 1e4):
        return f"{value:,.0f}"
    return f"{value:.4g}".replace("e-0", "e-").replace("e+", "e")


Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Ramp:
    """Colours of many lines, from a colour map instead of a legend: line n of N at n / (N - 1)."""

    colours: str
    low: float
    high: float
    label: str


@dataclass(frozen=True)
class Line:
    """y against x, both [n]. spread: [n] half the height of an error bar. names: [n] words beside them in pictures."""

    label: str
    x: Numbers
    y: Numbers
    spread: Numbers | None = None
    names: Sequence[str] = ()


def counted_line(label: str, y: Numbers) -> Line:
    """y against 0, 1, 2 ..."""
    return Line(label, np.arange(len(y), dtype=float), y)


@dataclass(frozen=True)
class LinePlot:
    """Lines over common axes.

    Attributes:
        points: mark each value. joined: False: pictures draw no line between them.
        square: equal scales of both axes.
        unit: both axes run from 0 to 1.
        title, caption: a heading, and a sentence on what to see.
    """

    x_label: str
    y_label: str
    lines: Sequence[Line]
    log_x: bool = False
    log_y: bool = False
    ramp: Ramp | None = None
    points: bool = False
    square: bool = False
    unit: bool = False
    title: str = ""
    caption: str = ""
    joined: bool = True

    def share(self, number: int) -> float:
        """The place of a line in the ramp, from 0 to 1."""
        return number / max(len(self.lines) - 1, 1)

    def colour(self, number: int) -> Colour:
        """The colour of a line: from the ramp, or the next of the palette, which wraps around."""
        if self.ramp:
            return colour_at(self.ramp.colours, self.share(number))
        red, green, blue = bytes.fromhex(PALETTE[number % len(PALETTE)][1:])
        return red, green, blue


UNIT_SQUARE: dict[str, Any] = {"unit": True, "square": True}  # options of LinePlot: axes from 0 to 1
MAX_NUMBERS = 20


@dataclass(frozen=True)
class Heat:
    """A heat map of values [rows, columns]; NaN is an empty cell.

    Attributes:
        rows, columns: names of rows and columns: consecutive numbers, or words.
        minimum, maximum: ends of the colour scale; None: those of the values.
        numbers: write the values into the cells of a map of up to `MAX_NUMBERS` rows and columns.
        words: to write into them instead [rows][columns].
        title, caption: a heading, and a sentence on what to see.
    """

    values: Numbers
    rows: Sequence[Any]
    columns: Sequence[Any]
    row_label: str
    column_label: str
    colours: str
    minimum: float | None = None
    maximum: float | None = None
    value_label: str = ""
    title: str = ""
    caption: str = ""
    numbers: bool = False
    words: Sequence[Sequence[str]] | None = None

    @property
    def shows_numbers(self) -> bool:
        return self.numbers and max(self.values.shape) <= MAX_NUMBERS

    @property
    def limits(self) -> tuple[float, float]:
        finite = self.values[np.isfinite(self.values)]
        ends = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
        return (ends[0] if self.minimum is None else self.minimum, ends[1] if self.maximum is None else self.maximum)


def counted_heat(values: Numbers, *facts: Any, **named: Any) -> Heat:
    """A heat map with rows and columns counted from 0; other arguments as for `Heat`, in its order."""
    rows, columns = map(range, values.shape)
    return Heat(values, rows, columns, *facts, **named)


Plot = LinePlot | Heat


def plots_to_json(plots: Sequence[Plot]) -> list[dict[str, Any]]:
    """Plots for JSON: titles, labels; a heat map as rows of values (None: an empty cell), lines as (x, y, spread)."""
    documents: list[dict[str, Any]] = []
    for plot in plots:
        if isinstance(plot, Heat):
            labels = {"row_label": plot.row_label, "column_label": plot.column_label}
            content = {
                "rows": list(plot.rows),
                "columns": list(plot.columns),
                "values": finite_or_none(plot.values.tolist()),
            }
        else:
            labels = {"x_label": plot.x_label, "y_label": plot.y_label}
            content = {"lines": [{"label": line.label, "points": _finite_points(line)} for line in plot.lines]}
        documents.append({"title": plot.title, "caption": plot.caption, **labels, **content})
    return documents


def plots_to_csv(plots: Sequence[Plot]) -> str:
    """CSV with the columns plot, line, x, y; for a heat map the names of row and column, and the value.

    Where lines have error bars, a last column holds half their height.
    """
    spreads = any(line.spread is not None for plot in plots if isinstance(plot, LinePlot) for line in plot.lines)
    rows: list[tuple[Any, ...]] = [("plot", "line", "x", "y", *(("spread",) if spreads else ()))]
    for plot in plots:
        if isinstance(plot, LinePlot):
            rows += [(plot.title, line.label, *numbers) for line in plot.lines for numbers in _finite_points(line)]
            continue
        for name, row in zip(plot.rows, plot.values.tolist(), strict=True):
            cells = zip(plot.columns, row, strict=True)
            rows += [(plot.title, name, column, value) for column, value in cells if math.isfinite(value)]
    return csv_text(rows)


def _finite_points(line: Line) -> list[tuple[float, ...]]:
    """The points of a line, x, y and the spread if it has one, without gaps (NaN)."""
    columns = (line.x, line.y) if line.spread is None else (line.x, line.y, line.spread)
    points = zip(*(column.tolist() for column in columns), strict=True)
    return [point for point in points if all(map(math.isfinite, point[:2]))]
