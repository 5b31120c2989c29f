"""Plots, and reports that have plots and numbers, as one output in any format: a page, a picture, text, JSON or CSV."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tformer.support.formatting import csv_text, json_text
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
        return "\n".join([title, "", *(draw_plot(plot, **surface(to_file)) for plot in plots)])
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


def surface(to_file: bool) -> dict[str, Any]:
    """The width and the colours that text in a file or on the terminal may have."""
    if to_file:
        return {"width": FILE_WIDTH, "colour": "none"}
    return {"width": min(shutil.get_terminal_size().columns, LARGEST_WIDTH), "colour": colour_support(sys.stdout)}


@dataclass(frozen=True)
class ReportView:
    """A report in numbers and plots, from which every format is made.

    Attributes:
        title: above pictures; {} is the name of the run.
        document: its JSON. table: the rows of CSV, the heading first; None: the numbers of the plots.
        text: in a terminal, called with `width` and `colour`; None: the drawn plots.
        page: called with `title` and `notes`; None: a page of the plots, with `subtitle` and `notes`.
    """

    title: str
    document: Callable[[], Any]
    plots: Callable[[], Sequence[Plot]]
    table: Callable[[], Sequence[Sequence[Any]]] | None = None
    text: Callable[..., str] | None = None
    page: Callable[..., str] | None = None
    subtitle: str = ""
    notes: Sequence[str] = ()

    def render(self, format_: str, *, run: str = "", notes: Sequence[str] = (), to_file: bool = True) -> str | bytes:
        """The content of a file, or of standard output, in one of `output.FORMATS`. notes: of a page, after its own."""
        words: dict[str, Any] = {"title": self.title.replace("{}", run), "notes": (*self.notes, *notes)}
        if format_ == "json":
            return json_text(self.document())
        if format_ == "csv" and self.table is not None:
            return csv_text(self.table())
        if format_ == "terminal" and self.text is not None:
            return self.text(**surface(to_file))
        if format_ == "html" and self.page is not None:
            return self.page(**words)
        return render_plots(self.plots(), format_, to_file=to_file, subtitle=self.subtitle, **words)


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
