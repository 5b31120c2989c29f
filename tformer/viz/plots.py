"""What a plot is, apart from how it is drawn: a heat map or lines, with the words that belong to it.

A view computes plots once; the same plots become a picture, characters in a terminal, JSON or CSV.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Ramp:
    """Many lines told apart by a colour map instead of a legend: line n of N has the map's colour at n / (N - 1)."""

    colours: str
    low: float
    high: float
    label: str


@dataclass(frozen=True)
class Line:
    """y against x, both [n]."""

    label: str
    x: Numbers
    y: Numbers


@dataclass(frozen=True)
class Lines:
    """Lines over common axes.

    Attributes:
        title, caption: what it is, and a sentence on what to see.
        points: mark each value.
        square: equal lengths of both units.
    """

    title: str
    caption: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    log_x: bool = False
    log_y: bool = False
    ramp: Ramp | None = None
    points: bool = False
    square: bool = False


@dataclass(frozen=True)
class Heat:
    """values [rows, columns]; NaN is nothing, not a number of the scale.

    Attributes:
        rows, columns: what each row and column is called: numbers that count up evenly, or words.
        minimum, maximum: the ends of the colours; None: those of the values.
    """

    title: str
    caption: str
    values: Numbers
    rows: Sequence[Any]
    columns: Sequence[Any]
    row_label: str
    column_label: str
    colours: str
    minimum: float | None = None
    maximum: float | None = None
    value_label: str = ""

    @property
    def limits(self) -> tuple[float, float]:
        finite = self.values[np.isfinite(self.values)]
        ends = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
        return (
            ends[0] if self.minimum is None else self.minimum,
            ends[1] if self.maximum is None else self.maximum,
        )


Plot = Lines | Heat
