"""Plots as numbers: one JSON document, or CSV with a value a row."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from typing import Any

from tformer.viz.plots import Heat, Line, Lines, Plot


def plots_to_json(plots: Sequence[Plot]) -> list[dict[str, Any]]:
    """Each plot with its words; a heat map as rows of values, lines as pairs of x and y. No number is null."""
    return [_heat(plot) if isinstance(plot, Heat) else _lines(plot) for plot in plots]


def _heat(plot: Heat) -> dict[str, Any]:
    return {
        "title": plot.title,
        "caption": plot.caption,
        "row_label": plot.row_label,
        "column_label": plot.column_label,
        "rows": list(plot.rows),
        "columns": list(plot.columns),
        "values": [[value if math.isfinite(value) else None for value in row] for row in plot.values.tolist()],
    }


def _lines(plot: Lines) -> dict[str, Any]:
    return {
        "title": plot.title,
        "caption": plot.caption,
        "x_label": plot.x_label,
        "y_label": plot.y_label,
        "lines": [{"label": line.label, "points": _points(line)} for line in plot.lines],
    }


def plots_to_csv(plots: Sequence[Plot]) -> str:
    """Columns plot, line, x, y: for a heat map the row's name, the column's and the value."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(("plot", "line", "x", "y"))
    for plot in plots:
        if isinstance(plot, Heat):
            for name, row in zip(plot.rows, plot.values.tolist(), strict=True):
                cells = zip(plot.columns, row, strict=True)
                writer.writerows((plot.title, name, column, value) for column, value in cells if math.isfinite(value))
            continue
        for line in plot.lines:
            writer.writerows((plot.title, line.label, x, y) for x, y in _points(line))
    return stream.getvalue()


def _points(line: Line) -> list[tuple[float, float]]:
    """Without the gaps of a line in pieces."""
    pairs = zip(line.x.tolist(), line.y.tolist(), strict=True)
    return [(x, y) for x, y in pairs if math.isfinite(x) and math.isfinite(y)]
