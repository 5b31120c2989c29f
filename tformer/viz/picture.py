"""Plots as one output in any format: a page, a picture, text, JSON or CSV."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from typing import Any

from tformer.viz.page import render_page
from tformer.viz.plots import Heat, Plot, plots_to_csv, plots_to_json
from tformer.viz.terminal import colour_support, draw_plot

FILE_WIDTH, LARGEST_WIDTH = 100, 160  # columns of text in a file, and of a terminal


def render_plots(
    plots: Sequence[Plot],
    format_: str,
    *,
    title: str,
    to_file: bool = True,
    subtitle: str = "",
    notes: Sequence[str] = (),
) -> str | bytes:
    """The content of a file, or of standard output, in one of `output.FORMATS`; `title` stands above all plots.

    subtitle, notes: of a page, below its title and at its end.
    """
    if format_ == "csv":
        return plots_to_csv(plots)
    if format_ == "json":
        return json.dumps({"title": title, "plots": plots_to_json(plots)}, ensure_ascii=False, allow_nan=False) + "\n"
    if format_ == "terminal":
        colour = "none" if to_file else colour_support(sys.stdout)
        width = FILE_WIDTH if to_file else min(shutil.get_terminal_size().columns, LARGEST_WIDTH)
        return "\n".join([title, "", *(draw_plot(plot, width=width, colour=colour) for plot in plots)])
    if format_ == "html":
        return render_page(
            title=title,
            subtitle=subtitle,
            body='<div id="plots" class="panels"></div>',
            scripts=("plots.js",),
            data={"plots": list(map(for_page, plots))},
            notes=notes,
            without=("controls.js", "table.js"),
        )
    from tformer.viz.figure import draw_plots  # imports matplotlib

    return draw_plots(plots, format_, heading=title)  # type: ignore[arg-type]


def for_page(plot: Plot) -> dict[str, Any]:
    """A plot as options of heatmap.js or lines.js."""
    words = {"title": plot.title, "caption": plot.caption}
    if isinstance(plot, Heat):
        low, high = plot.limits
        rows, columns = plot.values.shape
        return words | {"heat": True, "rows": rows, "cols": columns, "values": plot.values.ravel().tolist(), "min": low,
                        "max": high, "rowNames": list(plot.rows), "colNames": list(plot.columns), "cellSize": 90,
                        "rowTitle": plot.row_label, "colTitle": plot.column_label, "colours": plot.colours,
                        "barLabel": plot.value_label, "numbers": plot.shows_numbers}  # fmt: skip
    ends = {"xMin": 0, "xMax": 1, "yMin": 0, "yMax": 1.02} if plot.unit else {}
    series = [
        {"label": line.label, "x": line.x.tolist(), "y": line.y.tolist(), "points": plot.points}
        | ({} if line.spread is None else {"spread": line.spread.tolist()})
        for line in plot.lines
    ]
    return words | ends | {"series": series, "xLabel": plot.x_label, "yLabel": plot.y_label, "logX": plot.log_x,
                           "logY": plot.log_y, "square": plot.square}  # fmt: skip
